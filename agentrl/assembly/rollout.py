"""From the configuration to the parts of a rollout: filters, the episode's player, the producer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

from agentrl.algorithms.contract import (
    check_buffer_filter,
    check_group_filter,
    check_post_process,
    check_rollout_filter,
)
from agentrl.algorithms.distillation import PrivilegedContext, check_privileged_context
from agentrl.algorithms.filters import BufferFilter, GroupFilter, RolloutFilter
from agentrl.algorithms.post_process import RewardPostProcess
from agentrl.assembly.config import RunConfig
from agentrl.assembly.functions import Trying, checked, function_at
from agentrl.data import Prompt
from agentrl.data.eval_sets import NO_SETTINGS, sets_of
from agentrl.envs import AnyEnv, PlayEpisode, play
from agentrl.envs.contract import check_generate
from agentrl.envs.generate import Generate, generating
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.over_sampling import OverSampling, OverSamplingProducer
from agentrl.rollout.player import Player
from agentrl.rollout.producer import EarlyEnd, Producer, ProducerSettings
from agentrl.rollout.staleness import GroupPlaces, ReadyFirst, StalenessPolicy, Window
from agentrl.types import Task

F = TypeVar("F")


class Filters(NamedTuple):
    """The filters of a run, where it has any: dynamic sampling, of the buffer, of rollouts.

    privileged: what a teacher reads besides the prompts. post_process: changes the scores of a batch. reused:
    of the data buffer.
    """

    drops: GroupFilter | None = None
    choose: BufferFilter | None = None
    removed: RolloutFilter | None = None
    privileged: PrivilegedContext | None = None
    post_process: RewardPostProcess | None = None
    reused: BufferFilter | None = None


def build_filters(config: RolloutConfig) -> Filters:
    """The filters that the configuration names; each has been checked.

    Raises:
        ConfigError: one cannot be imported, or violates its contract.
    """
    return Filters(
        _filter_at(config.dynamic_sampling_filter_path, check_group_filter),
        _filter_at(config.buffer_filter_path, check_buffer_filter),
        _filter_at(config.rollout_sample_filter_path, check_rollout_filter),
        _filter_at(config.privileged_context_path, check_privileged_context, "privileged context"),
        _filter_at(config.custom_reward_post_process_path, check_post_process, "reward post-processing"),
        _filter_at(config.data_buffer_filter_path, check_buffer_filter),
    )


async def build_play(path: str | None, make_env: Callable[[], AnyEnv], task: Task | None) -> PlayEpisode:
    """The function that plays an episode: `agentrl.play`, or one that plays by the generate function at a
    path.

    task: the generate function is tried out on it; None = there is no task.

    Raises:
        ConfigError: the generate function cannot be imported, or violates its contract.
        UserError: the environment has several agents.
    """
    if path is None:
        return play
    generate = cast(Generate, function_at("generate function", path))
    if task is not None:
        with Trying(path):
            await check_generate(generate, make_env, task)
    return generating(generate)


def build_producer(
    config: RolloutConfig,
    next_prompt: Callable[[], Prompt],
    player: Player,
    choose: BufferFilter | None,
    *,
    num_batches: int,
) -> Producer:
    """The producer of a run's batches.

    choose: the buffer filter of an over-sampled batch. num_batches: until the run ends (count).
    """
    settings = producer_settings(config, num_batches=num_batches)
    size = config.over_sampling_batch_size
    if size is not None and not config.is_async:
        over_sampling = OverSampling(size, player.cancelled, choose)
        return OverSamplingProducer(next_prompt, player.play, settings, over_sampling)
    policy = staleness_policy(config)
    early = EarlyEnd(player.cancelled, stop=player.stop)
    return Producer(next_prompt, player.play, settings, policy, early)


def producer_settings(config: RolloutConfig, *, num_batches: int) -> ProducerSettings:
    """How many groups are played. num_batches: until the run ends (count)."""
    return ProducerSettings(
        config.prompts,
        num_batches,
        config.async_buffer_size,
        max_num_gen_batches=config.max_num_gen_batches,
    )


def most_in_flight(config: RunConfig, *, num_agents: int) -> int:
    """The most requests that a run sends to the policy's servers at once: any of them may get all (count).

    num_agents: of an episode, which may act at the same time.
    """
    rollout, evals, players = config.rollout, config.eval, max(config.num_players, 1)
    # Each player has its share of the slots, rounded up.
    slots = -(-config.engine.max_slots // players) * players
    if config.env.custom_generate_function_path is not None:
        return slots
    groups = staleness_policy(rollout).capacity + (rollout.over_sampling_batch_size or 0)
    sets = [NO_SETTINGS] if evals.eval_prompt_data is None else sets_of(evals.eval_prompt_data).values()
    # One more of each is greedy: of a group where the estimator compares with it, of an evaluation always.
    played = groups * (rollout.n_samples_per_prompt + 1)
    own = map(evals.of_set, sets)
    evaluated = sum(e.eval_episodes * (e.n_samples_per_eval_prompt + 1) for e in own) * config.evaluates
    return min(slots, (played + evaluated) * num_agents)


def staleness_policy(config: RolloutConfig) -> StalenessPolicy:
    """The policy of the configuration; at max_staleness 0 the synchronous one."""
    size = config.over_sampling_batch_size or config.prompts
    surplus = size - config.prompts if config.is_async else 0
    places = GroupPlaces(config.max_staleness, config.prompts, config.update_weights_interval, surplus)
    if not config.is_async or config.staleness_policy == "strict":
        return Window(places)
    if config.staleness_policy == "ready_first":
        return ReadyFirst(places)
    return Window(places, config.staleness_window or size)


def _filter_at(path: str | None, check: Callable[[F], None], noun: str = "filter") -> F | None:
    return None if path is None else checked(noun, path, check)
