"""Environments of agents that were not written as environments: they speak to an endpoint of their own.

    class Sums(HarnessEnv):
        async def agent(self, base_url, key, task):
            client = AsyncOpenAI(base_url=base_url, api_key=key)
            reply = await client.chat.completions.create(model="policy", messages=[...])
            return reply.choices[0].message.content

        def tasks(self, split):
            return [Task.ask(f"{n}", f"What is {n} + {n}?", answer=f"{2 * n}") for n in range(100)]

        def grade(self, task, answer, files):
            return float(answer.strip() == task.answer)

`program = "python agent.py"` in place of `agent` runs a program in the sandbox.

An agent of a policy with tokens may ask anything at any time: its requests are recorded as a tree. Any other
(a script, a person, a chat endpoint) answers one request after the other, in `reset` and `step`.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import copy_context
from functools import cache
from typing import NamedTuple

from agentrl.envs.base import Env
from agentrl.envs.dialect import Chat, Dialect
from agentrl.envs.gateway.recording import EpisodeRecording
from agentrl.envs.gateway.server import GATEWAY, Door, Responder, application_of, by_key, served
from agentrl.envs.gateway.turns import TurnByTurn
from agentrl.envs.generate import EpisodeInPlay
from agentrl.envs.play import Game, finish_of
from agentrl.envs.scoring import Grade, graded
from agentrl.errors import StageError, UserError
from agentrl.http.serving import address_of, cancel
from agentrl.runtime.stage import stage
from agentrl.tools.running import inline, is_inline
from agentrl.tools.shell import SandboxedProgram, ShellTool
from agentrl.types import AGENT, JSON, Ending, Failure, Finish, Limits, Message, Observation, Step, Task
from agentrl.types.seams import Act, TokenSource, ToolSchema

_PROGRAM = "program"
_MOST_LOGGED = 20
_MOST_EXCERPT = 200
_MOST_PROGRAMS = 64
_logged: set[str] = set()


class AgentOutcome(NamedTuple):
    """What an agent has left. answer: "" where it gave none. files: of its folder. truncated: its time was
    over. failure: why it has ended before its end, in one sentence."""

    answer: str = ""
    files: Mapping[str, str] = {}
    truncated: bool = False
    failure: str | None = None


@asynccontextmanager
async def _at_the_gateway(name: str, responder: Responder) -> AsyncIterator[Door]:
    """The door of an episode, open during the block; `agentrl gateway` has doors of its own."""
    gateway = await GATEWAY.get()
    async with gateway.opened(name, responder) as door:
        yield door


class HarnessEnv(Env):
    """An agent with a loop and tools of its own, which asks an endpoint for every turn.

    A subclass writes `agent`, an async function, or sets `program`, a command; and `tasks` and `grade`.

    program: run by a shell in the sandbox, in a folder of its own with the `files` of the task, and with the
        variables OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. It reaches that
        address and nothing else. Its answer is what it prints, but for its errors.
    shell: the sandbox of the program: what it may import and start, its memory, its time (`timeout_s`).
        None = 1 GiB, 64 processes and 300 s, with the programs of every shell.
    timeout_s: of a function in an episode, its turns included (seconds); None = any. An agent whose time is
        over is ended, and graded as it is, in a truncated episode. Keep `limits.episode_timeout_s` above.
    limits: `max_turns` replies, of `max_tokens` tokens each with all that comes before; later requests are
        refused in the form of their protocol. An episode in which one was is truncated.
    tools: what the tokenizer of a fresh model knows; requests bring their own.

    What an agent that the model has spoken to fails by is scored: it may be what the model has said. An agent
    that fails before its first request has failed itself, and so has the episode.

    `counts` has requests; changed_KIND, messages that the agent has changed; overruled_NAME, settings of
    sampling that it has sent; agent_failures and agent_timeouts.
    """

    group = "adapters"
    dialect: Dialect = Chat()
    limits = Limits(max_turns=50, max_tokens=8192, reset_timeout_s=None, step_timeout_s=None)
    program: str = ""
    shell: ShellTool | None = None
    timeout_s: float | None = 300.0
    tools: Sequence[ToolSchema] = ()
    task: Task | None = None
    _is_driven = False
    _opened = staticmethod(_at_the_gateway)
    _turns: TurnByTurn[AgentOutcome] | None = None
    _open: AsyncExitStack | None = None

    async def agent(self, base_url: str, key: str, task: Task) -> str | None:
        """Play an episode, and return the answer; None = there is none.

        base_url: of an endpoint as OpenAI's, which ends with `/v1`; without that, as Anthropic's. key: of it.

        Raises:
            UserError: the class has neither this function nor a program.
        """
        del base_url, key, task
        raise UserError(f"{self.id or type(self).__name__} needs an async function `agent`, or a `program`.")

    def files(self, task: Task) -> Mapping[str, str]:
        """The first files of a program: path below its folder -> text."""
        del task
        return {}

    def prepare(self, task: Task) -> str:
        """A command that runs in that folder before the program, and not as a part of it; "" = none."""
        del task
        return ""

    @abstractmethod
    def grade(self, task: Task, answer: str, files: Mapping[str, str]) -> Grade | Awaitable[Grade]:
        """The reward of an episode, sync or async, by what the agent has left: a finite number, or several.

        files: those of the folder of a program, by their paths in it; not trusted.
        """

    @property
    def tool_schemas(self) -> Sequence[ToolSchema]:
        """Those of the request that waits for a turn; else `tools`."""
        waiting = None if self._turns is None else self._turns.waiting
        return self.tools if waiting is None else waiting.tools

    @property
    def response_format(self) -> JSON:
        """That of the request that waits for a turn; None = any."""
        waiting = None if self._turns is None else self._turns.waiting
        return None if waiting is None else waiting.response_format

    def goes_on_after(self, act: Act) -> bool:
        """A reply that is cut is its client's, as of any endpoint; the episode is truncated at its end."""
        if self._turns is None or finish_of(act) is Finish.ABORT:
            return False
        self._turns.took(finish_of(act), act.usage)
        return True

    def episode_failed(self, failure: Failure) -> None:
        """Nothing: its agent is ended."""

    async def play_game(self, game: Game) -> Ending | None:
        """Play an episode of a policy with tokens; None = any other agent plays turn by turn.

        Raises:
            StageError: the policy has failed, or the agent, before its first request.
        """
        if not isinstance(game.players[AGENT], TokenSource):
            return None
        self._is_driven = True
        return await EpisodeInPlay(game).run(self._drive)

    async def reset(self, task: Task, *, seed: int) -> tuple[Observation, Mapping[str, JSON]]:
        """Start the agent, where its requests are turns; the messages of the first one.

        Raises:
            StageError: it has ended without one.
        """
        self.seed_rng(seed)
        self.task = task
        if self._is_driven:
            return task.prompt, {}
        self._open = AsyncExitStack()
        self._turns = turns = TurnByTurn[AgentOutcome](self.id, self.counts)
        await self._open.enter_async_context(self._playing(turns, task))
        observation = await turns.following()
        if observation is None:
            raise _never_asked(turns.result)
        return observation, {}

    async def step(self, action: Message) -> Step:
        """Reply to the request that waits; the messages of the next one, or the grade.

        Raises:
            StageError: the grade failed, or no request waits.
        """
        if self._turns is None or self.task is None:
            raise StageError("step", "invalid", "step() came before reset()")
        self._turns.reply(action)
        observation = await self._turns.following()
        if observation is not None:
            return Step(observation, None, False, False, {})
        outcome = self._turns.result
        reward = await self._graded(self.task, outcome)
        truncated = outcome.truncated or self._turns.was_cut
        return Step((), reward, not truncated, truncated, {})

    async def close(self) -> None:
        """End the agent."""
        if self._open is not None:
            await self._open.aclose()

    async def _drive(self, episode: EpisodeInPlay) -> None:
        """Run the agent to its end, make turns of what it has asked, and grade it."""
        await episode.reset()
        recording = EpisodeRecording(episode, self.counts)
        async with self._opened(episode.id, recording) as door:
            outcome = await self._outcome(door, episode.task)
        if not recording.has_asked:
            raise _never_asked(outcome)
        recording.keep()
        if episode.tokens.was_aborted:
            return
        reward = await self._graded(episode.task, outcome)
        episode.finish(reward, truncated=outcome.truncated or recording.was_cut)

    @asynccontextmanager
    async def _playing(self, turns: TurnByTurn[AgentOutcome], task: Task) -> AsyncIterator[None]:
        """The agent plays in a task of its own, which tells `turns` how it has ended."""
        async with self._opened(self.id or "episode", turns) as door:
            playing = asyncio.create_task(self._outcome(door, task))
            playing.add_done_callback(turns.end)
            try:
                yield
            finally:
                await cancel([playing])

    async def _outcome(self, door: Door, task: Task) -> AgentOutcome:
        """Run the agent to its end, or until the policy has failed."""
        run = self._run_program(door, task) if self.program else _run_function(self, door, task)
        running = asyncio.create_task(run)
        failing = asyncio.create_task(door.is_failing.wait())
        try:
            await asyncio.wait({running, failing}, return_when="FIRST_COMPLETED")
            outcome = running.result() if running.done() else AgentOutcome()
        finally:
            await cancel([running, failing])
        if door.failure is not None:
            raise door.failure
        if outcome.failure is not None:
            self.counts["agent_timeouts" if outcome.truncated else "agent_failures"] += 1
            _log(self.id, outcome.failure)
        return outcome

    async def _run_program(self, door: Door, task: Task) -> AgentOutcome:
        """Run the program in its sandbox, whose own network has the address of its door alone."""
        shell = self.shell or _shell()
        sandboxed = SandboxedProgram(shell, self.files(task), self.prepare(task))
        async with shell.gate.admitted("the sandbox"), sandboxed as program:
            with await program.listener() as listener:
                door.address = address_of(listener)
                async with served(application_of(by_key({door.name: door})), listener):
                    result = await program.executed(self.program, door.variables)
                    files = await program.files()
        failure = result.failure
        if failure is not None and (said := result.errors.strip().splitlines()):
            failure = f"{failure}: {said[-1][:_MOST_EXCERPT]}"
        return AgentOutcome(result.output, files, result.timed_out, failure)

    async def _graded(self, task: Task, outcome: AgentOutcome) -> float | None:
        def grade(task: Task, answer: str) -> Grade | Awaitable[Grade]:
            return self.grade(task, answer, outcome.files)

        function = inline(grade) if is_inline(self.grade) else grade
        return await graded(function, task, outcome.answer, self.limits.reward_timeout_s)


