"""Environments of typed functions as tools, tasks, and a reward for the final answer."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from functools import cached_property
from typing import ClassVar, TypeAlias, cast, get_args

from agentrl.envs.base import Env
from agentrl.envs.declarations import Conversions
from agentrl.envs.scoring import Grade, graded
from agentrl.envs.toolbox import AlterTool, Toolbox
from agentrl.errors import StageError, ToolDefinitionError
from agentrl.tools import ArgumentPolicy, Tool, ToolFunction, Toolkit
from agentrl.types import JSON, Message, Observation, Step, Task, ToolStats, quoted
from agentrl.types.seams import ToolSchema

AnyTool: TypeAlias = ToolFunction | Tool | Toolkit


def as_tools(value: object) -> Sequence[object]:
    """A sequence of tools, or one tool.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, list | tuple):
        return value
    if callable(value) or isinstance(value, Tool | Toolkit):
        return (value,)
    raise ValueError(f"is {quoted(value)}; write a tuple of functions, such as `tools = (look, count)`")


class ToolEnv(Env):
    """Tool calls until a final answer, which is rewarded.

    Set `tools` to typed functions, methods of the class, tools with a schema of their own
    (`Tool.described`) or toolkits, and write `tasks` and `reward`:

        class Capitals(ToolEnv):
            tools = (lookup,)

            def tasks(self, split):
                return [Task.ask("fr", "What is the capital of France?", answer="Paris")]

            def reward(self, task, answer):
                return float(answer == task.answer)

    A mistake of the model never fails an episode: a wrong call, an unknown tool, a tool that overruns its
    deadline, and calls beyond the number or the time that a turn may have are answered with one sentence, and
    a huge answer of a tool is truncated.

    tools: what the model may call; `offer` adds tools in one episode.
    arguments: `strict`, or `coerce` to convert arguments that are right in meaning and wrong in type ("5" for
        5; `agentrl.tools.arguments.coerced` lists all conversions).

    `counts` has tool_calls, rejected_calls, malformed_calls, unknown_tools, tool_timeouts and surplus_calls
    of all tools together; `tool_stats` the statistics of each, see `ToolStats`.

    Raises:
        ToolDefinitionError: a tool cannot be described to a model, or `arguments` is another word.
    """

    _conversions: ClassVar[Conversions] = {**Env._conversions, "tools": as_tools}

    group = "tools"
    tools: Sequence[AnyTool] = ()
    arguments: ArgumentPolicy = "strict"
    task: Task | None = None
    _is_open = False

    def __init__(self) -> None:
        super().__init__()
        # Only described: a mistake in a tool shows when the environment is made.
        self._new_toolbox()

    # Made at first use: an `__init__` may set `tools`, and may leave out `super().__init__()`.
    @cached_property
    def _toolbox(self) -> Toolbox:
        return self._new_toolbox()

    @cached_property
    def _toolkits(self) -> list[Toolkit]:
        return [tool for tool in self.tools if isinstance(tool, Toolkit)]

    @abstractmethod
    def reward(self, task: Task, answer: str) -> Grade | Awaitable[Grade]:
        """The reward of the final answer, sync or async: a finite number, or named numbers to be summed.

        A synchronous one runs in a thread of its own, so that its deadline can end the wait; where it takes
        microseconds, mark it `agentrl.tools.inline`.
        """

    @property
    def tool_schemas(self) -> Sequence[ToolSchema]:
        """The tools on offer; before reset() those of toolkits as far as they are known."""
        unopened = () if self._is_open else self._toolkits
        return (*self._toolbox.schemas, *(schema for toolkit in unopened for schema in toolkit.schemas))

    @property
    def tool_stats(self) -> Mapping[str, ToolStats]:
        """Statistics of the calls of each tool so far."""
        return self._toolbox.stats

    async def reset(self, task: Task, *, seed: int) -> tuple[Observation, Mapping[str, JSON]]:
        """Open the toolkits for this episode, and return the task's prompt.

        Raises:
            ToolError: one of them cannot be opened.
        """
        self.seed_rng(seed)
        self.task = task
        await self._toolbox.open(self._toolkits)
        self._is_open = True
        self._check_names(self._toolbox)
        return task.prompt, {}

    async def step(self, action: Message) -> Step:
        """Answer the calls in their order, or reward the final answer.

        Raises:
            StageError: a tool or the reward function failed, which counts as a failure of the world.
        """
        if action.tool_calls:
            return Step.going(*await self._toolbox.answers(action.tool_calls, self.limits))
        if self.task is None:
            raise StageError("step", "invalid", "step() came before reset()")
        timeout_s = self.limits.reward_timeout_s
        return Step.finished(reward=await graded(self.reward, self.task, action.text, timeout_s))

    def save_records(self) -> dict[str, JSON] | None:
        """Also the statistics of tools; None with toolkits, which hold more than an environment can save."""
        records = super().save_records()
        return None if records is None or self._toolkits else {**records, "tools": self._toolbox.save()}

    def load_records(self, records: Mapping[str, JSON]) -> None:
        """Also the statistics of tools."""
        super().load_records(records)
        self._toolbox.load(cast(dict[str, JSON], records["tools"]))

    async def close(self) -> None:
        """Close the toolkits of this episode."""
        await self._toolbox.close()

    def offer(self, *tools: AnyTool) -> None:
        """Offer more tools in this episode; before reset().

        Raises:
            ToolDefinitionError: one of them cannot be described to a model, or its name is not unique.
        """
        self._toolkits.extend(tool for tool in tools if isinstance(tool, Toolkit))
        self._add(self._toolbox, tools)

    def alter_tools(self, alter: AlterTool) -> None:
        """Offer other tools in place of this episode's; before reset()."""
        self._toolbox.alter(alter)

    def _new_toolbox(self) -> Toolbox:
        if self.arguments not in get_args(ArgumentPolicy):
            raise ToolDefinitionError(
                f"{type(self).__name__}: `arguments` is {self.arguments!r}; write `strict` or `coerce`."
            )
        self.convert_attributes()
        toolbox = Toolbox(self.arguments, self.counts)
        self._add(toolbox, self.tools)
        return toolbox

    def _add(self, toolbox: Toolbox, tools: Sequence[AnyTool]) -> None:
        toolbox.add(self._bound(tool) for tool in tools if not isinstance(tool, Toolkit))
        self._check_names(toolbox)

    def _check_names(self, toolbox: Toolbox) -> None:
        names = Counter(self.dialect.names(schema.name for schema in toolbox.schemas))
        if clashes := [name for name, times in names.items() if times > 1]:
            raise ToolDefinitionError(
                f"{type(self).__name__}: `{clashes[0]}` names two things, among tools and tags of the "
                "dialect; rename one of them."
            )

    def _bound(self, function: ToolFunction | Tool) -> Tool:
        if isinstance(function, Tool):
            return function
        name = getattr(function, "__name__", "")
        # All bases: a subclass may override a method that its base offers as a tool.
        is_method = any(vars(base).get(name) is function for base in type(self).__mro__)
        return Tool.of(getattr(self, name) if is_method else function)
