"""What the result of an evaluation depends on: settings, code of the environment, data, policy.

An evaluation goes on only where all of it is what it was. The cells of a benchmark (one environment, set of
prompts and policy) have it in the names of their folders: where any part differs, it is another cell.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import NamedTuple, cast

from agentrl.config import Changes, changes_of, effective_values
from agentrl.envs.registry import EnvSpec
from agentrl.errors import ConfigError
from agentrl.evaluation.config import EvalConfig
from agentrl.records.lines import object_of
from agentrl.runtime.files import write_text
from agentrl.runtime.ownership import read_file
from agentrl.types import JSON, Task
from agentrl.weights.hf.folders import base_folder

_PARTS = {
    "env": "another environment",
    "policy": "another kind of model",
    "code": "another code of the environment",
    "data": "other tasks",
    "model": "another model",
}
IDENTITY = "identity.json"
"""The file of an identity."""


class EvalIdentity(NamedTuple):
    """What the result of an evaluation depends on.

    prompts: the name of the set of prompts; "" = a single one, or all of them. settings: those of the
    episodes and of sampling. code: a hash of the environment's source files. data: of the tasks. model: of
    the policy.
    """

    env: str
    prompts: str
    policy: str
    settings: Mapping[str, JSON]
    code: str
    data: str
    model: str

    @property
    def digest(self) -> str:
        """A hash of all of it, 16 hexadecimal digits."""
        text = json.dumps(self._asdict(), sort_keys=True, default=str)
        return _digest(text.encode("utf-8", "surrogatepass"))

    def as_json(self) -> dict[str, JSON]:
        """Plain values, by field."""
        return cast(dict[str, JSON], json.loads(json.dumps(self._asdict(), default=str)))

    def write(self, folder: Path) -> None:
        """Write identity.json.

        Raises:
            OSError: the disk does not take it.
        """
        write_text(folder / IDENTITY, json.dumps(self.as_json(), indent=1))

    def check(self, folder: Path) -> None:
        """Check that the evaluation in a folder depends on the same.

        Raises:
            ConfigError: it does not, and the sentence names the first difference; or the file is missing.
        """
        path = folder / IDENTITY
        try:
            before = object_of(read_file(path), str(path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); choose another output_dir.") from None
        if difference := next(_differences(before, self.as_json()), None):
            raise ConfigError(
                f"{folder} was begun with {difference} when it goes on; restore that, or choose another "
                "output_dir."
            )


def _differences(before: Mapping[str, JSON], now: Mapping[str, JSON]) -> Iterator[str]:
    """What has changed, each as a sentence's middle part; settings by name."""
    old, new = (cast(Mapping[str, JSON], facts.get("settings", {})) for facts in (before, now))
    # It may have been moved, and so may the server of its model.
    for name in sorted((old.keys() | new.keys()) - _changing(Changes.PLACE)):
        if old.get(name) != new.get(name):
            values = [facts.get(name, "its default") for facts in (old, new)]
            yield f"{name} = {values[0]}, and that cannot become {values[1]}"
    for name, text in _PARTS.items():
        if before.get(name) != now.get(name):
            yield f"{text}, and that cannot change"


def settings_of(config: EvalConfig) -> dict[str, JSON]:
    """The settings that decide what is played, by name."""
    sections = effective_values(config)
    settings = {name: value for values in sections.values() for name, value in values.items()}
    return {name: value for name, value in settings.items() if name not in _changing(Changes.SPEED)}


def _changing(what: Changes) -> set[str]:
    return {name for name, change in changes_of(EvalConfig).items() if change is what}


def code_version(spec: EnvSpec) -> str:
    """A hash of the source files of an environment, and of the arguments that it is registered with.

    The files are all Python files of the package of its class, or its module alone where that is in no
    package; and the modules of its base classes. Modules that these import from elsewhere do not count.
    Of a class that was typed into a notebook or an interpreter, the code of its methods counts.
    """
    digest = hashlib.blake2b(digest_size=8)
    if _file_of(spec.env_class) is None:
        digest.update(_code_of(spec.env_class).encode())
    for name, path in sorted(_sources(spec.env_class)):
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr([(name, _stable(spec.kwargs[name])) for name in sorted(spec.kwargs)]).encode())
    return digest.hexdigest()


def _sources(env_class: type) -> Iterator[tuple[str, Path]]:
    """The source files with names that do not depend on where the package is installed."""
    own = _file_of(env_class)
    package = sys.modules[env_class.__module__].__package__ if own is not None else None
    if own is not None and package:
        root = own.parent
        yield from ((f"{package}/{path.relative_to(root)}", path) for path in root.rglob("*.py"))
    elif own is not None:
        yield own.name, own
    for base in env_class.__mro__[1:]:
        path = _file_of(base)
        if path is not None and base.__module__ != env_class.__module__:
            yield base.__module__, path


def _code_of(kind: type) -> str:
    """The instructions of its functions, with the constants in them, and the other attributes."""
    codes = {name: _instructions(getattr(value, "__code__", None)) for name, value in vars(kind).items()}
    return repr([(name, codes[name] or _stable(vars(kind)[name])) for name in sorted(codes)])


def _instructions(code: object) -> list[object]:
    if not isinstance(code, CodeType):
        return []
    constants = [_instructions(each) or repr(each) for each in code.co_consts]
    return [code.co_code, code.co_names, constants]


def _file_of(kind: type) -> Path | None:
    """The file of a class; None for one that is built in, or was typed into an interpreter."""
    try:
        file = inspect.getsourcefile(kind)
    except (TypeError, OSError):
        return None
    return Path(file) if file is not None and Path(file).is_file() else None


def _stable(value: object) -> str:
    """A text of a registered argument that is the same in every process."""
    name = getattr(value, "__qualname__", None)
    return f"{getattr(value, '__module__', '')}.{name}" if isinstance(name, str) else repr(value)


def task_digest(task: Task) -> str:
    """A hash of the content of a task, 16 hexadecimal digits."""
    return _digest(repr(task).encode("utf-8", "surrogatepass"))


def data_fingerprint(tasks: Sequence[Task]) -> str:
    """A hash of tasks in their order, 16 hexadecimal digits."""
    return _digest("".join(map(task_digest, tasks)).encode())


def model_version(directory: str) -> str:
    """Identifies the model in a directory by its files, sizes and times of change.

    Weights are not read for this: those of a large model take minutes. A directory that is missing is
    reported by what opens the model. Of adapters the files of their base model count, too.

    Raises:
        ModelLoadError: see `base_folder`.
    """
    folders = dict.fromkeys((Path(directory), base_folder(Path(directory))))
    files = [path for folder in folders for path in sorted(folder.glob("*")) if path.is_file()]
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return _digest(repr(facts).encode())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
