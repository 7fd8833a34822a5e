"""One group: siblings that play the same task in the same world, failures replaced."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from agentrl.algorithms.distillation import PrivilegedContext, privileged_text
from agentrl.algorithms.filters import GroupFilter
from agentrl.data import Prompt
from agentrl.envs import AnyEnv, PlayEpisode, Scorer, play
from agentrl.envs.opponents import Opponent, roles_of
from agentrl.envs.play import Game
from agentrl.envs.resuming import EpisodeInProgress, SavedPlay, StoppableEpisodes, saves_state
from agentrl.envs.scoring import Marked, failed
from agentrl.errors import StageError, UserError, WorldBrokenError
from agentrl.rollout.agent import TokenAgent, with_deadline
from agentrl.runtime.activity import group_in_play, in_play
from agentrl.runtime.clocks import SharedDeadline, Waits
from agentrl.runtime.stage import all_of, stage
from agentrl.types import Ending, Episode, Group, Task, Verdict
from agentrl.types.seams import Agent


@dataclass(frozen=True, slots=True, eq=False)
class GroupInProgress:
    """A group that was stopped in play.

    start_version: the policy's when it started. attempts: by sibling, those that have ended. stopped: by
    sibling, the attempt that goes on; None = the sibling has ended, or begins. Siblings at the end of the
    group that have not begun may be left out.
    """

    start_version: int
    attempts: tuple[tuple[Marked, ...], ...]
    stopped: tuple[EpisodeInProgress | None, ...]


class GroupStep(NamedTuple):
    """What an episode of a group has played since the last one.

    sibling, attempt: which episode, from 0. start_version: the policy's when the group started. num_before:
    steps before (count); 0 = it begins. part: between two turns, what is new of it, see `OnStep`; at its end
    all of it, but for the turns that were passed on.
    """

    ordinal: int
    sibling: int
    attempt: int
    start_version: int
    num_before: int
    part: EpisodeInProgress | Marked


LEFT_OUT = "left_out"
"""The reason of a complete group of a batch on which the caller's own loop does not train."""


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """A complete group, or None where it could not be filled; and every episode that failed.

    finished: of a group that was cancelled also the episodes that were in play, as aborted ones.
    reason: why the group was dropped: by the filter that its player has, or where batches are over-sampled.
    in_progress: of a group that was stopped, and has no outcome yet.
    """

    group: Group | None
    failed: tuple[Episode, ...]
    finished: tuple[Episode, ...]
    reason: str = ""
    in_progress: GroupInProgress | None = None

    @property
    def kept(self) -> Group | None:
        """The group, unless it was dropped."""
        return None if self.reason else self.group

    @property
    def is_broken(self) -> bool:
        """Whether it could not be filled, and was not dropped."""
        return self.group is None and not self.reason

    def ended(self, version: int) -> GroupOutcome:
        """The outcome with the version that is served at its end, where that is not the one at its start."""
        if self.group is None or version == self.group.start_version:
            return self
        return replace(self, group=replace(self.group, end_version=version))

    @property
    def ordinal(self) -> int:
        """The number of the prompt."""
        name = self.episodes[0].id.partition("-")[0] if self.group is None else self.group.id
        return int(name.removeprefix("g"))

    @property
    def episodes(self) -> tuple[Episode, ...]:
        """Every episode that was played, each once."""
        return self.finished + self.failed


class BrokenGroups:
    """Counts broken groups in a row, in the order of their start, since those that fail at once end first.

    max_in_a_row: so many end the run (count).
    """

    def __init__(self, max_in_a_row: int) -> None:
        self._max_in_a_row, self._in_a_row = max_in_a_row, 0
        # In the order of their start, from the first one that is in flight: None while they are.
        self._unsettled: dict[int, GroupOutcome | None] = {}

    @property
    def num_unsettled(self) -> int:
        """Broken groups that have ended before a group that started earlier (count)."""
        return sum(outcome is not None and outcome.is_broken for outcome in self._unsettled.values())

    def start(self, ordinal: int) -> None:
        """A group starts."""
        self._unsettled[ordinal] = None

    def end(self, ordinal: int, outcome: GroupOutcome) -> None:
        """A group ends.

        Raises:
            WorldBrokenError: it is the last of `max_in_a_row` broken ones.
        """
        self._unsettled[ordinal] = outcome
        while self._unsettled:
            first, settled = next(iter(self._unsettled.items()))
            if settled is None:
                return
            del self._unsettled[first]
            self._count(settled)

    def _count(self, outcome: GroupOutcome) -> None:
        if outcome.group is not None:
            self._in_a_row = 0
        if not outcome.is_broken:
            return
        self._in_a_row += 1
        if self._in_a_row >= self._max_in_a_row:
            episode = outcome.failed[-1]
            failure = episode.failure
            cause = f"{failure.stage} failed: {failure.detail}" if failure else str(episode.ending)
            raise WorldBrokenError(
                f"{episode.env_id}: {self._in_a_row} groups in a row could not be played "
                f"(last: {cause}); mend the environment, `agentrl eval` with it plays single episodes."
            )


