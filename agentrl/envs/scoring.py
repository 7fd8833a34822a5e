"""From episodes to verdicts. Scores are kept apart from the episode, never inside it.

The score of an episode is the sum of its step rewards plus the weighted rewards of its environment:

    def brevity(episode):
        return 1 / (1 + len(episode.turns[-1].action.text))

    async def rank(siblings):
        return await preferences_among([episode.turns[-1].action.text for episode in siblings])

    class Essays(SingleTurnEnv):
        rewards = (Reward(brevity, weight=0.1), GroupReward(rank), ...)

    Verdict.total = sum of the step rewards + sum of weight x part         one for each agent of the episode
    Verdict.parts = {"env": sum of the step rewards, "brevity": ..., "rank": ...}, unweighted

Rewards read an episode and never change it, so that finished episodes can be scored again:
`await score(episodes, rewards)`.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real

import numpy as np

from agentrl.errors import StageError, UserError
from agentrl.runtime.stage import stage
from agentrl.tools import inline, is_inline, run
from agentrl.types import AGENT, Ending, Episode, Failure, Limits, RewardParts, Task, Verdict

UNUSABLE = (Ending.FAILED, Ending.ABORTED)
"""Endings after which an episode is neither scored nor trained on."""

ENV = "env"
"""The part of a verdict that is the sum of the step rewards."""

_SCORE = "score"
_MAX_CONCURRENT_SCORES = 64
_JUDGED_AT_ONCE = 256
_NAME = re.compile(r"\w[\w.-]*")


Measure = float | Mapping[str, float]
"""The result of a reward function: a number for every agent of the episode, or one for each by name."""


@dataclass(frozen=True, slots=True)
class Reward:
    """One measure of an episode: a function of it, sync or async, that returns a finite number.

    Where an episode has several agents, all of them get the number; a mapping by name has a number for each,
    and agents that it leaves out get none.

    function: from an episode to the number, or to named numbers.
    weight: its factor in the total; 0 = only measured and journalled.
    name: the name of the part; left out: that of the function.

    A synchronous function runs in a thread of its own unless it is marked `agentrl.tools.inline`;
    `Limits.reward_timeout_s` is its deadline. Where it raises, overruns or returns anything but a finite
    number, the episode has failed: it is replaced, never trained on as a zero. Episodes that a limit
    truncated are measured as well; `episode.ending` distinguishes them.

    Raises:
        UserError: it is no function, or its name or weight is invalid.
    """

    function: Callable[[Episode], Measure | Awaitable[Measure]]
    weight: float = 1.0
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _checked_name(self))


@dataclass(frozen=True, slots=True)
class GroupReward:
    """One measure that compares siblings: from a group's episodes to one finite number for each,
    or to a mapping by agent for each.

    All else is as for `Reward`; where it fails, the whole group is replaced. Siblings share the task and the
    seed of the world; an evaluation that plays a task once has groups of one.

    Raises:
        UserError: it is no function, or its name or weight is invalid.
    """

    function: Callable[[Sequence[Episode]], Sequence[Measure] | Awaitable[Sequence[Measure]]]
    weight: float = 1.0
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _checked_name(self))


@dataclass(frozen=True, slots=True, eq=False)
class Marked:
    """An episode and the results of its own rewards; where one of them failed, the episode has failed.

    parts: by agent, then by the name of the reward.
    """

    episode: Episode
    parts: Mapping[str, Mapping[str, float]]

    @property
    def is_usable(self) -> bool:
        """Whether it can be scored and trained on."""
        return self.episode.ending not in UNUSABLE


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Episodes in their order, and the verdicts of those that are usable: one for each agent, in that
    order."""

    episodes: tuple[Episode, ...]
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True, slots=True)
class Scorer:
    """Scores by step rewards and by `rewards`; without any of these it costs microseconds.

    step_weight: the factor of the step rewards in the total.

    Raises:
        UserError: a reward is of another type, or two have the same name.
    """

    rewards: Sequence[Reward | GroupReward] = ()
    name: str = ENV
    step_weight: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.rewards, list | tuple):
            raise UserError(f"`rewards` is {self.rewards!r}; write a tuple, `rewards = (Reward(...),)`.")
        for reward in self.rewards:
            if not isinstance(reward, Reward | GroupReward):
                raise UserError(f"`rewards` holds {reward!r}; wrap it in Reward(...) or GroupReward(...).")
        names = [reward.name for reward in self.rewards]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(f"two rewards are called `{twice[0]}`; give one another `name=`.")

    async def mark(self, episode: Episode) -> Marked:
        """Run the rewards of single episodes, one after another, on one that has ended.

        Waits for: each reward. Unblocked by: its end or its deadline. On cancellation: the thread of a
        synchronous reward runs on.
        """
        parts: dict[str, dict[str, float]] = {agent: {} for agent in episode.agents}
        if episode.ending in UNUSABLE:
            return Marked(episode, parts)
        try:
            for reward in self.rewards:
                if isinstance(reward, Reward):
                    value = await _returned(reward, partial(reward.function, episode), episode.limits)
                    _add_part(parts, reward.name, value)
        except StageError as error:
            return Marked(failed(episode, error), {})
        return Marked(episode, parts)

    async def judge(self, siblings: Sequence[Marked]) -> list[Verdict]:
        """Run the rewards of groups on usable siblings and give each its verdicts: one for each agent.

        Raises:
            StageError: a reward failed; no episode of the group can be scored.
        """
        parts = [
            {agent: dict(marked.parts.get(agent, {})) for agent in marked.episode.agents}
            for marked in siblings
        ]
        episodes = tuple(marked.episode for marked in siblings)
        for reward in self.rewards:
            if isinstance(reward, GroupReward):
                work = partial(reward.function, episodes)
                values = await _returned(reward, work, episodes[0].limits)
                for own, value in zip(parts, _per_sibling(values, reward, len(episodes)), strict=True):
                    _add_part(own, reward.name, value)
        return [
            self._verdict(episode, agent, own[agent])
            for episode, own in zip(episodes, parts, strict=True)
            for agent in episode.agents
        ]

    async def judge_all(self, marked: Sequence[Marked]) -> Scored:
        """Give verdicts to any usable episodes, siblings together: those of one task in one world."""
        groups: defaultdict[tuple[str, str, int], list[int]] = defaultdict(list)
        episodes = [candidate.episode for candidate in marked]
        for index, episode in enumerate(episodes):
            if marked[index].is_usable:
                groups[episode.env_id, episode.task.id, episode.seed].append(index)
        verdicts: defaultdict[str, list[Verdict]] = defaultdict(list)
        for number, indices in enumerate(groups.values()):
            if number % _JUDGED_AT_ONCE == 0:
                # Many thousand groups take seconds, in which a cancellation takes effect.
                await asyncio.sleep(0)
            try:
                for verdict in await self.judge([marked[k] for k in indices]):
                    verdicts[verdict.episode_id].append(verdict)
            except StageError as error:
                for k in indices:
                    episodes[k] = failed(episodes[k], error)
        return Scored(tuple(episodes), tuple(v for episode in episodes for v in verdicts[episode.id]))

    def _verdict(self, episode: Episode, agent: str, parts: Mapping[str, float]) -> Verdict:
        weights = {reward.name: reward.weight for reward in self.rewards}
        own = _weighed(sum_of_steps(episode, agent), self.step_weight)
        total = own.total + sum(weights[name] * part for name, part in parts.items())
        _finite(total, "the total")
        return replace(own, scorer=self.name, total=total, parts={**own.parts, **parts})


