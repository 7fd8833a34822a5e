"""docs/reference/environments.md: the classes of the environments that ship, and the arguments they take."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from agentrl.envs.multi_agent import AnyEnv
from agentrl.envs.registry import env_ids, families, find, matching

NAME = "environments.md"
INTRODUCTION = """\
# Environments that ship

The classes behind the ids, and their arguments: `--env-kwargs '{"seed": 1}'`, `env_kwargs = {seed = 1}` in a
run file, `agentrl.make("HopSearch-v0", seed=1)` in Python. The [table](../environments.md) says what each
trains and needs. A class can be derived from: `from envs_contrib.hop_search import HopSearch`.
"""


def page() -> str:
    """The text of the page."""
    ids: dict[type[AnyEnv], list[str]] = {}
    of_families = {id for pattern in families() for id in matching(pattern)}
    for id in env_ids():
        env_class = find(id).env_class
        if env_class.__module__.startswith("envs_contrib.") and id not in of_families:
            ids.setdefault(env_class, []).append(id)
    for pattern, family in families().items():
        ids.setdefault(find(next(iter(family))).env_class, []).append(pattern)
    parts = [INTRODUCTION]
    for env_class in sorted(ids, key=lambda each: each.__name__.lower()):
        parts += _section(env_class, ids[env_class])
    return "\n".join(parts)


def _section(env_class: type[AnyEnv], ids: list[str]) -> Iterator[str]:
    package = ".".join(env_class.__module__.split(".")[:2])
    yield f"## {env_class.__name__}\n"
    yield f"{', '.join(f'`{id}`' for id in sorted(ids))}: `{package}`\n"
    text = (inspect.getdoc(env_class) or "").partition("\n\nRaises")[0]
    yield text.replace("<", "&lt;").replace("*", r"\*") + "\n"
    # Those that an id sets are listed, too: a class may be registered under another id.
    every = inspect.signature(env_class).parameters.values()
    parameters = [each for each in every if each.kind is not each.VAR_KEYWORD]
    if not parameters:
        return
    yield "| argument | type | left out |\n|---|---|---|"
    for each in parameters:
        default = "" if each.default is each.empty else f"`{each.default!r}`"
        kind = "" if each.annotation is each.empty else f"`{each.annotation}`".replace("|", "\\|")
        yield f"| `{each.name}` | {kind} | {default} |"
    yield ""