@dataclass(frozen=True, slots=True)
class GroupPlayer:
    """Plays groups of `size` siblings, and with `make_greedy_agent` one more, whose agent takes the likeliest
    tokens. An episode that fails is played again, `retries` times at most.

    An episode whose reward fails has failed, too. A retry keeps the task and the world's seed and uses a
    new sampling seed. Where a reward over the whole group fails, the group is lost.

    make_agent: makes an agent of the trained policy. opponents: they play the agents that are not trained.
    drops: the dynamic sampling filter: why a complete group is dropped and replaced, None = it is kept.
    play_episode: plays an episode, `agentrl.play` or another function of its signature. timeout_s: after it
    the siblings that are still in play end with an empty turn, truncated, and no episode is played again.
    absence: of the engine, whose time is not counted then.
    episodes: plays in place of `play_episode`, and can stop; its `stop` stops all groups.
    privileged: what a teacher reads besides the prompts of an agent; None = nothing.
    note: called with what `episodes` play, turn by turn, and with each end; None = nobody keeps it.
    """

    make_env: Callable[[], AnyEnv]
    make_agent: Callable[[], Agent]
    scorer: Scorer
    size: int
    retries: int
    seed: int
    shuffle_rewards: bool = False
    opponents: Mapping[str, Opponent] = field(default_factory=dict)
    drops: GroupFilter | None = None
    play_episode: PlayEpisode = play
    timeout_s: float = math.inf
    episodes: StoppableEpisodes | None = None
    make_greedy_agent: Callable[[], Agent] | None = None
    absence: Waits = field(default_factory=Waits)
    privileged: PrivilegedContext | None = None
    note: Callable[[GroupStep], None] | None = None
    # By prompt, then by sibling: every attempt of the groups in play that has ended.
    _attempts: dict[int, list[list[Marked]]] = field(default_factory=dict, init=False, repr=False)

    async def play(self, prompt: Prompt, version: int, begun: GroupInProgress | None = None) -> GroupOutcome:
        """Play a group, or go on with it; `version` is the policy's when it starts.

        Waits for: all siblings. Unblocked by: the siblings' ends, each bounded by its deadlines; the stop of
        `episodes`. On cancellation: every sibling is cancelled and its environment closed.

        Raises:
            UserError: the filter failed.
        """
        siblings = _siblings_of(self._num_siblings, begun)
        attempts_of = self._attempts[prompt.index] = [sibling.attempts for sibling in siblings]
        deadline = SharedDeadline(self.timeout_s)
        with group_in_play(f"g{prompt.index}"), self.absence.entered(deadline):
            playing = [
                self._play_sibling(prompt, k, each, deadline, version) for k, each in enumerate(siblings)
            ]
            await all_of(playing)
            outcome = (
                GroupOutcome(None, (), (), in_progress=_in_progress(version, siblings))
                if any(sibling.stopped for sibling in siblings)
                else await self._judged(prompt, version, attempts_of)
            )
        self._attempts.pop(prompt.index, None)
        return outcome

    def cancelled(self, prompt: Prompt) -> GroupOutcome:
        """The outcome of a group whose `play` was cancelled.

        Each episode that was in play is an aborted one, without turns.
        """
        attempts_of = self._attempts.pop(prompt.index, [[] for _ in range(self._num_siblings)])
        env, task, seed = self.make_env(), prompt.task, prompt.seed
        lost, finished = [], []
        for k, attempts in enumerate(attempts_of):
            lost += [marked.episode for marked in attempts if not marked.is_usable]
            finished += [marked.episode for marked in attempts if marked.is_usable]
            if len(attempts) <= self.retries and not (attempts and attempts[-1].is_usable):
                name = _episode_id(prompt, k, len(attempts))
                finished.append(Episode(name, env.id, task, seed, env.limits, (), (), Ending.ABORTED))
        return GroupOutcome(None, tuple(lost), tuple(finished))

    @property
    def stop(self) -> Callable[[], Awaitable[None]] | None:
        """Stops all groups in play, so that they can go on later; None = they cannot."""
        return None if self.episodes is None else self.episodes.stop

    @property
    def can_move(self) -> bool:
        """Whether its groups can go on in another process from where they are: their worlds and all of their
        agents save their state."""
        return self.play_episode is play and not self.opponents and saves_state(self.make_env())

    async def _judged(
        self, prompt: Prompt, version: int, attempts_of: Sequence[Sequence[Marked]]
    ) -> GroupOutcome:
        lost = tuple(m.episode for attempts in attempts_of for m in attempts if not m.is_usable)
        siblings = [attempts[-1] for attempts in attempts_of if attempts[-1].is_usable]
        finished = tuple(marked.episode for marked in siblings)
        if len(finished) < self._num_siblings:
            return GroupOutcome(None, lost, finished)
        try:
            verdicts = await self.scorer.judge(siblings)
        except StageError as error:
            return GroupOutcome(None, lost + tuple(failed(episode, error) for episode in finished), ())
        if self.shuffle_rewards:
            verdicts = _shuffled(verdicts, random.Random(f"{self.seed}/{prompt.index}"))
        group = Group(f"g{prompt.index}", prompt.task, prompt.seed, finished, tuple(verdicts), version)
        return GroupOutcome(group, lost, finished, await self._drop_reason(group))

    async def _drop_reason(self, group: Group) -> str:
        if self.drops is None:
            return ""
        try:
            async with stage("filter", None):
                return self.drops(group) or ""
        except StageError as error:
            raise UserError(
                f"the dynamic sampling filter failed on group {group.id} ({error.detail}); mend it."
            ) from error

    async def _play_sibling(
        self, prompt: Prompt, k: int, sibling: _Sibling, deadline: SharedDeadline, version: int
    ) -> None:
        """Play an episode until it is usable, or is stopped, or the deadline is over."""
        attempts = sibling.attempts
        while len(attempts) <= self.retries and not (attempts and attempts[-1].is_usable):
            if attempts and deadline.is_over:
                return
            name = _episode_id(prompt, k, len(attempts))
            begun, notes = sibling.stopped, None
            if self.note is not None:
                step = partial(GroupStep, prompt.index, k, len(attempts), version)
                notes = _Notes(self.note, step, begun)
            with in_play(name):
                make_agent = partial(self._agent, deadline, is_greedy=k >= self.size)
                episode = await self._played(prompt, name, make_agent, begun, notes)
                if isinstance(episode, EpisodeInProgress):
                    sibling.stopped = episode
                    return
                sibling.stopped = None
                attempts.append(await self.scorer.mark(episode))
                if notes is not None:
                    notes.end(attempts[-1])

    @property
    def _num_siblings(self) -> int:
        return self.size + (self.make_greedy_agent is not None)

    def _agent(self, deadline: SharedDeadline, text: str | None, *, is_greedy: bool) -> Agent:
        make_greedy = self.make_greedy_agent if is_greedy else None
        agent = self.make_agent() if make_greedy is None else make_greedy()
        if isinstance(agent, TokenAgent):
            agent.privileged_text = text
        return agent if math.isinf(self.timeout_s) else with_deadline(agent, deadline)

    async def _played(
        self,
        prompt: Prompt,
        name: str,
        make_agent: Callable[[str | None], Agent],
        begun: EpisodeInProgress | None,
        notes: _Notes | None,
    ) -> Episode | EpisodeInProgress:
        """Play one attempt, or go on with it."""
        env, sampling_seed = self.make_env(), zlib.crc32(f"{self.seed}/{name}".encode())
        texts = await self._privileged_texts(env, prompt.task)
        agents = roles_of(
            env, prompt.task, lambda agent: make_agent(texts.get(agent)), self.opponents, seed=sampling_seed
        )
        if self.episodes is None:
            return await self.play_episode(
                env, agents, prompt.task, seed=prompt.seed, episode_id=name, sampling_seed=sampling_seed
            )
        game = Game.of(env, agents, prompt.task, prompt.seed, name, sampling_seed)
        return await self.episodes.played(game, begun, None if notes is None else notes.add)

    async def _privileged_texts(self, env: AnyEnv, task: Task) -> dict[str, str | None]:
        """What a teacher of each agent reads besides its prompts."""
        if self.privileged is None:
            return {}
        own = [name for name in env.possible_agents if name not in self.opponents]
        try:
            async with stage("privileged", None):
                return {name: privileged_text(self.privileged, task, name) for name in own}
        except StageError as error:
            raise UserError(
                f"the privileged context of task {task.id} failed ({error.detail}); mend it."
            ) from error


