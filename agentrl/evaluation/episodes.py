"""Playing the episodes of an evaluation: the same loop, agent and limits as in training."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.envs import AnyEnv, PlayEpisode, Scorer, play
from agentrl.envs.opponents import Opponent, agents_of
from agentrl.envs.scoring import Marked
from agentrl.errors import ConfigError, WorldBrokenError, all_of
from agentrl.evaluation.report import EvalReport, EvalSetting, summarize
from agentrl.observe import Entry, Outcome
from agentrl.protocols import Agent
from agentrl.types import Episode, Task, Verdict


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


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Plays n episodes over a list of tasks, at most `concurrency` at once.

    progress: called after every episode with 1.
    opponents: they play the agents that the policy does not play.
    play_episode: plays an episode, `agentrl.play` or another function of its signature.
    """

    make_env: Callable[[], AnyEnv]
    make_agent: Callable[[], Agent]
    scorer: Scorer
    setting: EvalSetting
    concurrency: int = 256
    progress: Callable[[int], None] = lambda _: None
    opponents: Mapping[str, Opponent] = field(default_factory=dict)
    play_episode: PlayEpisode = play

    async def run(self, tasks: Sequence[Task], n: int, *, seed: int) -> Evaluation:
        """Play n episodes over `tasks` in their order, starting over at the end.

        Raises:
            ConfigError: there are no tasks, or no prompt fits into an episode.
            WorldBrokenError: every episode failed, in play or in scoring.
        """
        if not tasks:
            raise ConfigError(f"{self.setting.env_id} has no tasks in split `{self.setting.split}`.")
        started = time.perf_counter()
        slots = asyncio.Semaphore(self.concurrency)
        marked = await all_of([self._play(tasks[i % len(tasks)], i, seed, slots) for i in range(n)])
        scored = await self.scorer.judge_all(marked)
        if not scored.verdicts and marked:
            first = scored.episodes[0]
            cause = f"{first.failure.stage} failed: {first.failure.detail}" if first.failure else first.ending
            is_model = first.failure is not None and first.failure.stage == "act"
            culprit = "the model's end" if is_model else "the environment"
            raise WorldBrokenError(
                f"{self.setting.env_id}: all {n} episodes failed (first: {cause}); mend {culprit}."
            )
        if scored.episodes and not any(map(_has_policy_tokens, scored.episodes)):
            most = scored.episodes[0].limits.max_tokens
            raise ConfigError(
                f"{self.setting.env_id}: no prompt leaves room for a single token of the model in an "
                f"episode of {most} tokens; raise rollout_max_context_len."
            )
        seconds = time.perf_counter() - started
        report = summarize(scored.episodes, scored.verdicts, self.setting, seconds=seconds)
        return Evaluation(self.setting.breakdown, report, scored.episodes, scored.verdicts)

    async def _play(self, task: Task, index: int, seed: int, slots: asyncio.Semaphore) -> Marked:
        async with slots:
            env, sampling_seed = self.make_env(), zlib.crc32(f"sample/{seed}/{index}".encode())
            episode = await self.play_episode(
                env,
                agents_of(env, task, self.make_agent, self.opponents, seed=sampling_seed),
                task,
                seed=zlib.crc32(f"world/{seed}/{index}".encode()),
                episode_id=f"e{index}",
                sampling_seed=sampling_seed,
            )
            marked = await self.scorer.mark(episode)
        self.progress(1)
        return marked


def _has_policy_tokens(episode: Episode) -> bool:
    """Whether the agent sampled any token, or plays without tokens."""
    tokens = [turn.tokens for turn in episode.turns]
    return any(turn is None or len(turn.completion.token_ids) for turn in tokens) or not tokens
