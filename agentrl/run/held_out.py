"""The serving policy on held-out tasks, sampled and greedily."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.assembly.config import RunConfig
from agentrl.assembly.data import RunData, num_prompts
from agentrl.assembly.policy import agent_factory
from agentrl.envs import AnyEnv
from agentrl.envs.opponents import policy_agents
from agentrl.evaluation.episodes import Evaluation, Evaluator
from agentrl.evaluation.report import EvalSetting, summarize
from agentrl.records import read_journal
from agentrl.rollout.agent import SamplingSettings
from agentrl.run.parts import World, sampling_of
from agentrl.types import Task
from agentrl.types.seams import Engine, Policy

GREEDY, SAMPLED = "greedy", "sampled"
MODES = (f"/{SAMPLED}", f"/{GREEDY}")
"""The ends of the metrics that are the mean score of an evaluation."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The evaluation of a policy: each set of prompts in two modes, sampled and greedily (temperature 0).

    sets: tasks by the name of their set, "" for a single one. An evaluation is named by its mode, in a named
    set by NAME/MODE. sampling: of the sampled half. samples: its episodes of each prompt (count).
    """

    world: World
    policy: Policy
    sets: Mapping[str, Sequence[Task]]
    split: str
    sampling: SamplingSettings
    samples: int
    seed: int

    @classmethod
    def of(cls, data: RunData, config: RunConfig, world: World, engine: Engine | None) -> HeldOut | None:
        """The evaluations of a run; None = nothing is held out, or no engine plays."""
        if data.held_out is None or engine is None:
            return None
        section = config.eval
        sampling = sampling_of(config.rollout, section.eval_temperature)
        sampling = replace(
            sampling,
            top_p=sampling.top_p if section.eval_top_p is None else section.eval_top_p,
            max_response_len=section.eval_max_response_len or sampling.max_response_len,
        )
        samples = section.n_samples_per_eval_prompt
        return cls(world, engine, data.held_out, section.eval_split, sampling, samples, config.run.seed)

    def num_episodes(self, number: int) -> int:
        """Episodes of one evaluation over `number` prompts (count)."""
        prompts = sum(num_prompts(name, tasks, number) for name, tasks in self.sets.items())
        return prompts * (self.samples + 1)

    async def evaluations(self, number: int) -> dict[str, Evaluation]:
        """Play `number` prompts of each set in each mode."""
        greedy = replace(self.sampling, temperature=0.0)
        evaluations: dict[str, Evaluation] = {}
        for name in self.sets:
            evaluations[_named(name, SAMPLED)] = await self._evaluation(
                name, self.sampling, number, self.samples
            )
            evaluations[_named(name, GREEDY)] = await self._evaluation(name, greedy, number, 1)
        return evaluations

    def restored(self, journal: Mapping[str, Path], seconds: Mapping[str, float]) -> dict[str, Evaluation]:
        """The evaluations that stand in the journal, by name.

        Raises:
            OSError, ValueError: a file is not there, or holds something else.
        """
        evaluations: dict[str, Evaluation] = {}
        for key, path in journal.items():
            name, _, mode = key.rpartition("/")
            temperature = self.sampling.temperature if mode == SAMPLED else 0.0
            setting = self._setting(self.world.make_env(), name, temperature)
            entries = list(read_journal(path))
            episodes = tuple(entry.episode for entry in entries)
            verdicts = tuple(verdict for entry in entries for verdict in entry.verdicts)
            report = summarize(episodes, verdicts, setting, seconds=seconds[key])
            evaluations[key] = Evaluation(setting.breakdown, report, episodes, verdicts)
        return evaluations

    def _setting(self, env: AnyEnv, name: str, temperature: float) -> EvalSetting:
        return EvalSetting(env.id, name or self.split, temperature, env.breakdown)

    async def _evaluation(
        self, name: str, sampling: SamplingSettings, number: int, samples: int
    ) -> Evaluation:
        env, world, tasks = self.world.make_env(), self.world, self.sets[name]
        make_agent = agent_factory(self.policy, world.renderer, sampling)
        evaluator = Evaluator(
            make_env=world.make_env,
            agents_of=policy_agents(make_agent, world.opponents),
            scorer=world.scorer,
            setting=self._setting(env, name, sampling.temperature),
            play_episode=world.play_episode,
        )
        n = num_prompts(name, tasks, number)
        return await evaluator.run(tasks, n, seed=self.seed, samples=samples, prompts=name)


def _named(name: str, mode: str) -> str:
    return f"{name}/{mode}" if name else mode


def by_set(evaluations: Mapping[str, Evaluation]) -> dict[str, dict[str, Evaluation]]:
    """The evaluations of each set by mode; "" is a single set without a name."""
    sets: dict[str, dict[str, Evaluation]] = {}
    for key, evaluation in evaluations.items():
        name, _, mode = key.rpartition("/")
        sets.setdefault(name, {})[mode] = evaluation
    return sets


def eval_metrics(evaluations: Mapping[str, Evaluation]) -> dict[str, float]:
    """Means of the verdicts by mode, by part, and by kind of task; pass@k; failed episodes (count).

    eval/MODE and what is below it; of a named set eval/NAME/MODE.
    """
    metrics: dict[str, float] = {}
    for key, evaluation in evaluations.items():
        report = evaluation.report
        metrics[f"eval/{key}"] = report.mean
        metrics[f"eval/{key}/failures"] = float(sum(report.failures.values()))
        metrics |= {f"eval/{key}/pass@{k}": value for k, value in report.pass_at.items()}
        metrics |= {f"eval/{key}/{part}": mean for part, mean in report.by.items()}
        metrics |= {f"eval/{key}/reward/{name}": mean for name, mean in report.parts.items()}
    return metrics


def version_metrics(evaluations: Mapping[str, Evaluation]) -> dict[str, float]:
    """The oldest and the newest version of the weights that an evaluation's tokens have, and their shares.

    eval/MODE/version_share/K is the share of the tokens that are K versions newer than the oldest.
    """
    metrics: dict[str, float] = {}
    for key, evaluation in evaluations.items():
        shares = {int(version): share for version, share in evaluation.report.versions.items()}
        if not shares:
            continue
        oldest, newest = min(shares), max(shares)
        metrics |= {f"eval/{key}/version_min": float(oldest), f"eval/{key}/version_max": float(newest)}
        metrics |= {
            f"eval/{key}/version_share/{version - oldest}": share for version, share in shares.items()
        }
    return metrics
