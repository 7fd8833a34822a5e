"""The environment most people write: some typed functions, some tasks, a reward."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from typing import get_args

from agentrl.envs.base import Env
from agentrl.envs.scoring import Grade, graded
from agentrl.errors import StageError, ToolDefinitionError, ToolRejected, stage
from agentrl.protocols import ToolSchema
from agentrl.tools import ArgumentPolicy, ArgumentsRejected, Tool, ToolFunction
from agentrl.types import JSON, Message, Observation, Step, Task, ToolCall


class ToolEnv(Env):
    """Tool calls until a final answer, which is rewarded.

    Set `tools` to typed functions (or methods of the class) and write `tasks` and `reward`:

        class Capitals(ToolEnv):
            tools = (lookup,)

            def tasks(self, split):
                return [Task.ask("fr", "What is the capital of France?", answer="Paris")]

            def reward(self, task, answer):
                return float(answer == task.answer)

    What the model can cause never fails an episode: a wrong call, an unknown tool, a tool that
    overruns its deadline come back to it as one sentence, a huge answer of a tool comes back cut.

    arguments: `strict`, or `coerce` to mend calls that are right in meaning and wrong in type ("5" for 5;
        all of it stands at `agentrl.tools.coercion.coerced`).

    counts, beside those of all tools (tool_calls, rejected_calls, malformed_calls, unknown_tools,
    tool_timeouts), each where it happened:

        tool/NAME/calls             calls of this tool
        tool/NAME/malformed         of which could not be read (broken JSON and the like)
        tool/NAME/coerced           fitted the schema only after they had been mended
        tool/NAME/rejected/KIND     broke the schema: `required`, `type`, `enum`, ... (a keyword of JSON
                                    Schema), `value` (a pydantic model's own check); or `tool`: it said no
        tool/NAME/timeouts          were stopped at the deadline
        tool/NAME/truncated         had answers longer than `limits.max_tool_chars`
        tool/NAME/us                microseconds of wall time, all calls together
    """

    tools: Sequence[ToolFunction] = ()
    arguments: ArgumentPolicy = "strict"

    def __init__(self) -> None:
        super().__init__()
        self.task: Task | None = None
        if self.arguments not in get_args(ArgumentPolicy):
            raise ToolDefinitionError(
                f"{type(self).__name__}: `arguments` is {self.arguments!r}; write `strict` or `coerce`."
            )
        offered = [self._bound(function) for function in self.tools]
        names = Counter(self.dialect.names(tool.name for tool in offered))
        if clashes := [name for name, times in names.items() if times > 1]:
            raise ToolDefinitionError(
                f"{type(self).__name__}: `{clashes[0]}` names two things, among tools and tags of the "
                "dialect; rename one of them."
            )
        self._toolbox = {tool.name: tool for tool in offered}
        self._seconds: dict[str, float] = {}

    @abstractmethod
    def reward(self, task: Task, answer: str) -> Grade | Awaitable[Grade]:
        """What the final answer is worth, sync or async: a finite number, or named ones to be summed.

        A synchronous one runs in a thread of its own, so that its deadline can strike; where it takes
        microseconds, mark it `agentrl.tools.inline`.
        """

    @property
    def tool_schemas(self) -> Sequence[ToolSchema]:
        """The tools on offer."""
        return tuple(tool.schema for tool in self._toolbox.values())

    async def reset(self, task: Task, *, seed: int) -> tuple[Observation, Mapping[str, JSON]]:
        """Show the task's prompt."""
        self.seed_rng(seed)
        self.task = task
        return task.prompt, {}

    async def step(self, action: Message) -> Step:
        """Answer the calls in their order, or reward the final answer.

        Raises:
            StageError: a tool or the reward function broke (the world's failure).
        """
        if action.tool_calls:
            return Step.going(*[await self._answer(tool_call) for tool_call in action.tool_calls])
        if self.task is None:
            raise StageError("step", "invalid", "step() came before reset()")
        timeout_s = self.limits.reward_timeout_s
        return Step.finished(reward=await graded(self.reward, self.task, action.content, timeout_s))

    def _bound(self, function: ToolFunction) -> Tool:
        name = getattr(function, "__name__", "")
        # All bases: a subclass may override a method that its base offers as a tool.
        if any(vars(base).get(name) is function for base in type(self).__mro__):
            function = getattr(self, name)
        return Tool.of(function)

    async def _answer(self, tool_call: ToolCall) -> Message:
        self.counts["tool_calls"] += 1
        text, name = _encodable(await self._outcome(tool_call)), _encodable(tool_call.name)
        return Message("tool", text, tool_call_id=tool_call.id, name=name)

    async def _outcome(self, tool_call: ToolCall) -> str:
        # Names that the model made up never become names of counts: there is no end to them.
        name = tool_call.name if tool_call.name in self._toolbox else ""
        if name:
            self._count(name, "calls")
        if tool_call.arguments is None:
            self.counts["malformed_calls"] += 1
            if name:
                self._count(name, "malformed")
            return tool_call.error or ""
        if not name:
            self.counts["unknown_tools"] += 1
            return (
                f"There is no tool {tool_call.name[:40]!r}; there are {', '.join(self._toolbox) or 'none'}."
            )
        began = time.perf_counter()
        try:
            return self._bounded(name, await self._stopped_in_time(name, tool_call.arguments))
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began
            self.counts[f"tool/{name}/us"] = round(1e6 * self._seconds[name])

    async def _stopped_in_time(self, name: str, arguments: Mapping[str, JSON]) -> str:
        try:
            async with stage("tool", self.limits.tool_timeout_s):
                return await self._invoke(self._toolbox[name], arguments)
        except StageError as error:
            # The model chose the arguments: were an overrun a failure, the episode would be
            # replaced, and hanging the tool would be a way out of a hard task.
            if error.kind != "timeout":
                raise
            self.counts["tool_timeouts"] += 1
            self._count(name, "timeouts")
            return f"{name} was stopped: it {error.detail}."

    async def _invoke(self, tool: Tool, arguments: Mapping[str, JSON]) -> str:
        try:
            reading = tool.reader.read(arguments, self.arguments)
            if reading.coerced:
                self._count(tool.name, "coerced")
            return await tool.call(reading.values)
        except ToolRejected as rejected:
            kind = rejected.kind if isinstance(rejected, ArgumentsRejected) else "tool"
            self.counts["rejected_calls"] += 1
            self._count(tool.name, f"rejected/{kind}")
            return str(rejected)

    def _bounded(self, name: str, text: str) -> str:
        most = self.limits.max_tool_chars
        if most is None or len(text) <= most:
            return text
        self._count(name, "truncated")
        return f"{text[:most]}\n... truncated: {len(text) - most:,} of {len(text):,} characters are left out."

    def _count(self, name: str, what: str) -> None:
        self.counts[f"tool/{name}/{what}"] += 1


def _encodable(text: str) -> str:
    """The same without halves of surrogate pairs: JSON can hold them, no tokenizer and no file takes them."""
    return text.encode("utf-8", "replace").decode()
