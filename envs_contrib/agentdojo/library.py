"""What the environments need of the package `agentdojo`, imported without the clients of its model vendors.

The package `agentdojo.agent_pipeline` imports the clients of five vendors before any of its modules: seconds,
and 140 MB that no suite, task or attack uses. During the imports below an empty package with the same path
takes its place. So does the one module with a client that a needed module imports, for a constant. Both are
removed afterwards: `import agentdojo.agent_pipeline` elsewhere imports the real package.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Protocol, TypeVar

import agentdojo
import yaml

__all__ = [
    "ATTACKS",
    "FunctionCall",
    "FunctionsRuntime",
    "get_suites",
    "load_attack",
    "loading_fast",
    "printed",
    "system_message",
]

_PIPELINE = "agentdojo.agent_pipeline"
_CLIENT = f"{_PIPELINE}.llms.google_llm"
_FOLDER = Path(str(agentdojo.__file__)).parent


@contextmanager
def _without_clients() -> Iterator[None]:
    if _PIPELINE in sys.modules:
        yield
        return
    package, client = ModuleType(_PIPELINE), ModuleType(_CLIENT)
    package.__path__ = [str(_FOLDER / "agent_pipeline")]
    vars(client)["EMPTY_FUNCTION_NAME"] = "<empty-function-name>"
    sys.modules |= {_PIPELINE: package, _CLIENT: client}
    try:
        yield
    finally:
        del sys.modules[_PIPELINE], sys.modules[_CLIENT]


with _without_clients():
    from agentdojo.agent_pipeline.tool_execution import tool_result_to_str
    from agentdojo.attacks import load_attack
    from agentdojo.attacks.attack_registry import ATTACKS
    from agentdojo.functions_runtime import FunctionCall, FunctionsRuntime
    from agentdojo.strenum import StrEnum
    from agentdojo.task_suite import get_suites
    from agentdojo.task_suite.task_suite import read_suite_file


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _dumper() -> Callable[[object], str]:
    # libyaml, where PyYAML has it, writes the same text in a tenth of the time.
    fastest = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    dumper = type("Dumper", (fastest,), {})
    # libyaml writes no subclasses of str.
    yaml.add_multi_representer(
        StrEnum, lambda dumper, member: dumper.represent_str(str(member)), Dumper=dumper
    )
    return partial(yaml.dump, Dumper=dumper)


_dump = _dumper()


def printed(result: object) -> str:
    """The text of a tool's result, in the form of the library's own pipeline (YAML for models and lists).

    Raises:
        ValueError: the library has no form for it.
    """
    try:
        return str(tool_result_to_str(result, dump_fn=_dump))
    except (TypeError, yaml.YAMLError) as error:
        raise ValueError(f"the result cannot be shown: {error}") from error


class _Models(Protocol):
    def model_validate(self, state: object) -> object: ...


class _Suite(Protocol):
    name: str
    data_path: Path | None
    environment_type: _Models

    def get_injection_vector_defaults(self) -> dict[str, str]: ...


_S = TypeVar("_S", bound=_Suite)


def loading_fast(suite: _S) -> _S:
    """The same suite, whose states are read by libyaml where PyYAML has it, in a fraction of the time."""
    faster = copy.copy(suite)
    defaults = suite.get_injection_vector_defaults()
    vars(faster)["load_and_inject_default_environment"] = partial(_load, suite, defaults)
    return faster


def _load(suite: _Suite, defaults: Mapping[str, str], injections: Mapping[str, str]) -> object:
    text = read_suite_file(suite.name, "environment.yaml", suite.data_path)
    state = yaml.load(text.format(**{**defaults, **injections}), Loader=_LOADER)
    return suite.environment_type.model_validate(state)


def system_message() -> str:
    """The library's default system message."""
    text = (_FOLDER / "data" / "system_messages.yaml").read_text(encoding="utf-8")
    return str(yaml.safe_load(text)["default"]).strip()
