"""An episode of `play` whose actions come from outside, one after another: a loop of others drives it.

Limits, deadlines, endings and scores are those of every episode here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agentrl.envs.base import Env
from agentrl.envs.play import play
from agentrl.envs.scoring import score
from agentrl.errors import StageError
from agentrl.types import Episode, Finish, Message, Observation, Task, Verdict
from agentrl.types.seams import Act, Session, ToolSchema


class _Outside:
    """An agent whose turns wait until an action is there. asked: the observations; None = no more turn.

    is_leaving: nobody acts any more, so that a turn is cut.
    """

    def __init__(self) -> None:
        self.is_leaving = False
        self.asked: asyncio.Queue[Observation | None] = asyncio.Queue()
        self.acting: asyncio.Future[Act] | None = None
        self.tools: Sequence[ToolSchema] = ()
        self.session: Session | None = None

    async def act(self, observation: Observation, *, tools: Sequence[ToolSchema], session: Session) -> Act:
        """The action that comes."""
        if self.is_leaving:
            return Act(Message("assistant"), None, finish=Finish.LENGTH)
        self.tools, self.session = tools, session
        self.acting = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(observation)
        return await self.acting

    async def close(self, session_id: str) -> None:
        """There is nothing to close."""
        del session_id


class DrivenEpisode:
    """Call `begin`, then `act` until it returns None, then `end`; `end` at any time, however it goes."""

    def __init__(self, env: Env, task: Task, *, seed: int) -> None:
        self._env, self._task, self._seed = env, task, seed
        self._player = _Outside()
        self._playing: asyncio.Task[Episode] | None = None

    @property
    def tools(self) -> Sequence[ToolSchema]:
        """The tools on offer in the turn that waits."""
        return self._player.tools

    @property
    def session(self) -> Session:
        """The part of the episode that the turn that waits belongs to.

        Raises:
            StageError: no turn has waited yet.
        """
        if self._player.session is None:
            raise StageError("step", "invalid", "the episode has had no turn")
        return self._player.session

    async def begin(self) -> Observation | None:
        """The first prompt; None = the episode has ended without a turn.

        Raises:
            StageError: the environment failed.
        """
        self._playing = asyncio.create_task(play(self._env, self._player, self._task, seed=self._seed))
        self._playing.add_done_callback(lambda _: self._player.asked.put_nowait(None))
        return await self._following()

    async def act(self, action: Message, finish: Finish = Finish.STOP) -> Observation | None:
        """What the world answers; None = the episode has ended, with this action or before it.

        Raises:
            StageError: the environment failed.
        """
        acting = self._player.acting
        if acting is None or acting.done():
            return None
        acting.set_result(Act(action, None, finish=finish))
        return await self._following()

    async def end(self) -> Verdict:
        """Its score. An episode that still goes on is cut here: truncated, and scored as it is.

        Raises:
            StageError: the environment or a reward failed, or it has not begun.
        """
        if self._playing is None:
            raise StageError("reset", "invalid", "the episode has not begun")
        # Also where a call of `act` was cancelled, and the world answers it later.
        self._player.is_leaving = True
        await self.act(Message("assistant"), Finish.LENGTH)
        scored = await score([await self._playing], self._env.rewards)
        _raise_failure(scored.episodes[0])
        return scored.verdicts[0]

    async def _following(self) -> Observation | None:
        observation = await self._player.asked.get()
        if observation is None and self._playing is not None:
            _raise_failure(await self._playing)
        return observation


def _raise_failure(episode: Episode) -> None:
    if episode.failure is not None:
        raise StageError(episode.failure.stage, episode.failure.kind, episode.failure.detail)
