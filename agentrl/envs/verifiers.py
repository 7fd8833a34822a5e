"""What is written for verifiers, scored by its own rewards: tasksets of 0.4, environments of 0.3.

    [env]
    env = "agentrl.envs.verifiers:VerifiersTaskset"     # verifiers 0.4 (`verifiers.v1`): one turn
    env_kwargs = { taskset = "my_taskset" }

    [env]
    env = "agentrl.envs.verifiers:VerifiersEnv"         # verifiers 0.3: a package with `load_environment`
    env_kwargs = { environment = "my_env" }

0.4 has removed the environments of 0.3: single-turn, multi-turn, tools, stateful tools. Both pin mcp to a
version that the extra `mcp` does not accept: these two extras cannot be installed together.
"""

from __future__ import annotations

import inspect
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, cast

from agentrl.envs.gateway import HarnessEnv
from agentrl.envs.single_turn import SingleTurnEnv
from agentrl.errors import StageError, UserError
from agentrl.runtime.extras import require
from agentrl.runtime.stage import stage
from agentrl.tools.running import inline
from agentrl.types import JSON, Limits, Message, RewardParts, Role, Task

if TYPE_CHECKING:
    from verifiers.envs.environment import Environment
    from verifiers.v1.task import Task as VerifiersTask
    from verifiers.v1.trace import Trace

Settings = tuple[tuple[str, object], ...]
_OF_THE_MODEL = ("ModelError", "InvalidModelResponseError", "EmptyModelResponseError", "OverlongPromptError")
"""Errors of verifiers that come of what the model wrote, or of a limit: their rollouts are scored."""


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
        messages = [_message(message.role, message.content) for message in prompt]
    if task.data.system_prompt:
        messages.insert(0, Message("system", task.data.system_prompt))
    answer = getattr(task.data, "answer", None)
    id = f"{split}-{number}"
    return Task(id, tuple(messages), None if answer is None else str(answer), {"number": number}, split)


def _message(role: str, content: object) -> Message:
    return Message(cast(Role, role), str(content))


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


class _Loaded(NamedTuple):
    """An environment of verifiers, and the rows of its data by split."""

    environment: Environment
    rows: Mapping[str, Sequence[Mapping[str, JSON]]]


class VerifiersEnv(HarnessEnv):
    """An environment of verifiers 0.3, of one turn or many, with tools or without, played by its own rollout.

    environment: the name of its package, which has `load_environment`. num_test: its first tasks, which are
    the test split where it has no data to evaluate on. max_turns, max_tokens: of an episode. settings:
    arguments of `load_environment`.

    The reward is what its rubric says of the rollout; the metrics are the parts, unweighted. A rollout that
    verifiers reports as an error of its world is a failed episode, never a zero.

    Raises (from tasks()):
        MissingExtraError: verifiers is not installed.
        UserError: it is another version, there is no such environment, or its rubric compares rollouts.
    """

    needs = ("verifiers",)
    timeout_s = None

    def __init__(
        self,
        environment: str,
        *,
        num_test: int = 100,
        max_turns: int = 50,
        max_tokens: int = 8192,
        **settings: object,
    ) -> None:
        super().__init__()
        self._source = environment, num_test, tuple(sorted(settings.items()))
        self.limits = Limits(max_turns, max_tokens, reset_timeout_s=None, step_timeout_s=None)
        self._score = 0.0

    def tasks(self, split: str) -> Sequence[Task]:
        """The rows of its data, in their order."""
        rows = _loaded_environment(*self._source).rows[split]
        return [_task_of(row, number, split) for number, row in enumerate(rows)]

    async def agent(self, base_url: str, key: str, task: Task) -> None:
        """A rollout of verifiers, whose model is the policy."""
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        environment, rows = _loaded_environment(*self._source)
        number = task.metadata["number"]
        assert isinstance(number, int)
        endpoint = AsyncOpenAI(base_url=base_url, api_key=key, timeout=None, max_retries=0)
        # What it raises is its own fault: the model's is in the rollout.
        async with stage("step", None), endpoint:
            client = OpenAIChatCompletionsClient(endpoint)
            rollout = await environment.run_rollout(dict(rows[task.split][number]), client, "policy", {})
        error = rollout.get("error")
        if error is not None and error["error"] not in _OF_THE_MODEL:
            raise StageError("step", "error", f"verifiers: {error['error_chain_str']}")
        self._score = RewardParts(rollout["metrics"], total=rollout["reward"])

    @inline
    def grade(self, task: Task, answer: str, files: Mapping[str, str]) -> float:
        """The rubric's reward; 0 where the rollout has not come to its end."""
        del task, answer, files
        return self._score


@lru_cache(maxsize=16)
def _loaded_environment(name: str, num_test: int, settings: Settings) -> _Loaded:
    require(f"the environment {name}", "verifiers")
    import verifiers

    if not hasattr(verifiers, "load_environment"):
        raise UserError(
            f"verifiers {verifiers.__version__} has no environments such as `{name}`; "
            "pip install 'verifiers>=0.3.1,<0.4' 'openai<3'."
        )
    try:
        with _own_signals():
            environment = verifiers.load_environment(name, **dict(settings))
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"verifiers cannot load the environment `{name}`: {error}") from None
    if environment.requires_group_rollouts:
        raise UserError(
            f"the rubric of `{name}` compares rollouts; one that scores each by itself is played."
        )
    has_train = environment.dataset_source is not None
    train = environment.get_dataset().to_list() if has_train else []
    if environment.eval_dataset_source is not None:
        return _Loaded(environment, {"train": train, "test": environment.get_eval_dataset().to_list()})
    return _Loaded(environment, {"train": train[num_test:], "test": train[:num_test]})


@contextmanager
def _own_signals() -> Iterator[None]:
    """verifiers takes SIGINT and SIGTERM where it makes an environment: they are given back."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in handlers.items():
            # Outside of the main thread nobody can take them.
            with suppress(ValueError):
                signal.signal(each, handler)


def _task_of(row: Mapping[str, JSON], number: int, split: str) -> Task:
    prompt = row["prompt"]
    messages = [
        _message(str(message["role"]), message.get("content") or "")
        for message in (prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}])
        if isinstance(message, dict)
    ]
    return Task(f"{split}-{number}", tuple(messages), str(row.get("answer") or ""), {"number": number}, split)
