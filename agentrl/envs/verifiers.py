"""A taskset of verifiers as an environment of one turn, scored by the taskset's own rewards.

    [env]
    env = "agentrl.envs.verifiers:VerifiersTaskset"
    env_kwargs = { taskset = "my_taskset" }

The package is verifiers 0.4 (`verifiers.v1`). It pins mcp to a version that the extra `mcp` does not accept:
these two extras cannot be installed together.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, cast

from agentrl.envs.single_turn import SingleTurnEnv
from agentrl.errors import UserError
from agentrl.runtime.extras import require
from agentrl.types import Message, Role, Task

if TYPE_CHECKING:
    from verifiers.v1.task import Task as VerifiersTask
    from verifiers.v1.trace import Trace

Settings = tuple[tuple[str, object], ...]


class VerifiersTaskset(SingleTurnEnv):
    """The prompts of a taskset of verifiers, each answered in one turn.

    taskset: the name of its package. num_test: its first tasks, which are the test split. max_tasks: how many
    are read. settings: of the taskset, by the names of its config.

    The parts of a verdict are the taskset's rewards times their weights. The expert answers with the field
    `answer` of a task, where it has one.

    Raises (from tasks()):
        MissingExtraError: verifiers is not installed.
        UserError: there is no such taskset; or its tasks need tools, a container, or a runtime to be scored.
    """

    group = "adapters"
    needs = ("verifiers",)

    def __init__(
        self, taskset: str, *, num_test: int = 100, max_tasks: int = 10_000, **settings: object
    ) -> None:
        super().__init__()
        self._source = taskset, max_tasks, tuple(sorted(settings.items()))
        self._num_test = num_test

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split, in the taskset's order."""
        numbered = list(enumerate(_loaded(*self._source)))
        chosen = numbered[: self._num_test] if split == "test" else numbered[self._num_test :]
        return [_task(number, task, split) for number, task in chosen]

    async def grade(self, task: Task, answer: str) -> Mapping[str, float]:
        """The rewards of the taskset by name, times their weights."""
        number = task.metadata["number"]
        assert isinstance(number, int)
        source = _loaded(*self._source)[number]
        trace = _trace(source, task, answer)
        await source.score(trace)
        return {name: reward.value for name, reward in trace.rewards.items() if reward is not None}


@lru_cache(maxsize=16)
def _loaded(name: str, max_tasks: int, settings: Settings) -> tuple[VerifiersTask, ...]:
    require(f"the taskset {name}", "verifiers")
    from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

    try:
        config = taskset_config_type(name)(id=name, **dict(settings))
        tasks = tuple(islice(load_taskset(config), max_tasks))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"verifiers cannot load the taskset `{name}`: {error}") from None
    for task in tasks[:1]:
        _check(name, task)
    return tasks


def _check(name: str, task: VerifiersTask) -> None:
    """Check that a task is answered and scored without tools, container and runtime.

    Raises:
        UserError: it is not.
    """
    needed = []
    if task.NEEDS_CONTAINER:
        needed.append("a container")
    if type(task).toolsets(task.config):
        needed.append("tools")
    for reward in task.hooks("reward"):
        parameter = inspect.signature(reward).parameters.get("runtime")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            needed.append(f"a runtime for its reward `{reward.__name__}`")
    if needed:
        raise UserError(
            f"the tasks of `{name}` need {' and '.join(needed)}; only those of one plain answer are played."
        )


def _task(number: int, task: VerifiersTask, split: str) -> Task:
    prompt = task.data.prompt
    if prompt is None or isinstance(prompt, str):
        messages = [Message("user", prompt or "")]
    else:
        messages = [Message(cast(Role, message.role), str(message.content)) for message in prompt]
    if task.data.system_prompt:
        messages.insert(0, Message("system", task.data.system_prompt))
    answer = getattr(task.data, "answer", None)
    id = f"{split}-{number}"
    return Task(id, tuple(messages), None if answer is None else str(answer), {"number": number}, split)


def _trace(source: VerifiersTask, task: Task, answer: str) -> Trace:
    """What the rewards of verifiers read: the prompt, and the answer as the model's message."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage

    forms = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
    messages = [forms[message.role](content=message.text) for message in task.prompt]
    messages.append(AssistantMessage(content=answer))
    nodes = [
        MessageNode(parent=index - 1 if index else None, message=message, sampled=index == len(task.prompt))
        for index, message in enumerate(messages)
    ]
    return Trace(
        task=TraceTask(type=type(source).__name__, data=source.data),
        agent=AgentInfo(config=AgentConfig()),
        nodes=nodes,
        is_completed=True,
        ok=True,
    )
