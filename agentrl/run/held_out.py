"""The serving policy on held-out tasks, sampled and greedily."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from agentrl.assembly.addresses import Addresses
from agentrl.assembly.config import RunConfig
from agentrl.assembly.data import HeldOutSet, RunData
from agentrl.assembly.env import EnvFactory, run_env_factory
from agentrl.assembly.policy import agent_factory
from agentrl.assembly.rewards import graded_as
from agentrl.envs import AnyEnv, Scorer
from agentrl.envs.config import RewardChoice
from agentrl.envs.opponents import policy_agents
from agentrl.evaluation.episodes import Evaluation, Evaluator
from agentrl.evaluation.report import EvalSetting, summarize
from agentrl.records import read_journal
from agentrl.rollout.agent import SamplingSettings
from agentrl.run.parts import World, sampling_of
from agentrl.types.seams import Engine, Policy

GREEDY, SAMPLED = "greedy", "sampled"


Graded: TypeAlias = Mapping[str, tuple[EnvFactory, Scorer]]
"""Of each set that has a grader of its own, what makes its environments, and its scorer."""


class PlayedSet(NamedTuple):
    """A set of held-out prompts, and how it is played.

    number: prompts (count). sampling: of the sampled half. samples: its episodes of each prompt (count).
    interval: iterations between two of its evaluations (count).
    graded: what makes its environments, and its scorer, where it has a grader of its own.
    """

    held: HeldOutSet
    number: int
    sampling: SamplingSettings
    samples: int
    interval: int
    graded: tuple[EnvFactory, Scorer] | None = None

    @classmethod
    def of(
        cls, config: RunConfig, held: HeldOutSet, graded: tuple[EnvFactory, Scorer] | None = None
    ) -> PlayedSet:
        """The set as a run plays it."""
        section = config.eval.of_set(held.own)
        sampling = sampling_of(config.rollout, section.eval_temperature)
        sampling = replace(
            sampling,
            top_p=sampling.top_p if section.eval_top_p is None else section.eval_top_p,
            top_k=sampling.top_k if section.eval_top_k is None else section.eval_top_k,
            max_response_len=section.eval_max_response_len or sampling.max_response_len,
        )
        interval = held.own.interval or section.eval_interval
        return cls(held, section.eval_episodes, sampling, section.n_samples_per_eval_prompt, interval, graded)

    def num_prompts(self, name: str, most: int | None) -> int:
        """How many prompts are played, at most `most`."""
        return self.held.num_prompts(name, self.number if most is None else min(self.number, most))


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The evaluation of a policy: each set of prompts in two modes, sampled and greedily (temperature 0).

    sets: by name, "" for a single one. An evaluation is named by its mode, in a named set by NAME/MODE.
    """

    world: World
    policy: Policy
    sets: Mapping[str, PlayedSet]
    split: str
    seed: int

    @classmethod
    def of(
        cls, data: RunData, config: RunConfig, world: World, engine: Engine | None, graded: Graded
    ) -> HeldOut | None:
        """The evaluations of a run; None = nothing is held out, or no engine plays.

        graded: see `graded_sets`.
        """
        if data.held_out is None or engine is None:
            return None

        sets = {name: PlayedSet.of(config, held, graded.get(name)) for name, held in data.held_out.items()}
        return cls(world, engine, sets, config.eval.eval_split, config.run.seed)

    def due_after(self, *steps: int) -> HeldOut:
        """The sets that are evaluated after some of these iterations; all of them where none is."""
        due = {
            name: played
            for name, played in self.sets.items()
            if any(step % played.interval == 0 for step in steps)
        }
        return replace(self, sets=due or self.sets)

    def is_due(self, step: int) -> bool:
        """Whether any set is evaluated after an iteration."""
        return any(step % played.interval == 0 for played in self.sets.values())

    def num_episodes(self, most: int | None = None) -> int:
        """Episodes of one evaluation (count). most: prompts of each set."""
        return sum(
            played.num_prompts(name, most) * (played.samples + 1) for name, played in self.sets.items()
        )

    async def evaluations(self, most: int | None = None) -> dict[str, Evaluation]:
        """Play the prompts of each set, at most `most` of them, in each mode."""
        evaluations: dict[str, Evaluation] = {}
        for name, played in self.sets.items():
            number, sampling = played.num_prompts(name, most), played.sampling
            evaluations[_named(name, SAMPLED)] = await self._evaluation(
                name, sampling, number, played.samples
            )
            greedy = replace(sampling, temperature=0.0)
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
            temperature = self.sets[name].sampling.temperature if mode == SAMPLED else 0.0
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
        world, played = self.world, self.sets[name]
        make_env, scorer = played.graded or (world.make_env, world.scorer)
        make_agent = agent_factory(self.policy, world.renderer, sampling)
        evaluator = Evaluator(
            make_env=make_env,
            agents_of=policy_agents(make_agent, world.opponents),
            scorer=scorer,
            setting=self._setting(make_env(), name, sampling.temperature),
            play_episode=world.play_episode,
        )
        return await evaluator.run(played.held.tasks, number, seed=self.seed, samples=samples, prompts=name)


async def graded_sets(
    config: RunConfig, sets: Mapping[str, HeldOutSet] | None, addresses: Addresses
) -> Graded:
    """The graders of single sets. addresses: of models that are served.

    Raises:
        UserError: the grader of a set cannot be made, or fails.
    """

    def factory(reward: RewardChoice) -> EnvFactory:
        return run_env_factory(config.model_copy(update={"env": reward}), addresses)

    return await graded_as(config.env, factory, sets or {}, addresses)


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
