"""The environment most people write: some typed functions, some tasks, a reward."""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from numbers import Real

from agentrl.envs.base import Env
from agentrl.errors import StageError, ToolDefinitionError, ToolRejected, stage
from agentrl.protocols import ToolSchema
from agentrl.tools import Tool, ToolFunction
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
    overruns its deadline come back to it as one sentence, and are counted.
    """

    tools: Sequence[ToolFunction] = ()

    def __init__(self) -> None:
        super().__init__()
        self.task: Task | None = None
        offered = [self._bound(function) for function in self.tools]
        names = Counter(self.dialect.names(tool.name for tool in offered))
        if clashes := [name for name, times in names.items() if times > 1]:
            raise ToolDefinitionError(
                f"{type(self).__name__}: `{clashes[0]}` names two things, among tools and tags of the "
                "dialect; rename one of them."
            )
        self._toolbox = {tool.name: tool for tool in offered}

    @abstractmethod
    def reward(self, task: Task, answer: str) -> float | Awaitable[float]:
        """What the final answer is worth; sync or async, a finite number."""

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
        return Step.finished(reward=await self._reward(action.content))

    def _bound(self, function: ToolFunction) -> Tool:
        name = getattr(function, "__name__", "")
        # All bases: a subclass may override a method that its base offers as a tool.
        if any(vars(base).get(name) is function for base in type(self).__mro__):
            function = getattr(self, name)
        return Tool.of(function)

    async def _answer(self, tool_call: ToolCall) -> Message:
        self.counts["tool_calls"] += 1
        return Message("tool", await self._outcome(tool_call), tool_call_id=tool_call.id, name=tool_call.name)

    async def _outcome(self, tool_call: ToolCall) -> str:
        if tool_call.arguments is None:
            self.counts["malformed_calls"] += 1
            return tool_call.error or ""
        if tool_call.name not in self._toolbox:
            self.counts["unknown_tools"] += 1
            return (
                f"There is no tool {tool_call.name[:40]!r}; there are {', '.join(self._toolbox) or 'none'}."
            )
        try:
            async with stage("tool", self.limits.tool_timeout_s):
                return await self._invoke(self._toolbox[tool_call.name], tool_call.arguments)
        except StageError as error:
            # The model chose the arguments: were an overrun a failure, the episode would be
            # replaced, and hanging the tool would be a way out of a hard task.
            if error.kind != "timeout":
                raise
            self.counts["tool_timeouts"] += 1
            return f"{tool_call.name} was stopped: it {error.detail}."

    async def _invoke(self, tool: Tool, arguments: Mapping[str, JSON]) -> str:
        try:
            return await tool.invoke(arguments)
        except ToolRejected as rejected:
            self.counts["rejected_calls"] += 1
            return str(rejected)

    async def _reward(self, answer: str) -> float:
        if self.task is None:
            raise StageError("step", "invalid", "step() came before reset()")
        async with stage("reward", self.limits.reward_timeout_s):
            given = self.reward(self.task, answer)
            reward = await given if inspect.isawaitable(given) else given
            if not isinstance(reward, Real) or not math.isfinite(reward):
                raise StageError("reward", "invalid", f"the reward is {reward!r}, return a finite number")
        return float(reward)
