"""From the configuration to the parts of a rollout: filters, the episode's player, the producer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from agentrl.algorithms.distillation import PrivilegedContext
from agentrl.algorithms.filters import BufferFilter, GroupFilter
from agentrl.assembly import hooks
from agentrl.assembly.addresses import Addresses
from agentrl.assembly.config import RunConfig
from agentrl.assembly.data import HeldOutSet
from agentrl.assembly.functions import Trying
from agentrl.assembly.rewards import build_scorer
from agentrl.data import Prompt
from agentrl.data.eval_sets import NO_SETTINGS, sets_of
from agentrl.envs import AnyEnv, PlayEpisode, Scorer, play
from agentrl.envs.config import GenerateChoice, RewardChoice
from agentrl.envs.contract import check_generate, check_sample_hook
from agentrl.envs.generate import by_task, generating
from agentrl.envs.sample_hook import hooked
from agentrl.rollout.batch_functions import BatchFunctions
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.over_sampling import OverSampling, OverSamplingProducer
from agentrl.rollout.own_rollout import FunctionProducer, RolloutFunction
from agentrl.rollout.player import Player
from agentrl.rollout.producer import EarlyEnd, Producer, ProducerSettings
from agentrl.rollout.staleness import GroupPlaces, ReadyFirst, StalenessPolicy, Window
from agentrl.types import Task


class Filters(NamedTuple):
    """The functions that decide what a run plays and trains on, where it has any.

    drops: dynamic sampling. choose: of an over-sampled batch. privileged: what a teacher reads besides the
    prompts. reused: of the data buffer. batch: those of a whole batch. play: plays one.
    """

    drops: GroupFilter | None = None
    choose: BufferFilter | None = None
    privileged: PrivilegedContext | None = None
    reused: BufferFilter | None = None
    batch: BatchFunctions | None = None
    play: RolloutFunction | None = None


def build_filters(config: RolloutConfig) -> Filters:
    """The filters that the configuration names; each has been checked.

    Raises:
        ConfigError: one cannot be imported, or violates its contract.
    """
    of_batch = BatchFunctions(
        hooks.ROLLOUT_SAMPLE_FILTER_PATH.maybe(config.rollout_sample_filter_path),
        hooks.CUSTOM_CONVERT_SAMPLES_TO_TRAIN_DATA_PATH.maybe(
            config.custom_convert_samples_to_train_data_path
        ),
        hooks.CUSTOM_REWARD_POST_PROCESS_PATH.maybe(config.custom_reward_post_process_path),
        hooks.CUSTOM_ROLLOUT_LOG_FUNCTION_PATH.maybe(config.custom_rollout_log_function_path),
        hooks.CUSTOM_UPDATE_WEIGHT_POST_WRITE_PATH.maybe(config.custom_update_weight_post_write_path),
    )
    return Filters(
        hooks.DYNAMIC_SAMPLING_FILTER_PATH.maybe(config.dynamic_sampling_filter_path),
        hooks.BUFFER_FILTER_PATH.maybe(config.buffer_filter_path),
        hooks.PRIVILEGED_CONTEXT_PATH.maybe(config.privileged_context_path),
        hooks.DATA_BUFFER_FILTER_PATH.maybe(config.data_buffer_filter_path),
        None if of_batch == BatchFunctions() else of_batch,
        hooks.ROLLOUT_FUNCTION_PATH.maybe(config.rollout_function_path),
    )


async def build_play(
    choice: GenerateChoice, make_env: Callable[[], AnyEnv], task: Task | None
) -> PlayEpisode:
    """The function that plays an episode: `agentrl.play`, or one that plays by functions by path.

    task: they are tried out on it; None = there is no task.

    Raises:
        ConfigError: a function cannot be imported, or violates its contract.
        UserError: the environment has several agents, and there is a generate function.
    """
    generate, hook = choice.custom_generate_function_path, choice.rollout_sample_hook_path
    plays = play if generate is None else await _generating(generate, make_env, task)
    if choice.generate_function_paths:
        paths = choice.generate_function_paths
        plays = by_task(plays, {path: await _generating(path, make_env, task) for path in paths})
    if hook is None:
        return plays
    sees = hooks.ROLLOUT_SAMPLE_HOOK_PATH.at(hook)
    if task is not None:
        with Trying(hook):
            await check_sample_hook(sees, make_env, task)
    return hooked(plays, sees)


async def _generating(path: str, make_env: Callable[[], AnyEnv], task: Task | None) -> PlayEpisode:
    """What plays an episode by the generate function at a path."""
    function = hooks.CUSTOM_GENERATE_FUNCTION_PATH.at(path)
    if task is not None:
        with Trying(path):
            await check_generate(function, make_env, task)
    return generating(function)


class OwnPlay(NamedTuple):
    """How a set of held-out prompts is played that has a grader or a generate function of its own."""

    make_env: Callable[[], AnyEnv]
    scorer: Scorer
    play_episode: PlayEpisode


async def own_plays(
    rewards: RewardChoice,
    generate: GenerateChoice,
    factory: Callable[[RewardChoice], Callable[[], AnyEnv]],
    sets: Mapping[str, HeldOutSet],
    addresses: Addresses = MappingProxyType({}),
) -> dict[str, OwnPlay]:
    """How the sets are played that have a grader or a generate function of their own, by name.

    rewards, generate: of all sets. factory: makes environments that are graded by a choice. addresses: as for
    `reward_function`.

    Raises:
        UserError: a grader or a function cannot be made or imported, or fails; the environment takes none.
    """
    found = {}
    for name, held in sets.items():
        if held.own.grading or held.own.generating:
            graded, task = rewards.model_copy(update=held.own.grading), next(iter(held.tasks), None)
            make_env = factory(graded)
            scorer = await build_scorer(graded, make_env, task, addresses)
            played = await build_play(generate.model_copy(update=held.own.generating), make_env, task)
            found[name] = OwnPlay(make_env, scorer, played)
    return found


def build_producer(
    config: RolloutConfig,
    next_prompt: Callable[[], Prompt],
    player: Player,
    filters: Filters,
    *,
    num_batches: int,
) -> Producer:
    """The producer of a run's batches. num_batches: until the run ends (count)."""
    settings = producer_settings(config, num_batches=num_batches)
    size, choose = config.over_sampling_batch_size, filters.choose
    if filters.play is not None:
        early, step = EarlyEnd(player.cancelled), config.num_rollout - num_batches
        return FunctionProducer(next_prompt, player.play, settings, filters.play, early, step)
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
    sets = [NO_SETTINGS] if evals.eval_prompt_data is None else [*sets_of(evals.eval_prompt_data).values()]
    if config.env.has_generate or rollout.rollout_function_path or any(own.generating for own in sets):
        return slots
    groups = staleness_policy(rollout).capacity + (rollout.over_sampling_batch_size or 0)
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
