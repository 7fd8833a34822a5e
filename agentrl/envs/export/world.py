"""An environment by its id and its arguments, as its first agent sees it: instances, and its tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentrl.envs.base import tasks_of
from agentrl.envs.catalog import summary
from agentrl.envs.multi_agent import one_agent_of
from agentrl.envs.registry import find
from agentrl.errors import UserError
from agentrl.tools.secrets import with_secrets
from agentrl.types import JSON, Task


class ExportedWorld:
    """What an exported package plays: of several agents the first, scripts the others.

    make: an instance, for one episode. example: one that is only read. about: the first line of its class.
    module: the top-level module of its class.

    Raises:
        UserError: there is no such environment, or it does not take these arguments.
    """

    def __init__(self, env_id: str, kwargs: Mapping[str, JSON]) -> None:
        self.env_id = env_id
        spec = find(env_id)
        self.about = summary(spec.env_class)
        self.module = spec.env_class.__module__.partition(".")[0]
        self.make = one_agent_of(spec.factory(**with_secrets(kwargs)), None)
        self.example = self.make()

    @property
    def splits(self) -> tuple[str, str]:
        """To train and to evaluate on: `train` and `test`, else the first and the last one."""
        own = self.example.splits or ("train",)
        return "train" if "train" in own else own[0], "test" if "test" in own else own[-1]

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split.

        Raises:
            UserError: it has no such split, or no task in it.
        """
        tasks = tasks_of(self.example, split)
        if not tasks:
            raise UserError(f"{self.env_id} has no task in its split `{split}`; name another one.")
        return tasks