async def score(
    episodes: Iterable[Episode], rewards: Sequence[Reward | GroupReward], *, name: str = "rescored"
) -> Scored:
    """Score finished episodes, new ones or those of a journal, by other rewards.

    Nothing is played and no episode is changed: the verdicts are new, with the scorer `name`. A failed
    episode has none; one whose reward fails now is returned as failed, without a verdict.

        entries = read_journal(path)
        scored = await score([entry.episode for entry in entries], [Reward(brevity)])

    Raises:
        UserError: a reward is of another type, or two have the same name.
    """
    scorer = Scorer(rewards, name)
    semaphore = asyncio.Semaphore(_MAX_CONCURRENT_SCORES)

    async def mark(episode: Episode) -> Marked:
        async with semaphore:
            return await scorer.mark(episode)

    return await scorer.judge_all(await asyncio.gather(*map(mark, episodes)))


def sum_of_steps(episode: Episode, agent: str = AGENT) -> Verdict:
    """The environment's own score of an agent: the sum of its step rewards.

    parts: this sum, as `env`, and as `env/NAME` the named parts of step rewards, summed over steps.
    An episode that a limit truncated before any reward scores 0.0: not solving a task in time is an
    outcome of the policy, not a missing measurement.
    """
    reward = episode.total_of(agent)
    total = 0.0 if reward is None else float(reward)
    step_parts = reward.parts if isinstance(reward, RewardParts) else {}
    parts = {ENV: total, **{f"{ENV}/{name}": part for name, part in step_parts.items()}}
    return Verdict(episode.id, ENV, total, parts, episode.rewards_of(agent), agent)


def _weighed(verdict: Verdict, weight: float) -> Verdict:
    """The verdict with its total and the rewards of turns times a weight; parts are unweighted."""
    if weight == 1.0:
        return verdict
    turns = tuple(None if reward is None else weight * reward for reward in verdict.turn_rewards)
    return replace(verdict, total=weight * verdict.total, turn_rewards=turns)


Grade = float | Mapping[str, float]
"""The reward of an answer: a number, or named parts that are summed. Where one of them is called `score`, as
in the functions of verl, it is the reward, and the others are only journalled, as those of a `RewardParts`
are."""

