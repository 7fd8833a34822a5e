"""What an evaluation plays: an environment, its prompts, its scoring and the episode loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.assembly.addresses import Addresses
from agentrl.assembly.data import HeldOutSet, eval_sets
from agentrl.assembly.env import EnvFactory, env_factory
from agentrl.assembly.rewards import build_scorer
from agentrl.assembly.rollout import OwnPlay, build_play, own_plays
from agentrl.envs import AnyEnv, tasks_of
from agentrl.envs.config import RewardChoice
from agentrl.envs.opponents import AgentsOf
from agentrl.errors import ConfigError
from agentrl.evaluation.broken_tools import BrokenTool
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
        world = cls(env, sets, OwnPlay(make_env, scorer, play_episode), own)
        return world.with_broken([*map(BrokenTool.read, section.break_tool)])

    @property
    def again(self) -> Mapping[str, str]:
        """Of the sets that are played once more in another way, the names of those as they are."""
        return {name: held.again for name, held in self.sets.items() if held.again is not None}

    def with_broken(self, tools: Sequence[BrokenTool]) -> EvalWorld:
        """Every set also with each of these tools broken, under the name TOOL=HOW, or SET,TOOL=HOW.

        Raises:
            ConfigError: the environment has no such tool.
        """
        sets, own = {**self.sets}, {**self.own}
        for tool in tools:
            for name, held in self.sets.items():
                played = self.own.get(name, self.common)
                broken = broken_name(name, tool.name)
                sets[broken] = held._replace(again=name)
                own[broken] = played._replace(make_env=tool.breaking(played.make_env))
        return replace(self, sets=sets, own=own)

    def with_breakable(self, tools: Sequence[BrokenTool]) -> tuple[EvalWorld, Mapping[str, str]]:
        """As `with_broken`, with the tools that the environment has; why there is no other, by its name."""
        refused = {}
        for tool in tools:
            try:
                self.with_broken([tool])
            except ConfigError as error:
                refused[tool.name] = str(error)
        return self.with_broken([tool for tool in tools if tool.name not in refused]), refused

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


def broken_name(prompts: str, tool: str) -> str:
    """The name of a set of prompts, "" for a single one, that is played once more with a tool broken."""
    return f"{prompts},{tool}" if prompts else tool


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