@dataclass(slots=True)
class _Sibling:
    """Attempts of an episode that have ended, and the one that was stopped."""

    attempts: list[Marked]
    stopped: EpisodeInProgress | None = None


class _Notes:
    """Passes on what an episode plays. step: makes a `GroupStep` of `num_before` and `part`."""

    def __init__(
        self,
        note: Callable[[GroupStep], None],
        step: Callable[[int, EpisodeInProgress | Marked], GroupStep],
        begun: EpisodeInProgress | None,
    ) -> None:
        self._note, self._step = note, step
        self._num_turns, self._num_steps = list[int](), 0
        if begun is not None and begun.played is not None:
            self._count(begun.played)

    def add(self, num_before: int, episode: EpisodeInProgress) -> None:
        """Between two turns."""
        self._note(self._step(num_before, episode))
        if episode.played is not None:
            self._count(episode.played)

    def end(self, marked: Marked) -> None:
        """At its end."""
        trajectories, num_turns = marked.episode.trajectories, self._num_turns
        if [len(each.turns) for each in trajectories[: len(num_turns)]] < num_turns:
            # It failed before it was as far as it had been.
            self._note(self._step(0, marked))
            return
        rest = tuple(
            replace(each, turns=each.turns[num_turns[i] if i < len(num_turns) else 0 :])
            for i, each in enumerate(trajectories)
        )
        episode = replace(marked.episode, trajectories=rest)
        self._note(self._step(self._num_steps, replace(marked, episode=episode)))

    def _count(self, played: SavedPlay) -> None:
        """Count the turns and steps that are passed on."""
        before = self._num_turns
        self._num_turns = [
            (before[i] if i < len(before) else 0) + len(s.turns) for i, s in enumerate(played.trajectories)
        ]
        self._num_steps += len(played.step_rewards)


