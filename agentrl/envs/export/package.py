"""Writes an environment as a package of others: a thin file that names it, and what belongs around it."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from agentrl.engine.chat.agent import openai_content
from agentrl.envs.base import BaseEnv, tasks_of
from agentrl.envs.boundary import call_close, call_reset
from agentrl.envs.export.world import ExportedWorld
from agentrl.envs.multi_agent import AgentView
from agentrl.envs.scaffold import PackageOrigin, words_of, write_package
from agentrl.envs.scoring import GroupReward
from agentrl.errors import UserError, did_you_mean
from agentrl.tools.secrets import literal_secret
from agentrl.types import JSON

_NEMO = "resources_servers/{package}"
FORMATS: Mapping[str, Mapping[str, str]] = {
    "verifiers": {
        "pyproject.toml": "verifiers/pyproject.toml.jinja",
        "README.md": "verifiers/README.md.jinja",
        "{package}.py": "verifiers/package.py.jinja",
    },
    "nemo-gym": {
        f"{_NEMO}/app.py": "nemo_gym/app.py.jinja",
        f"{_NEMO}/configs/{{package}}.yaml": "nemo_gym/config.yaml.jinja",
        f"{_NEMO}/requirements.txt": "nemo_gym/requirements.txt.jinja",
        f"{_NEMO}/README.md": "nemo_gym/README.md.jinja",
        f"{_NEMO}/tests/test_app.py": "nemo_gym/test_app.py.jinja",
    },
    "openenv": {
        "openenv.yaml": "openenv/openenv.yaml.jinja",
        "pyproject.toml": "openenv/pyproject.toml.jinja",
        "README.md": "openenv/README.md.jinja",
        "Dockerfile": "openenv/Dockerfile.jinja",
        "__init__.py": "openenv/init.py.jinja",
        "client.py": "openenv/client.py.jinja",
        "server/__init__.py": "openenv/server_init.py.jinja",
        "server/app.py": "openenv/app.py.jinja",
    },
    "ors": {
        "server.py": "ors/server.py.jinja",
        "requirements.txt": "ors/requirements.txt.jinja",
        "README.md": "ors/README.md.jinja",
        "Dockerfile": "ors/Dockerfile.jinja",
    },
}
"""The files of each format, by their paths, and the templates of these."""
_RECORDERS: Mapping[str, str] = {
    "verifiers": "verifiers",
    "nemo-gym": "NeMo Gym",
    "openenv": "OpenEnv's trainer",
    "ors": "the client's trainer",
}
"""What plays a package of each format, and records the tokens."""
_ROWS = f"{_NEMO}/data/example.jsonl"
_EPISODE_S = 600.0
"""What a package of OpenEnv declares where the environment has no deadline (seconds)."""
_MEMORY_MB = 2048
"""What it declares where the environment does not count its memory (MB)."""
_THIS = __name__.partition(".")[0]
_TAKEN = {*sys.stdlib_module_names, _THIS, "datasets", "openai", "openenv", "verifiers"}
"""Modules that an installed package of that name would hide from what plays it."""
_VERSION = re.compile(r"-v\d+$")


class WrittenPackage(NamedTuple):
    """What was written. package: its name. files: below the folder. lost: what the format cannot say."""

    package: str
    files: tuple[str, ...]
    lost: tuple[str, ...]


def export_env(
    env_id: str, kwargs: Mapping[str, JSON], format: str, folder: Path, *, rows: int = 5
) -> WrittenPackage:
    """Write an environment as a package of others into a new folder.

    format: of `FORMATS`. rows: of the data that NeMo Gym reads: first tasks of the first split (count).

    Raises:
        UserError: there is no such environment or format, the environment has no task, the folder exists or
            cannot be written, or an argument is a secret that is written out.
    """
    if format not in FORMATS:
        raise UserError(
            f"there is no format `{format}`.{did_you_mean(format, FORMATS)} There are {', '.join(FORMATS)}."
        )
    if folder.exists():
        raise UserError(f"{folder} exists already; choose another folder with --out.")
    if (place := literal_secret(kwargs)) is not None:
        raise UserError(f"the package would hold the secret `{place}`; write a variable, such as $KEY.")
    world = ExportedWorld(env_id, kwargs)
    world.tasks(world.splits[0])
    package, values = _values(world, kwargs, format)
    texts = {
        path.format(package=package): _rendered(template, values)
        for path, template in FORMATS[format].items()
    }
    if format == "nemo-gym":
        data = asyncio.run(_data(world, rows))
        texts[_ROWS.format(package=package)] = "".join(f"{json.dumps(row)}\n" for row in data)
    write_package(folder, texts, "--out")
    return WrittenPackage(package, tuple(texts), lost_in(world.example, format))


def _values(
    world: ExportedWorld, kwargs: Mapping[str, JSON], format: str
) -> tuple[str, Mapping[str, object]]:
    """The name of the package, and what the templates are filled with."""
    words = words_of(_VERSION.sub("", re.split("[/:]", world.env_id)[-1]).replace(".", "-"))
    package, (split, test_split) = "_".join(words), world.splits
    own = _distribution_of(world.module)
    is_installed = "pyproject.toml" in FORMATS[format]
    if is_installed and package in {world.module, re.sub(r"[-_.]+", "_", own.lower()), *_TAKEN}:
        package += f"_{format}"
    example, this = world.example, PackageOrigin.of_this()
    origin = this.pip_arguments()
    flags = f" --env-kwargs {shlex.quote(json.dumps(dict(kwargs)))}" if kwargs else ""
    return package, {
        "command": f"agentrl envs export {shlex.quote(world.env_id)}{flags} --format {format}",
        "own_package": own,
        "source": _source(this),
        "env_id": world.env_id,
        "kwargs": repr(dict(kwargs)),
        "package": package,
        "env_class": "".join(word.capitalize() for word in words),
        "about": world.about,
        "description": json.dumps(world.about),
        "agentrl": origin,
        "served": this.pip_arguments("openenv"),
        "requirement": " ".join(shlex.split(origin)),
        "split": split,
        "test_split": test_split,
        "turns": example.limits.max_turns,
        "agent": "simple_agent" if example.tool_schemas else "gymnasium_agent",
        "lowest": min(example.chance_score, 0.0),
        "highest": max(example.expert_score, 1.0),
        "oracle_tolerance": round(max(1.0 - example.expert_score, 0.0), 3),
        "floor_margin": round((example.expert_score - example.chance_score) / 2, 3),
        "cpus": example.resources.num_cpus,
        "memory_mb": round(1000 * example.resources.memory_gb) or _MEMORY_MB,
        "seconds": example.limits.episode_timeout_s or _EPISODE_S,
        "tools": json.dumps([tool.name for tool in example.tool_schemas]),
        "num_tasks": json.dumps({name: len(tasks_of(example, name)) for name in example.splits}),
        "lost": lost_in(example, format),
    }


def _distribution_of(module: str) -> str:
    """What pip calls the package of a module, else the module's own name; "" = it is agentrl's."""
    name = next(iter(packages_distributions().get(module, ())), module)
    return "" if _THIS in (name, module) else name


def _source(this: PackageOrigin) -> str:
    """Where a Dockerfile takes agentrl from, after "installs agentrl"."""
    if this.is_local:
        return "from a path of the machine that wrote it, which no image has"
    return "from an index" if this.direct_url is None else f"from {this.direct_url['url']}"


def lost_in(env: BaseEnv, format: str) -> tuple[str, ...]:
    """What an exported environment has no longer, a sentence each."""
    return tuple(sentence for sentence, applies in _lost(env, format) if applies)


def _lost(env: BaseEnv, format: str) -> Iterable[tuple[str, bool]]:
    theirs = _RECORDERS[format]
    yield f"Tokens, logprobs and policy versions are those that {theirs} records.", True
    max_tokens = env.limits.max_tokens
    unlimited = "verifiers 0.3" if format == "verifiers" else theirs
    yield (
        f"The limit of {max_tokens} tokens for an episode is not kept: {unlimited} has its own.",
        max_tokens is not None,
    )
    yield "The expert, demonstrations and saved states of episodes stay here.", True
    yield "A task has one world: its seed is fixed by the task's number.", True
    compares = [reward.name for reward in env.rewards if isinstance(reward, GroupReward)]
    yield f"Rewards that compare siblings see one episode: {', '.join(compares)}.", bool(compares)
    yield "The other agents are played by scripts.", isinstance(env, AgentView)
    if format == "verifiers":
        yield "In verifiers 0.4 it has no other harness, runtime, tools, user or system prompt.", True
    has_tools, here = bool(env.tool_schemas), PackageOrigin.of_this().is_local
    if format == "nemo-gym":
        yield "Images are left out: observations are text.", True
    if format == "ors":
        yield "Calls of unknown tools, and turns cut for length, are the client's: no world sees them.", True
        yield "A message of the model is a call of the tool `say`.", not has_tools
    if format in ("nemo-gym", "ors"):
        yield "A world that rewrites the conversation only adds to it.", True
        yield "Several calls in one turn reach the world as a turn each, which max_turns counts.", has_tools
        yield "A message without a call ends the episode.", has_tools
    if format == "openenv":
        yield "openenv.yaml declares rewards from 0 to 1 unless the scores of the class say more.", True
    if format in ("openenv", "ors"):
        yield "Its Dockerfile installs agentrl from this machine: put a URL or a release there.", here


def _rendered(template: str, values: Mapping[str, object]) -> str:
    loader = PackageLoader("agentrl.envs.export", "templates")
    # What is written is Python, TOML, YAML and Markdown, none of which a browser reads.
    environment = Environment(
        loader=loader,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
        trim_blocks=True,
    )
    return environment.get_template(template).render(values)


async def _data(world: ExportedWorld, num_rows: int) -> list[JSON]:
    """A row for each of the first tasks: the prompt of its world, and its tools."""
    rows: list[JSON] = []
    split, _ = world.splits
    for seed, task in enumerate(world.tasks(split)[:num_rows]):
        env = world.make()
        env.seed_rng(seed)
        observation, _ = await call_reset(env, task, seed=seed)
        messages: list[JSON] = [
            {"role": message.role, "content": openai_content(message)} for message in observation
        ]
        tools: list[JSON] = [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
                "strict": False,
            }
            for tool in env.tool_schemas
        ]
        await call_close(env)
        asked: JSON = {"input": messages, "tools": tools}
        rows.append({"responses_create_params": asked, "task": task.id, "split": split, "seed": seed})
    return rows
