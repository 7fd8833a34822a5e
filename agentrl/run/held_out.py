"""The serving policy on held-out tasks, sampled and greedily."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.assembly.policy import agent_factory
from agentrl.envs import AnyEnv
from agentrl.evaluation.episodes import Evaluation, Evaluator
from agentrl.evaluation.report import EvalSetting, summarize
from agentrl.observe import read_journal
from agentrl.protocols import Policy
from agentrl.rollout.agent import SamplingSettings
from agentrl.run.parts import World
from agentrl.types import Task

GREEDY, SAMPLED = "greedy", "sampled"


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The evaluation of a policy. sampling: of the sampled half; the greedy half has temperature 0."""

    world: World
    policy: Policy
    tasks: Sequence[Task]
    split: str
    sampling: SamplingSettings
    seed: int

    async def evaluations(self, number: int) -> dict[str, Evaluation]:
        """Play `number` episodes in each mode."""
        return {
            SAMPLED: await self._evaluation(self.sampling, number),
            GREEDY: await self._evaluation(replace(self.sampling, temperature=0.0), number),
        }

    def restored(self, journal: Mapping[str, Path], seconds: Mapping[str, float]) -> dict[str, Evaluation]:
        """The evaluations that stand in the journal, by mode.

        Raises:
            OSError, ValueError: a file is not there, or holds something else.
        """
        found: dict[str, Evaluation] = {}
        for mode, path in journal.items():
            setting = self._setting(
                self.world.make_env(), self.sampling.temperature if mode == SAMPLED else 0.0
            )
            entries = list(read_journal(path))
            episodes = tuple(entry.episode for entry in entries)
            verdicts = tuple(verdict for entry in entries for verdict in entry.verdicts)
            report = summarize(episodes, verdicts, setting, seconds=seconds[mode])
            found[mode] = Evaluation(setting.breakdown, report, episodes, verdicts)
        return found

    def _setting(self, env: AnyEnv, temperature: float) -> EvalSetting:
        return EvalSetting(env.id, self.split, temperature, env.breakdown)

    async def _evaluation(self, sampling: SamplingSettings, number: int) -> Evaluation:
        env = self.world.make_env()
        evaluator = Evaluator(
            make_env=self.world.make_env,
            make_agent=agent_factory(self.policy, self.world.renderer, sampling),
            scorer=self.world.scorer,
            setting=self._setting(env, sampling.temperature),
            opponents=self.world.opponents,
            play_episode=self.world.play_episode,
        )
        return await evaluator.run(self.tasks, number, seed=self.seed)


def eval_metrics(evaluations: Mapping[str, Evaluation]) -> dict[str, float]:
    """Means of the verdicts by mode, by part, and by kind of task; failed episodes (count)."""
    metrics: dict[str, float] = {}
    for mode, evaluation in evaluations.items():
        report = evaluation.report
        metrics[f"eval/{mode}"] = report.mean
        metrics[f"eval/{mode}/failures"] = float(sum(report.failures.values()))
        metrics |= {f"eval/{mode}/{part}": mean for part, mean in report.by.items()}
        metrics |= {f"eval/{mode}/reward/{name}": mean for name, mean in report.parts.items()}
    return metrics
