"""Playing the episodes of an evaluation: the same loop, agent and limits as in training."""

from __future__ import annotations

import re
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from agentrl.envs import AnyEnv, PlayEpisode, Scorer, play
from agentrl.envs.opponents import AgentsOf
from agentrl.envs.scoring import Marked, Scored
from agentrl.errors import ConfigError, WorldBrokenError
from agentrl.evaluation.record import EpisodeRecord, Record, has_group_rewards
from agentrl.evaluation.report import EvalReport, EvalSetting, scores_by_unit, scores_of, spent_on, summarize
from agentrl.evaluation.statistics import paired_difference, pooled
from agentrl.records import Entry, Outcome
from agentrl.runtime.activity import in_play
from agentrl.runtime.stage import all_of
from agentrl.tools.running import in_thread
from agentrl.types import Episode, Task, Verdict

_SAMPLE = re.compile(r"-\d+$")


class PlannedEpisode(NamedTuple):
    """One episode of an evaluation; all of it is a function of the seed and of its numbers.

    number: of its prompt. sample: of the episode among those of its prompt, which share a world. prompts: the
    name of the set of prompts, "" for a single one.
    """

    task: Task
    number: int
    sample: int
    seed: int
    prompts: str = ""

    @property
    def id(self) -> str:
        """Its id: e7, e7-1 for its prompt's second episode, NAME/e7 in a named set."""
        prefix = f"{self.prompts}/" if self.prompts else ""
        return f"{prefix}e{self.number}" + (f"-{self.sample}" if self.sample else "")

    @property
    def world_seed(self) -> int:
        """The seed of the world, which episodes of one prompt share."""
        return zlib.crc32(f"world/{self.seed}/{self._prompt}".encode())

    @property
    def sampling_seed(self) -> int:
        """The seed of the agents."""
        sample = f"/{self.sample}" if self.sample else ""
        return zlib.crc32(f"sample/{self.seed}/{self._prompt}{sample}".encode())

    @property
    def _prompt(self) -> str:
        return f"{self.prompts}/{self.number}" if self.prompts else f"{self.number}"


def planned(
    tasks: Sequence[Task], n: int, *, samples: int, seed: int, prompts: str = ""
) -> list[PlannedEpisode]:
    """The episodes of n prompts, in the order of `tasks` and starting over at the end: `samples` of each."""
    return [
        PlannedEpisode(tasks[number % len(tasks)], number, sample, seed, prompts)
        for number in range(n)
        for sample in range(samples)
    ]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Episodes, verdicts and the report. verdicts: of the scored episodes and their agents, in order."""

    breakdown: str | None
    report: EvalReport
    episodes: tuple[Episode, ...]
    verdicts: tuple[Verdict, ...]

    def entries(self) -> Iterator[Entry]:
        """Every episode for the journal, failed ones without a verdict."""
        verdicts: defaultdict[str, list[Verdict]] = defaultdict(list)
        for verdict in self.verdicts:
            verdicts[verdict.episode_id].append(verdict)
        for episode in self.episodes:
            yield Entry(episode, tuple(verdicts[episode.id]), Outcome.EVALUATED)


def over_sets(
    evaluations: Mapping[str, Evaluation], again: Mapping[str, str] = MappingProxyType({})
) -> EvalReport:
    """The report over all sets of prompts; that of a single one without a name is its own.

    again: of sets that were played once more in another way, the name of the one as it is, by the other's.
    They have reports, with the difference in them, and a part in what was spent alone.
    """
    report = _over({name: evaluation for name, evaluation in evaluations.items() if name not in again})
    others = {name: _against(evaluations[base], evaluations[name]) for name, base in again.items()}
    episodes = [episode for evaluation in evaluations.values() for episode in evaluation.episodes]
    spent = spent_on(episodes) if others else {}
    return replace(report, sets={**report.sets, **others}, spent=spent)


def _against(first: Evaluation, second: Evaluation) -> EvalReport:
    """The report of the second, with the difference of its mean score to the first's, task by task."""
    return replace(second.report, difference=paired_difference(_by_unit(first), _by_unit(second)))


def _by_unit(evaluation: Evaluation) -> Mapping[str, Sequence[float]]:
    scores = scores_of(evaluation.episodes, evaluation.verdicts)
    return pooled(scores_by_unit(evaluation.episodes, scores))


def first_of(id: str) -> str:
    """The id of the first episode of the prompt that an episode plays."""
    return _SAMPLE.sub("", id)


