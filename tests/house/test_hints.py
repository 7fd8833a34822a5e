"""What a message tells its reader to do next exists: the command, the flag, the setting, the extra."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import Literal, get_args, get_origin

import click
import pytest

from agentrl.assembly.config import RunConfig, SftConfig
from agentrl.cli import cli
from agentrl.cli.lazy import LazyGroup
from agentrl.config import Section, by_section, changes_of, leaves, others_of, parse
from agentrl.engine.config import ServedModel, ServerGroup
from agentrl.errors import MissingExtraError
from agentrl.evaluation.config import EvalConfig
from agentrl.runtime import extras
from agentrl.types import JSON
from agentrl_simulate.request import SimulationFlags
from tests.house.source import name_of, python_files, requirements, tree_of

CHOICES: dict[str, set[str]] = {}
for kind in (RunConfig, EvalConfig, SimulationFlags):
    for name, (_, field) in leaves(kind).items():
        chosen = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        CHOICES.setdefault(name, set()).update(chosen)
VALUES = set().union(*CHOICES.values())
# Of pip, of Ray and of SGLang.
OTHER_FLAGS = {
    *("--force-reinstall", "--no-deps", "--temp-dir", "--object-store-memory", "--node-ip-address"),
    *("--custom-weight-loader", "--weight-version", "--enable-return-routed-experts"),
}
# Keys of tables, arguments of SGLang and Megatron, attributes of environments, Python's, the kernel's.
OTHER_NAMES = {
    *(*ServerGroup.model_fields, *ServedModel.model_fields, "remote_rm"),
    *(
        "mem_fraction_static",
        "recompute_modules",
        "context_length",
        "dp_size",
        "chance_score",
        "step_loss_mask",
    ),
    *("unprivileged_userns_clone", "apparmor_restrict_unprivileged_userns"),
}
OF_PACKAGES = ("--sglang-", "--router-", "--megatron-")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
NAMED = (
    re.compile(r"\b([a-z0-9]+(?:_[a-z0-9]+)+) = [\w.]+"),
    re.compile(r"\(([a-z]+(?:_[a-z0-9]+)+)[);]"),
    re.compile(r"\b(?:set|raise|lower|choose|drop|add) ([a-z]+(?:_[a-z0-9]+)+)"),
    re.compile(r"\bset `(\w+)`"),
)
CHANGED = re.compile(r"\b(?:set|raise|lower|with a lower) (\w+)")
URL = "http://127.0.0.1:30000"
RUNS = [
    (RunConfig, {}),
    (RunConfig, {"engine": "sglang", "sglang_url": URL, "cluster": "ray"}),
    (RunConfig, {"replay": "runs/x", "cluster": "ray"}),
    (RunConfig, {"debug_rollout_only": True, "cluster": "ray"}),
    (SftConfig, {"cluster": "ray", "trainer": "megatron", "sft_lr": 1e-3}),
    (EvalConfig, {}),
    (EvalConfig, {"engine": "sglang", "sglang_url": URL, "cluster": "ray"}),
    (EvalConfig, {"openai_url": URL, "openai_model": "m", "cluster": "ray"}),
]


def commands(command: click.Command, path: str = "agentrl") -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        below_it = command.loaded() if isinstance(command, LazyGroup) else command.commands
        for name, below in below_it.items():
            yield from commands(below, f"{path} {name}")


COMMANDS = dict(commands(cli))
OPTIONS = {
    path: {"--help", *(word for option in command.params for word in (*option.opts, *option.secondary_opts))}
    for path, command in COMMANDS.items()
}


@cache
def texts() -> tuple[tuple[str, str], ...]:
    """The texts of the package that have more than one word, and all --help; {} stands for a value."""
    found = [(path, command.help or "") for path, command in COMMANDS.items()]
    found += [
        (path, getattr(option, "help", None) or "") for path in COMMANDS for option in COMMANDS[path].params
    ]
    found += [(f"in place of {name}", text) for name, text in others_of(RunConfig).items()]
    for path in python_files("agentrl", "agentrl_simulate"):
        nodes = list(ast.walk(tree_of(path)))
        inner = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        inner |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)
            if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in inner and " " in text:
                found.append((f"{name_of(path)}:{node.lineno}", text))
    return tuple(found)


def test_every_command_and_flag_exists() -> None:
    every = OTHER_FLAGS.union(*OPTIONS.values())
    for place, text in texts():
        wrong = {flag for flag in FLAG.findall(text) if not flag.startswith(OF_PACKAGES)} - every
        assert not wrong, (place, wrong)
        for line in re.findall(r"`(agentrl(?: [^`{][^`]*)?)`", text):
            path = max((path for path in COMMANDS if f"{line} ".startswith(f"{path} ")), key=len)
            assert path != "agentrl" or line == path, place
            known = OPTIONS["agentrl benchmark run" if path == "agentrl benchmark" else path]
            assert set(FLAG.findall(line)) <= known, place


def test_every_setting_exists_and_takes_the_value() -> None:
    for place, text in texts():
        named = {name for pattern in NAMED for name in pattern.findall(text)}
        assert named <= CHOICES.keys() | VALUES | OTHER_NAMES, (place, text)
        for name, value in re.findall(r"\b([a-z]\w+) = ([a-z]\w+)", text):
            assert not CHOICES.get(name) or value in CHOICES[name], (place, text)


def test_what_a_run_is_told_to_change_when_it_resumes_may_change() -> None:
    for place, text in texts():
        if "resume" in text:
            named = set(CHANGED.findall(text.partition("begin a new run")[0])) & CHOICES.keys()
            assert named <= changes_of(RunConfig).keys(), (place, text)


@pytest.mark.parametrize(("kind", "settings"), RUNS)
def test_no_remedy_is_refused_by_the_run_itself(kind: type[Section], settings: dict[str, JSON]) -> None:
    config = parse(kind, by_section(kind, settings), source="x")
    for name, reason in config.inactive.items():
        words = set(re.findall(r"\w+", reason)) if reason.startswith("without ") else set()
        named = words & leaves(kind).keys()
        # `engine = sglang` names no table of that name.
        named -= {value for key, value in re.findall(r"(\w+) = (\w+)", reason)}
        # One without effect "without" another has a remedy, too.
        dead = {word for word in named if not config.inactive.get(word, "without ").startswith("without ")}
        assert not named or dead != named, (name, reason, [config.inactive[word] for word in dead])
        for key, value in re.findall(r"(\w+) = (\w+)", reason if named else ""):
            assert settings.get(key) != value, (name, reason)


@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_an_extra_is_named_where_it_holds_the_package(minor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "PYTHON", (3, minor))
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    for extra, packages in extras.EXTRAS.items():
        python = {"python_version": f"3.{minor}"}
        held = {r.name for r in requirements(extra) if r.marker is None or r.marker.evaluate(python)}
        for module, package in packages.items():
            with pytest.raises(MissingExtraError) as missing:
                extras.require("it", module)
            assert (f"agentrl[{extra}]" in str(missing.value)) is (package in held)
