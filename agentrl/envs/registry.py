"""Names for environments: `NAME-vN`, registered in code or by an installed package.

A package offers environments through the entry point group `agentrl.envs`: an id, and its class
or its EnvSpec (which `register` returns). They are imported at their first use.

    [project.entry-points."agentrl.envs"]
    "Maze-v0" = "my_mazes:Maze"
    "BigMaze-v0" = "my_mazes:big"        # my_mazes.py: big = register("BigMaze-v0", Maze, size=50)

A package with many environments of one class offers them together, through the group
`agentrl.env_families`: a pattern of their ids, and a mapping from every id to its class and the class's
arguments. The module of the mapping is imported whenever ids are listed, so it imports nothing itself.

    [project.entry-points."agentrl.env_families"]
    "Maze-*-v0" = "my_mazes:SIZES"

    SIZES = {f"Maze-{size}-v0": ("my_mazes.env:Maze", {"size": size}) for size in (5, 10, 50)}

`package.module:Class` names an unregistered one. In Gymnasium every id is `agentrl/NAME-vN`, with a dot for
the slash of a namespace. Since Gymnasium 1.0 packages are not loaded automatically, but
`gymnasium.make("agentrl:agentrl/NAME-vN")` imports this package.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.metadata import EntryPoint, entry_points
from typing import TypeAlias, TypeGuard, cast

import gymnasium

from agentrl.envs.base import Env
from agentrl.envs.multi_agent import AnyEnv, MultiAgentEnv
from agentrl.errors import UnknownEnvError, UserError
from agentrl.runtime.extras import require_extras
from agentrl.runtime.stage import EnvCode
from agentrl.tools.names import Names, fitted_arguments, path_of_object

_ID = re.compile(r"(?:[A-Za-z0-9_-]+/)?[A-Za-z0-9_.-]+-v\d+")
_GROUP = "agentrl.envs"
_FAMILIES = "agentrl.env_families"
_NAMES = Names("environment", "package.module:Class", UnknownEnvError)
_FACE = "agentrl.envs.gym.face:GymnasiumFace"


Family: TypeAlias = Mapping[str, tuple[str, Mapping[str, object]]]
"""By id: the path of a class, `package.module:Class`, and the arguments of the class."""


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """A registered environment: its id, its class and the arguments of the class."""

    id: str
    env_class: type[AnyEnv]
    kwargs: Mapping[str, object] = field(default_factory=dict)

    def factory(self, **kwargs: object) -> Callable[[], AnyEnv]:
        """A function that creates an instance for every episode; arguments are checked once.

        Raises:
            UserError: the class does not take these arguments, one has another type, or the class lacks a
                method.
            EnvCodeError (when it is called): the class's `__init__` failed.
            MissingExtraError (when it is called): an extra that it `needs` is not installed.
        """
        new = self._factory(kwargs)
        is_checked = False

        def make() -> AnyEnv:
            nonlocal is_checked
            env = new()
            if not is_checked:
                # Some extras are imported where an answer is graded: long after a run has begun.
                require_extras(f"`{self.id}`", *env.needs)
                is_checked = True
            return env

        return make

    def described(self, **kwargs: object) -> AnyEnv:
        """An instance that is only read, whether or not what it `needs` is installed; else as `make`."""
        return self._factory(kwargs)()

    def _factory(self, kwargs: Mapping[str, object]) -> Callable[[], AnyEnv]:
        if missing := sorted(self.env_class.__abstractmethods__):
            raise UserError(f"{self.id}: {self.env_class.__name__} lacks `{missing[0]}`; write that method.")
        arguments = fitted_arguments(self.id, self.env_class, {**self.kwargs, **kwargs})

        def make() -> AnyEnv:
            with EnvCode(self.id, "__init__", stage="make"):
                env = self.env_class(**arguments)
            env.id = self.id
            env.convert_attributes()
            return env

        return make

    def make(self, **kwargs: object) -> AnyEnv:
        """A new instance, for one episode.

        Raises:
            UserError: the class does not take these arguments, or lacks a method.
            EnvCodeError: its `__init__` failed.
            MissingExtraError: an extra that it `needs` is not installed.
        """
        return self.factory(**kwargs)()


_registered: dict[str, EnvSpec] = {}


def register(id: str, env_class: type[AnyEnv], **kwargs: object) -> EnvSpec:
    """Register an environment class under an id, for this process. Registering it again replaces it.

    id: NAME-vN, e.g. `Maze-v0`. kwargs: arguments of the class.

    Raises:
        UserError: the id is not of the form NAME-vN, or the class is not an Env.
    """
    if not _ID.fullmatch(id):
        raise UserError(f"an environment's id looks like `Name-v0`, got {id!r}; add a version.")
    if not _is_env_class(env_class):
        raise UserError(
            f"{id}: register a subclass of agentrl.Env or agentrl.MultiAgentEnv, got {env_class!r}."
        )
    _registered[id] = EnvSpec(id, env_class, kwargs)
    _register_with_gymnasium(id)
    return _registered[id]


def find(id: str) -> EnvSpec:
    """The spec of an id.

    Raises:
        UnknownEnvError: no environment has that id (the sentence lists the ids), or its package is broken.
    """
    if id in _registered:
        return _registered[id]
    points = _points()
    if id in points:
        return _register_offered(points[id])
    for family in families().values():
        if id in family:
            path, arguments = family[id]
            return register(id, cast(type[AnyEnv], _NAMES.loaded(EntryPoint(id, path, _GROUP))), **arguments)
    if ":" in id:
        return _by_path(id)
    raise _unknown(id)


def path_of(env_class: type[AnyEnv]) -> str:
    """The name `module:Class` of a class, under which `find` finds that very class in this process.

    Raises:
        UserError: it is no class of an environment.
    """
    if not _is_env_class(env_class):
        raise UserError(
            f"{env_class.__qualname__} is not a subclass of agentrl.Env or agentrl.MultiAgentEnv; derive it "
            "from one of them."
        )
    return path_of_object(env_class)


def make(id: str, **kwargs: object) -> AnyEnv:
    """A new instance of a registered environment, for one episode.

    id: of an environment (`env_ids` lists them), or `package.module:Class`. kwargs: arguments of the class,
    in addition to those that it was registered with.

    Raises:
        UnknownEnvError: no environment has that id.
        UserError: it does not take these arguments.
    """
    return find(id).make(**kwargs)


def env_ids() -> list[str]:
    """Every id that `make` accepts, sorted."""
    return sorted({*_registered, *_points(), *(id for family in families().values() for id in family)})


def matching(pattern: str) -> list[str]:
    """The ids that a pattern names, sorted: `ReasoningGym-*`, `*-v0`, an id, or a path of a class.

    `*` stands for any characters, `?` for one, `[ab]` for one of them; case counts.

    Raises:
        UnknownEnvError: no environment has such an id.
    """
    if not any(character in pattern for character in "*?["):
        return [find(pattern).id]
    ids = [id for id in env_ids() if fnmatchcase(id, pattern)]
    if not ids:
        raise _unknown(pattern)
    return ids


def families() -> dict[str, Family]:
    """The families of the installed packages, by their pattern. One that cannot be read is left out, with a
    warning."""
    read: dict[str, Family] = {}
    for point in entry_points(group=_FAMILIES):
        try:
            read[point.name] = cast(Family, _NAMES.loaded(point))
        except UserError as error:
            warnings.warn(str(error), stacklevel=2)
    return read


def _points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=_GROUP)}


def _unknown(name: str) -> UserError:
    """The error for an id or a pattern that names nothing; the sentence lists a family as its pattern."""
    patterns = families()
    members = {id for family in patterns.values() for id in family}
    ids = env_ids()
    return _NAMES.unknown(name, ids, listed=[*patterns, *(id for id in ids if id not in members)])


def _register_offered(point: EntryPoint) -> EnvSpec:
    target = _NAMES.loaded(point)
    if isinstance(target, EnvSpec):
        return register(point.name, target.env_class, **target.kwargs)
    return register(point.name, cast(type[AnyEnv], target))


def gymnasium_id(id: str) -> str:
    """The id of an environment in Gymnasium's registry."""
    return f"agentrl/{id.replace('/', '.')}"


def register_all_with_gymnasium() -> None:
    """Register every installed environment with Gymnasium, without importing it."""
    for id in filter(_ID.fullmatch, env_ids()):
        _register_with_gymnasium(id)


def _register_with_gymnasium(id: str) -> None:
    name = gymnasium_id(id)
    # Gymnasium warns of a name that is registered twice; here the last registration counts.
    gymnasium.registry.pop(name, None)
    gymnasium.register(name, entry_point=_FACE, kwargs={"env_id": id})


def _by_path(path: str) -> EnvSpec:
    target = _NAMES.imported(path)
    if not _is_env_class(target):
        raise UnknownEnvError(
            f"`{path}` is not a subclass of agentrl.Env or agentrl.MultiAgentEnv; name the class itself."
        )
    return EnvSpec(path, target)


def _is_env_class(target: object) -> TypeGuard[type[AnyEnv]]:
    return isinstance(target, type) and issubclass(target, Env | MultiAgentEnv)
