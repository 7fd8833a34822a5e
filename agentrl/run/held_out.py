"""The serving policy on held-out tasks, sampled and greedily."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from agentrl.assembly.addresses import Addresses
from agentrl.assembly.config import RunConfig
from agentrl.assembly.data import HeldOutSet, RunData
from agentrl.assembly.env import EnvFactory, run_env_factory
from agentrl.assembly.hooks import EVAL_FUNCTION_PATH
from agentrl.assembly.policy import agent_factory
from agentrl.assembly.rollout import OwnPlay, own_plays
from agentrl.envs import AnyEnv
from agentrl.envs.config import RewardChoice
from agentrl.envs.opponents import policy_agents
from agentrl.errors import UserError
from agentrl.evaluation.episodes import Evaluation, Evaluator
from agentrl.evaluation.report import EvalSetting, summarize
from agentrl.records import read_journal
from agentrl.rollout.agent import SamplingSettings
from agentrl.rollout.own_evaluation import EvalFunction, EvaluationInPlay, PlayedPrompts, evaluated
from agentrl.run.parts import World, sampling_of
from agentrl.types.seams import Engine, Policy

GREEDY, SAMPLED = "greedy", "sampled"


class PlayedSet(NamedTuple):
    """A set of held-out prompts, and how it is played.

    number: prompts (count). sampling: of the sampled half. samples: its episodes of each prompt (count).
    interval: iterations between two of its evaluations (count).
    own: how it is graded and played, where that is its own way.
    """

    held: HeldOutSet
    number: int
    sampling: SamplingSettings
    samples: int
    interval: int
    own: OwnPlay | None = None

    @classmethod
    def of(cls, config: RunConfig, held: HeldOutSet, own: OwnPlay | None = None) -> PlayedSet:
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
        return cls(held, section.eval_episodes, sampling, section.n_samples_per_eval_prompt, interval, own)

    def num_prompts(self, name: str, most: int | None) -> int:
        """How many prompts are played, at most `most`."""
        return self.held.num_prompts(name, self.number if most is None else min(self.number, most))


class Evaluated(NamedTuple):
    """What an evaluation has played, by the name of each part; and metrics of a function of the user."""

    parts: Mapping[str, Evaluation]
    own: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The evaluation of a policy: each set of prompts in two modes, sampled and greedily (temperature 0).

    sets: by name, "" for a single one. An evaluation is named by its mode, in a named set by NAME/MODE.
    function: plays an evaluation in its own way; None = each set in each mode.
    """

    world: World
    policy: Policy
    sets: Mapping[str, PlayedSet]
    split: str
    seed: int
    function: EvalFunction | None = None

    @classmethod
    def of(
        cls,
        data: RunData,
        config: RunConfig,
        world: World,
        engine: Engine | None,
        own: Mapping[str, OwnPlay],
    ) -> HeldOut | None:
        """The evaluations of a run; None = nothing is held out, or no engine plays.

        own: see `own_sets`.
        """
        if data.held_out is None or engine is None:
            return None

        sets = {name: PlayedSet.of(config, held, own.get(name)) for name, held in data.held_out.items()}
        section, function = config.eval, EVAL_FUNCTION_PATH.maybe(config.eval.eval_function_path)
        return cls(world, engine, sets, section.eval_split, config.run.seed, function)

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

    async def evaluations(self, step: int, most: int | None = None) -> Evaluated:
        """Play the prompts of each set, at most `most` of them, in each mode; or what a function plays.

        step: the iteration after which it is.
        """
        evaluations: dict[str, Evaluation] = {}

        async def play(name: str, greedy: bool, number: int | None) -> PlayedPrompts:
            key = _named(name, GREEDY if greedy else SAMPLED)
            if key in evaluations:
                raise UserError(f"{key} has been played in this evaluation; play it once.")
            fewest = min((n for n in (number, most) if n is not None), default=None)
            played = evaluations[key] = await self._evaluation(name, fewest, greedy=greedy)
            return PlayedPrompts(played.report.mean, played.episodes, played.verdicts)

        in_play = EvaluationInPlay(step, tuple(self.sets), play)
        if self.function is None:
            await in_play.play_all()
            return Evaluated(evaluations, {})
        own = await evaluated(self.function, in_play, lambda: eval_metrics(evaluations))
        return Evaluated(evaluations, own)

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

    async def _evaluation(self, name: str, most: int | None, *, greedy: bool) -> Evaluation:
        world, played = self.world, self.sets[name]
        sampling = replace(played.sampling, temperature=0.0) if greedy else played.sampling
        number, samples = played.num_prompts(name, most), 1 if greedy else played.samples
        own = played.own or OwnPlay(world.make_env, world.scorer, world.play_episode)
        make_agent = agent_factory(self.policy, world.renderer, sampling)
        evaluator = Evaluator(
            make_env=own.make_env,
            agents_of=policy_agents(make_agent, world.opponents),
            scorer=own.scorer,
            setting=self._setting(own.make_env(), name, sampling.temperature),
            play_episode=own.play_episode,
        )
        return await evaluator.run(played.held.tasks, number, seed=self.seed, samples=samples, prompts=name)


async def own_sets(
    config: RunConfig, sets: Mapping[str, HeldOutSet] | None, addresses: Addresses
) -> Mapping[str, OwnPlay]:
    """How single sets are graded and played in their own way. addresses: of models that are served.

    Raises:
        UserError: the grader or the function of a set cannot be made or imported, or fails.
    """

    def factory(reward: RewardChoice) -> EnvFactory:
        return run_env_factory(config.model_copy(update={"env": reward}), addresses)

    return await own_plays(config.env, config.env, factory, sets or {}, addresses)


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