async def _run_function(env: HarnessEnv, door: Door, task: Task) -> AgentOutcome:
    try:
        async with stage(_PROGRAM, env.timeout_s):
            # Requests wait on the clocks of the stages around, this one included.
            door.context = copy_context()
            answer = await env.agent(door.base_url, door.key, task)
    except StageError as error:
        # What it raises itself, such as a ToolError, is no fault of the model.
        if error.stage != _PROGRAM:
            raise
        return AgentOutcome(truncated=error.kind == "timeout", failure=error.detail)
    if not isinstance(answer, str | None):
        raise StageError(
            _PROGRAM, "invalid", f"`agent` returned {type(answer).__name__}; return a text, or None"
        )
    return AgentOutcome(answer or "")


@cache
def _shell() -> ShellTool:
    """The sandbox of programs that name none."""
    return ShellTool(timeout_s=300.0, memory_mb=1024, processes=64, max_concurrency=_MOST_PROGRAMS)


def _never_asked(outcome: AgentOutcome) -> StageError:
    why = f": {outcome.failure}" if outcome.failure else ""
    return StageError(_PROGRAM, "invalid", f"the agent has ended without a valid request{why}")


def _log(id: str, failure: str) -> None:
    """Say once what an agent has failed by."""
    if failure not in _logged and len(_logged) < _MOST_LOGGED:
        _logged.add(failure)
        logging.getLogger(__name__).warning("%s: an agent has failed, and is graded: %s", id, failure)