def _over(evaluations: Mapping[str, Evaluation]) -> EvalReport:
    if list(evaluations) == [""]:
        return evaluations[""].report
    reports = {name: evaluation.report for name, evaluation in evaluations.items()}
    first = next(iter(evaluations.values()))
    setting = EvalSetting(first.report.env_id, ", ".join(reports), first.report.temperature, first.breakdown)
    total = summarize(
        [episode for evaluation in evaluations.values() for episode in evaluation.episodes],
        [verdict for evaluation in evaluations.values() for verdict in evaluation.verdicts],
        setting,
        seconds=sum(report.seconds for report in reports.values()),
    )
    return replace(total, sets=reports)


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Plays episodes over a list of tasks, at most `concurrency` at once.

    agents_of: creates the agents of an episode. progress: called after every episode with 1, and with the
    number of those that were recorded before. play_episode: plays an episode, `agentrl.play` or another
    function of its signature.
    """

    make_env: Callable[[], AnyEnv]
    agents_of: AgentsOf
    scorer: Scorer
    setting: EvalSetting
    concurrency: int = 256
    progress: Callable[[int], None] = lambda _: None
    play_episode: PlayEpisode = play

    async def run(
        self,
        tasks: Sequence[Task],
        n: int,
        *,
        seed: int,
        samples: int = 1,
        prompts: str = "",
        record: EpisodeRecord | None = None,
    ) -> Evaluation:
        """Play `samples` episodes of each of n prompts: `tasks` in their order, starting over at the end.

        prompts: the name of the set of prompts; it distinguishes ids and seeds. record: see `play_all`.

        Raises:
            ConfigError: there are no tasks, or no prompt fits into an episode.
            WorldBrokenError: every episode failed, in play or in scoring.
            DiskError: the disk does not take the record.
        """
        if not tasks:
            raise ConfigError(f"{self.setting.env_id} has no tasks in split `{self.setting.split}`.")
        plan = planned(tasks, n, samples=samples, seed=seed, prompts=prompts)
        evaluation = await self.play_all(plan, record)
        self._check(evaluation)
        return evaluation

    def _check(self, evaluation: Evaluation) -> None:
        """Check that it measures something."""
        episodes = evaluation.episodes
        if not evaluation.verdicts:
            first = episodes[0]
            cause = f"{first.failure.stage} failed: {first.failure.detail}" if first.failure else first.ending
            is_model = first.failure is not None and first.failure.stage == "act"
            culprit = "the model's end" if is_model else "the environment"
            raise WorldBrokenError(
                f"{self.setting.env_id}: all {len(episodes)} episodes failed (first: {cause}); mend "
                f"{culprit}."
            )
        if not any(map(_has_policy_tokens, episodes)):
            most = episodes[0].limits.max_tokens
            raise ConfigError(
                f"{self.setting.env_id}: no prompt leaves room for a single token of the model in an "
                f"episode of {most} tokens; raise rollout_max_context_len."
            )

    async def play_all(
        self, plan: Sequence[PlannedEpisode], record: EpisodeRecord | None = None
    ) -> Evaluation:
        """Play the episodes of a plan that the record lacks, then score and count all of them.

        However it ends, the record holds every episode that has ended.

        Waits for: `concurrency` episodes at a time. Unblocked by: their ends, each bounded by its deadlines.
        On cancellation: the episodes in progress are closed; no other has begun.

        Raises:
            DiskError: the disk does not take the record.
        """
        started = time.perf_counter()
        marked: dict[str, Marked] = {}
        if record is not None:
            started -= record.seconds
            marked |= await record.marked({episode.id for episode in plan}, self.scorer)
        if marked:
            self.progress(len(marked))
        missing = [episode for episode in plan if episode.id not in marked]
        workers = range(min(self.concurrency, len(missing)))
        async with nullcontext(_unrecorded) if record is None else record.writing(self.scorer) as add:
            episodes = iter(missing)
            await all_of([self._work(episodes, marked, add) for _ in workers])
        scored = await self.scorer.judge_all([marked[episode.id] for episode in plan])
        evaluation = await self._evaluation(scored, time.perf_counter() - started)
        if record is not None and has_group_rewards(self.scorer):
            await record.replace(list(evaluation.entries()))
        return evaluation

    async def play(self, episode: PlannedEpisode) -> Marked:
        """Play one episode in an environment of its own, and run its rewards, but for those of groups."""
        env, task = self.make_env(), episode.task
        with in_play(episode.id):
            played = await self.play_episode(
                env,
                self.agents_of(env, task, episode.sampling_seed),
                task,
                seed=episode.world_seed,
                episode_id=episode.id,
                sampling_seed=episode.sampling_seed,
            )
            return await self.scorer.mark(played)

    async def _work(self, episodes: Iterator[PlannedEpisode], marked: dict[str, Marked], add: Record) -> None:
        """Play one episode after another, until none is left; other workers take from the same.

        So an interruption has as few tasks to cancel as episodes run, however many are left.
        """
        for episode in episodes:
            played = marked[episode.id] = await self.play(episode)
            await add(played)
            self.progress(1)

    async def _evaluation(self, scored: Scored, seconds: float) -> Evaluation:
        """In a thread: over 200,000 episodes it takes seconds, in which the event loop goes on."""
        work = partial(summarize, scored.episodes, scored.verdicts, self.setting, seconds=seconds)
        report = await in_thread(work, "report")
        return Evaluation(self.setting.breakdown, report, scored.episodes, scored.verdicts)


async def _unrecorded(marked: Marked) -> None:
    """Keep an episode in memory alone."""


def _has_policy_tokens(episode: Episode) -> bool:
    """Whether the agent sampled any token, or plays without tokens."""
    tokens = [turn.tokens for turn in episode.turns]
    return any(turn is None or len(turn.completion.token_ids) for turn in tokens) or not tokens