def _siblings_of(size: int, begun: GroupInProgress | None) -> list[_Sibling]:
    if begun is None:
        return [_Sibling([]) for _ in range(size)]
    played = [
        _Sibling(list(attempts), stopped)
        for attempts, stopped in zip(begun.attempts, begun.stopped, strict=True)
    ]
    return played + [_Sibling([]) for _ in range(size - len(played))]


def _in_progress(start_version: int, siblings: Sequence[_Sibling]) -> GroupInProgress:
    return GroupInProgress(
        start_version,
        tuple(tuple(sibling.attempts) for sibling in siblings),
        tuple(sibling.stopped for sibling in siblings),
    )


def _episode_id(prompt: Prompt, k: int, attempt: int) -> str:
    return f"g{prompt.index}-{k}" + (f"-retry{attempt}" if attempt else "")


def _shuffled(verdicts: Sequence[Verdict], rng: random.Random) -> list[Verdict]:
    """The same totals, permuted at random among the verdicts of each agent."""
    totals: dict[str, list[float]] = {}
    for verdict in verdicts:
        totals.setdefault(verdict.agent, []).append(verdict.total)
    for agent_totals in totals.values():
        rng.shuffle(agent_totals)
    return [
        replace(
            verdict, scorer=f"{verdict.scorer}, shuffled", total=totals[verdict.agent].pop(0), turn_rewards=()
        )
        for verdict in verdicts
    ]
