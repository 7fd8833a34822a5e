"""Names for environments: `NAME-vN`, registered in code or by an installed package.

A package offers environments through the entry point group `agentrl.envs`: an id, and the class
or the EnvSpec (what `register` returns) behind it. They are imported when they are first asked for.

    [project.entry-points."agentrl.envs"]
    "Maze-v0" = "my_mazes:Maze"
    "BigMaze-v0" = "my_mazes:big"        # my_mazes.py: big = register("BigMaze-v0", Maze, size=50)

`package.module:Class` names an unregistered one. Gymnasium knows every id as `agentrl/NAME-vN`; the
slash of a namespace is a dot there. Since Gymnasium 1.0 nothing is loaded that nobody imported, but
`gymnasium.make("agentrl:agentrl/NAME-vN")` imports this package by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import cast

import gymnasium

from agentrl.envs.base import Env
from agentrl.envs.multi_agent import AnyEnv, MultiAgentEnv
from agentrl.errors import UnknownEnvError, UserError
from agentrl.tools.names import Names, check_arguments

_ID = re.compile(r"(?:[A-Za-z0-9_-]+/)?[A-Za-z0-9_.-]+-v\d+")
_GROUP = "agentrl.envs"
_NAMES = Names("environment", "package.module:Class", UnknownEnvError)
_FACE = "agentrl.envs.gym.face:GymnasiumFace"


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """A registered environment: its id, its class and the arguments it is made with."""

    id: str
    env_class: type[AnyEnv]
    kwargs: Mapping[str, object] = field(default_factory=dict)

    def factory(self, **kwargs: object) -> Callable[[], AnyEnv]:
        """A function that makes a fresh instance for every episode; arguments are checked once.

        Raises:
            UserError: the class does not take these arguments, or lacks a method.
        """
        if missing := sorted(self.env_class.__abstractmethods__):
            raise UserError(f"{self.id}: {self.env_class.__name__} lacks `{missing[0]}`; write that method.")
        arguments = {**self.kwargs, **kwargs}
        check_arguments(self.id, self.env_class, arguments)

        def make() -> AnyEnv:
            env = self.env_class(**arguments)
            env.id = self.id
            return env

        return make

    def make(self, **kwargs: object) -> AnyEnv:
        """A fresh instance, for one episode.

        Raises:
            UserError: the class does not take these arguments, or lacks a method.
        """
        return self.factory(**kwargs)()


_registered: dict[str, EnvSpec] = {}


def register(id: str, env_class: type[AnyEnv], **kwargs: object) -> EnvSpec:
    """Give an environment class a name. Registering the same name again replaces it.

    Raises:
        UserError: the id is not of the form NAME-vN, or the class is not an Env.
    """
    if not _ID.fullmatch(id):
        raise UserError(f"an environment's id looks like `Name-v0`, got {id!r}; add a version.")
    if not (isinstance(env_class, type) and issubclass(env_class, Env | MultiAgentEnv)):
        raise UserError(
            f"{id}: register a subclass of agentrl.Env or agentrl.MultiAgentEnv, got {env_class!r}."
        )
    _registered[id] = EnvSpec(id, env_class, kwargs)
    _tell_gymnasium(id)
    return _registered[id]


def find(id: str) -> EnvSpec:
    """The spec behind an id.

    Raises:
        UnknownEnvError: nothing has that name (the sentence says what has), or its package is broken.
    """
    if id in _registered:
        return _registered[id]
    offered = _offered()
    if id in offered:
        return _register_offered(offered[id])
    if ":" in id:
        return _by_path(id)
    raise _NAMES.unknown(id, env_ids())


def make(id: str, **kwargs: object) -> AnyEnv:
    """A fresh instance of a registered environment, for one episode.

    Raises:
        UnknownEnvError: nothing has that name.
        UserError: it does not take these arguments.
    """
    return find(id).make(**kwargs)


def env_ids() -> list[str]:
    """Every id that can be made, sorted."""
    return sorted({*_registered, *_offered()})


def _offered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=_GROUP)}


def _register_offered(point: EntryPoint) -> EnvSpec:
    found = _NAMES.loaded(point)
    if isinstance(found, EnvSpec):
        return register(point.name, found.env_class, **found.kwargs)
    return register(point.name, cast(type[AnyEnv], found))


def gymnasium_id(id: str) -> str:
    """The name by which Gymnasium knows an environment."""
    return f"agentrl/{id.replace('/', '.')}"


def tell_gymnasium_of_all() -> None:
    """Make every installed environment known to Gymnasium; none is imported for it."""
    for id in filter(_ID.fullmatch, env_ids()):
        _tell_gymnasium(id)


def _tell_gymnasium(id: str) -> None:
    name = gymnasium_id(id)
    # Gymnasium warns of a name that is registered twice; here the last one counts.
    gymnasium.registry.pop(name, None)
    gymnasium.register(name, entry_point=_FACE, kwargs={"env_id": id})


def _by_path(path: str) -> EnvSpec:
    found = _NAMES.imported(path)
    if not (isinstance(found, type) and issubclass(found, Env | MultiAgentEnv)):
        raise UnknownEnvError(
            f"`{path}` is not a subclass of agentrl.Env or agentrl.MultiAgentEnv; name the class itself."
        )
    return EnvSpec(path, found)
