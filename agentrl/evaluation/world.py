"""What an evaluation plays: an environment, its prompts, its scoring and the episode loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from agentrl.assembly.addresses import Addresses
from agentrl.assembly.data import HeldOutSet, eval_sets
from agentrl.assembly.env import EnvFactory, env_factory
from agentrl.assembly.rewards import build_scorer
from agentrl.assembly.rollout import OwnPlay, build_play, own_plays
from agentrl.envs import AnyEnv, tasks_of
from agentrl.envs.config import RewardChoice
from agentrl.envs.opponents import AgentsOf
from agentrl.evaluation.config import EvalConfig
from agentrl.evaluation.episodes import Evaluator
from agentrl.evaluation.report import EvalSetting


@dataclass(frozen=True, slots=True)
class EvalWorld:
    """An environment as an eval-only run plays it.

    env: an instance that is read, never played. sets: by name, "" for a single one. own: of the sets that
    are graded or played in their own way.
    """

    env: AnyEnv
    sets: Mapping[str, HeldOutSet]
    common: OwnPlay
    own: Mapping[str, OwnPlay]

    @classmethod
    async def build(
        cls, env_id: str, config: EvalConfig, addresses: Addresses, *, counts_tokens: bool
    ) -> EvalWorld:
        """Build all parts. addresses: of models that are served next to the policy.

        counts_tokens: whether the environment's own limit of tokens applies: a chat endpoint counts in other
            tokens.

        Raises:
            UserError: the environment, its arguments, its prompts or a function by path are wrong.
        """
        section = config.eval

        def factory(reward: RewardChoice) -> EnvFactory:
            make_env = env_factory(
                env_id,
                section.env_kwargs,
                limits=section.chosen(
                    max_turns=section.max_turns, max_tokens=section.rollout_max_context_len
                ),
                tools=section,
                addresses=addresses,
                reward=reward,
            )
            if counts_tokens:
                return make_env
            return with_limits(make_env, max_tokens=section.rollout_max_context_len)

        make_env = factory(section)
        env = make_env()
        sets = _sets(config, env)
        first = next((held.tasks[0] for held in sets.values() if held.tasks), None)
        scorer = await build_scorer(section, make_env, first, addresses)
        play_episode = await build_play(section, make_env, first)
        own = await own_plays(section, section, factory, sets, addresses)
        return cls(env, sets, OwnPlay(make_env, scorer, play_episode), own)

    def evaluator(
        self,
        agents_of: AgentsOf,
        config: EvalConfig,
        *,
        prompts: str,
        concurrency: int,
        progress: Callable[[int], None] = lambda _: None,
    ) -> Evaluator:
        """Plays the set `prompts` with these agents, at most `concurrency` episodes at once.

        config: as that set is played, see `EvalConfig.of_set`.
        """
        name = prompts or config.eval.split
        played = self.own.get(prompts, self.common)
        return Evaluator(
            make_env=played.make_env,
            agents_of=agents_of,
            scorer=played.scorer,
            setting=EvalSetting(self.env.id, name, config.eval.temperature, self.env.breakdown),
            concurrency=concurrency,
            progress=progress,
            play_episode=played.play_episode,
        )


def _sets(config: EvalConfig, env: AnyEnv) -> Mapping[str, HeldOutSet]:
    """The first prompts of the data; without data, the environment's split."""
    section, paths = config.eval, config.data.prompt_data
    if paths is None:
        return {"": HeldOutSet(tasks_of(env, section.split))}
    return eval_sets(paths, config.data, split=section.split, n=section.n)


def with_limits(make_env: EnvFactory, *, max_tokens: int | None) -> EnvFactory:
    """The same environments with this limit of tokens; None = no limit."""

    def make() -> AnyEnv:
        env = make_env()
        env.limits = replace(env.limits, max_tokens=max_tokens)
        return env

    return make