AnswerReward = Callable[[Task, str], Grade | Awaitable[Grade]]
"""The reward of an answer to a task, sync or async."""


async def graded(function: AnswerReward, task: Task, answer: str, timeout_s: float | None) -> float:
    """The reward of an answer by an environment's own function; RewardParts where that returns parts.

    Raises:
        StageError: it raised, overran `timeout_s` or returned anything but finite numbers.
    """
    async with stage("reward", timeout_s):
        grade = await run(partial(function, task, answer), thread=None if is_inline(function) else "reward")
    return reward_of(grade)


def of_last_answers(function: AnswerReward, name: str) -> Reward:
    """A reward of an episode by the last answer of each of its agents: the text of its last turn, with any
    calls in it; 0 where a limit truncated the episode. An agent without a turn has answered ""."""
    thread = None if is_inline(function) else f"reward {name}"

    @inline
    async def grade(episode: Episode) -> Mapping[str, float]:
        if episode.ending is Ending.TRUNCATED:
            return dict.fromkeys(episode.agents, 0.0)
        grades = {}
        for agent in episode.agents:
            last = [turn.action for turn in episode.turns_of(agent)[-1:]]
            answer = "".join(part for said in last for part in (said.text, *(c.raw for c in said.tool_calls)))
            grade_of = partial(function, episode.task, answer)
            grades[agent] = float(reward_of(await run(grade_of, thread=thread)))
        return grades

    return Reward(grade, name=name)


def reward_of(grade: object) -> float:
    """A grade as a reward: a number, or RewardParts where it is a mapping of named parts (see `Grade`).

    Raises:
        StageError: it holds anything but finite numbers.
    """
    named = grade.parts if isinstance(grade, RewardParts) else grade
    if not isinstance(named, Mapping):
        return _finite(grade, "the reward")
    total = float(grade) if isinstance(grade, RewardParts) else None
    if total is None and _SCORE in named:
        total = _finite(named[_SCORE], f"the part `{_SCORE}` of the reward")
        # verl's have texts beside it, such as what was read as the answer.
        named = {name: part for name, part in named.items() if isinstance(part, Real | np.bool_)}
    parts = {str(name): _finite(part, f"the part `{name}` of the reward") for name, part in named.items()}
    reward = RewardParts(parts, total=total)
    _finite(reward, "the reward")
    return reward


def failed(episode: Episode, error: StageError) -> Episode:
    """The same episode, failed by an error after its end."""
    failure = Failure(error.stage, error.kind, error.detail)
    return replace(episode, ending=Ending.FAILED, failure=failure)


def _checked_name(reward: Reward | GroupReward) -> str:
    kind = type(reward).__name__
    if not callable(reward.function):
        raise UserError(f"{kind} takes a function, got {reward.function!r}.")
    name = reward.name or str(getattr(reward.function, "__name__", type(reward.function).__name__))
    if not _NAME.fullmatch(name) or name == ENV:
        raise UserError(
            f"a {kind} cannot be called `{name}`; give it a `name=` of letters, digits and underscores, "
            f"other than `{ENV}`."
        )
    if not math.isfinite(reward.weight):
        raise UserError(f"{kind} `{name}` has the weight {reward.weight}; give it a finite one.")
    return name


async def _returned(reward: Reward | GroupReward, work: Callable[[], object], limits: Limits) -> object:
    thread = None if is_inline(reward.function) else f"reward {reward.name}"
    try:
        async with stage("reward", limits.reward_timeout_s, reward.name):
            return await run(work, thread=thread)
    except StageError as error:
        raise StageError("reward", error.kind, f"`{reward.name}` failed: {error.detail}") from error


def _add_part(parts: dict[str, dict[str, float]], name: str, measure: object) -> None:
    """Add the result of a reward: one number for every agent, or one for each by name."""
    by_agent = measure if isinstance(measure, Mapping) else dict.fromkeys(parts, measure)
    if unknown := sorted(set(by_agent) - set(parts)):
        raise StageError(
            "reward", "invalid", f"`{name}` names {unknown[0]!r}, which is no agent of the episode"
        )
    for agent, value in by_agent.items():
        parts[agent][name] = _finite(value, f"`{name}`")


def _per_sibling(measures: object, reward: GroupReward, n: int) -> list[object]:
    values: list[object] = list(measures) if isinstance(measures, Iterable) else []
    if len(values) != n:
        reason = f"`{reward.name}` returned {repr(measures)[:80]}; return one number for each of {n} siblings"
        raise StageError("reward", "invalid", reason)
    return values


def _finite(value: object, what: str) -> float:
    try:
        number = float(value) if isinstance(value, Real | np.bool_) else math.nan
    except OverflowError:  # an int beyond every float
        number = math.inf
    if not math.isfinite(number):
        raise StageError("reward", "invalid", f"{what} is {repr(value)[:80]}, return a finite number")
    return number
