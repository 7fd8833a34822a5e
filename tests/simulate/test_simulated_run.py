"""Simulated runs: closed forms, determinism, the bound of staleness, and every group accounted for."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.assembly.rollout import staleness_policy
from agentrl.errors import ConfigError, UserError, WorldBrokenError
from agentrl.rollout.config import RolloutConfig
from agentrl.run.metrics import staleness_metrics
from agentrl_simulate.config import SimulateSection
from agentrl_simulate.player import SimulatedGroup
from agentrl_simulate.run import simulate, staleness_of
from agentrl_simulate.workload import EpisodePlan, GivenWorkload, GroupPlan, RecordedWorkload, TurnPlan
from tests.algorithms.episodes import group

NEVER = 1e15


def constant(**own):
    """Episodes of 2 turns of 10 tokens at 0.1 s each, and 1 s of the environment after each: 4 s."""
    fields = {
        **{"turns": 2, "turns_p95": 2, "turn_len": 10, "turn_len_p95": 10},
        **{"prompt_len": 20, "prompt_len_p95": 20, "reply_len": 5, "reply_len_p95": 5},
        **{"env_s": 1, "env_s_p95": 1, "decode_step_s": 0.1, "decode_request_s": 0, "request_s": 0},
        **{"prefill_tok_per_s": NEVER, "standstill_s": 0, "turn_cpu_s": 0, "train_tok_per_s": NEVER},
        **{"optimizer_step_s": 3, "publish_s": 1, "between_s": 0, "iterations": 24},
    }
    return SimulateSection(**{**fields, **own})


def run(section, **rollout):
    config = RolloutConfig(**{"rollout_batch_size": 4, "n_samples_per_prompt": 2, **rollout})
    return simulate(config, section, GivenWorkload(section, config.n_samples_per_prompt, 0))


def test_a_synchronous_step_takes_as_long_as_playing_and_training_and_publishing():
    assert run(constant()).steps_per_s == pytest.approx(1 / (4 + 3 + 1), rel=1e-6)
    assert run(constant(between_s=0.5)).steps_per_s == pytest.approx(1 / 8.5, rel=1e-6)
    assert run(constant(score_tok_per_s=360)).steps_per_s == pytest.approx(1 / 9, rel=1e-6)


@pytest.mark.parametrize(("train_s", "step_s"), [(1, 16), (15, 16), (19, 20)])
def test_with_one_version_of_staleness_the_longer_side_decides(train_s, step_s):
    """An engine with one place plays a batch in 16 s; training and publishing take train_s + 1."""
    result = run(constant(engine_slots=1, env_s=0, env_s_p95=0, optimizer_step_s=train_s), max_staleness=1)
    assert result.steps_per_s == pytest.approx(1 / step_s, rel=0.03)
    assert result.figures["trainer_busy"] == pytest.approx((train_s + 1) / step_s, rel=0.03)


@pytest.mark.parametrize(("train_s", "step_s"), [(1, 3), (3, 4), (9, 10)])
def test_an_engine_with_room_plays_two_batches_at_once(train_s, step_s):
    """Each of the two batches that have places takes 4 s to play, then train_s + 1."""
    result = run(constant(optimizer_step_s=train_s), max_staleness=1)
    assert result.steps_per_s == pytest.approx(1 / step_s, rel=0.03)


def test_an_engine_without_places_decodes_one_after_another():
    """8 episodes of 2 turns of 1 s each in one place, the environment beside it."""
    result = run(constant(engine_slots=1, env_s=0, env_s_p95=0))
    assert result.steps_per_s == pytest.approx(1 / (16 + 3 + 1), rel=1e-6)
    assert result.figures["engine_busy"] == pytest.approx(16 / 20, rel=1e-6)


def test_one_process_handles_one_turn_at_a_time_and_two_handle_two():
    seconds = {}
    for workers in (0, 2, 4):
        section = constant(turn_cpu_s=2, env_s=0, env_s_p95=0, decode_step_s=1e-6)
        seconds[workers] = 1 / run(section, num_rollout_workers=workers).steps_per_s - 4
    # 16 turns of 2 s; each worker has the groups of its own.
    assert seconds == {
        0: pytest.approx(32, rel=1e-3),
        2: pytest.approx(16, rel=1e-3),
        4: pytest.approx(8, rel=1e-3),
    }


def test_twice_the_trainers_are_faster_by_their_scaling():
    section = constant(train_tok_per_s=100, optimizer_step_s=0, train_gpus=4, trainer_scaling=0.9)
    tokens = 4 * 2 * (20 + 10 + 5 + 10)
    expected = 4 + tokens / 100 / (2 * 0.9) ** 2 + 1
    assert run(section).steps_per_s == pytest.approx(1 / expected, rel=1e-6)


def test_engine_and_trainer_on_the_same_gpus_take_turns():
    section = constant(colocate=True, offload_s=2)
    result = run(section)
    assert result.steps_per_s == pytest.approx(1 / (4 + 2 + 3 + 2 + 1), rel=1e-6)


def test_where_processors_are_shared_both_sides_are_slower():
    section = constant(env_s=0, env_s_p95=0, decode_step_s=0.2, play_slowdown=1.0, train_slowdown=0.5)
    synchronous = run(section)
    assert synchronous.steps_per_s == pytest.approx(1 / (4 + 3 + 1), rel=1e-6)
    # Alone, playing takes 4 s and training 4 s; beside the other, each takes longer.
    assert 1 / run(section, max_staleness=1).steps_per_s > 5


ROLLOUTS = st.fixed_dictionaries(
    {
        "rollout_batch_size": st.integers(1, 4),
        "n_samples_per_prompt": st.integers(1, 3),
        "max_staleness": st.integers(0, 3),
        "update_weights_interval": st.integers(1, 2),
        "surplus": st.integers(0, 3),
        "staleness_policy": st.sampled_from(["window", "strict", "ready_first"]),
        "drained": st.booleans(),
    }
)
SECTIONS = st.fixed_dictionaries(
    {
        "turns_p95": st.sampled_from([4.0, 40.0]),
        "failed_episodes_ratio": st.sampled_from([0.0, 0.2]),
        "filtered_ratio": st.sampled_from([0.0, 0.2]),
        "idle_ratio": st.sampled_from([0.0, 0.3]),
        "train_tok_per_s": st.sampled_from([300.0, 8000.0]),
        "engine_slots": st.sampled_from([2, 256]),
        "simulation_seed": st.integers(0, 99),
    }
)


def chosen(rollout):
    rollout = dict(rollout)
    surplus, drained = rollout.pop("surplus"), rollout.pop("drained")
    if surplus:
        rollout["over_sampling_batch_size"] = rollout["rollout_batch_size"] + surplus
    if not rollout["max_staleness"]:
        del rollout["staleness_policy"]
    elif drained:
        rollout["partial_rollout"] = False
    return RolloutConfig(**rollout, max_episode_retries=6)


@settings(max_examples=15, deadline=None)
@given(ROLLOUTS, SECTIONS)
def test_no_token_is_older_than_the_policy_proves_and_every_group_is_accounted_for(rollout, numbers):
    config, section = chosen(rollout), SimulateSection(iterations=18, **numbers)
    workload = GivenWorkload(section, config.n_samples_per_prompt, section.simulation_seed)
    result = simulate(config, section, workload)
    policy = staleness_policy(config)
    assert result.oldest <= policy.bound
    groups = dict(result.groups)
    assert groups.pop("trained") == 18 * config.prompts
    started, in_flight = groups.pop("started"), groups.pop("in_flight")
    assert started == 18 * config.prompts + in_flight + sum(groups.values())
    assert in_flight <= policy.capacity


@settings(max_examples=5, deadline=None)
@given(ROLLOUTS, SECTIONS)
def test_a_seed_gives_one_result(rollout, numbers):
    config, section = chosen(rollout), SimulateSection(iterations=18, **numbers)

    def result():
        workload = GivenWorkload(section, config.n_samples_per_prompt, section.simulation_seed)
        return simulate(config, section, workload)

    assert result() == result()


def test_another_seed_gives_another_result():
    section = SimulateSection()
    speeds = {
        simulate(RolloutConfig(rollout_batch_size=2), section, GivenWorkload(section, 2, seed)).steps_per_s
        for seed in range(3)
    }
    assert len(speeds) == 3


def test_over_sampling_drops_what_it_does_not_take():
    section = SimulateSection(turns_p95=40)
    result = run(section, rollout_batch_size=4, over_sampling_batch_size=6)
    assert result.groups["started"] == 30 * 6
    assert result.groups["trained"] == 30 * 4
    assert result.groups["dropped_over_sampled"] == 30 * 2
    assert result.steps_per_s > run(section, rollout_batch_size=4).steps_per_s
    chosen = run(
        section, over_sampling_batch_size=6, buffer_filter_path="agentrl.algorithms.filters:highest_std"
    )
    assert chosen.groups["dropped_not_chosen"] == 30 * 2
    assert chosen.steps_per_s < result.steps_per_s


def test_a_group_is_cut_after_its_time():
    """After 2.5 s each episode has a turn of 20 + 10 tokens; its second one has not ended."""
    result = run(constant(), group_timeout_s=2.5)
    assert result.steps_per_s == pytest.approx(1 / (2.5 + 3 + 1), rel=1e-6)
    assert result.events["cut_episodes"] == 24 * 8
    assert result.figures["trained_tok_per_s"] == pytest.approx(8 * 30 / 6.5)


def test_episodes_that_always_fail_end_the_run_as_in_a_real_one():
    with pytest.raises(WorldBrokenError, match="3 groups in a row"):
        run(constant(failed_episodes_ratio=0.999), max_episode_retries=0)


def test_a_filter_that_drops_nearly_all_ends_the_run_as_in_a_real_one():
    with pytest.raises(UserError, match="filter kept"):
        run(constant(filtered_ratio=0.999))


def test_too_few_iterations_are_refused():
    with pytest.raises(ConfigError, match=r"iterations \(5\) must be at least 9 here"):
        run(constant(iterations=5), max_staleness=2)


def test_staleness_is_that_of_the_metrics_of_a_run():
    real = [group("g0", [0.0, 1.0]), group("g1", [0.0, 1.0])]
    turns = [turn for each in real for episode in each.episodes for turn in episode.turns]
    versions = Counter(version for turn in turns for version in turn.tokens.completion.versions.tolist())
    simulated = SimulatedGroup("g0", real[0].task, 0, (), (), sampled=versions)
    metrics = staleness_metrics(real, version=5)
    assert staleness_of([simulated], 5) == (
        pytest.approx(metrics["rollout/staleness/mean"]),
        metrics["rollout/staleness/max"],
    )


def test_recorded_groups_are_drawn_with_their_siblings():
    short, long = (EpisodePlan([TurnPlan(1, size, 0.0)]) for size in (1, 1000))
    workload = RecordedWorkload([GroupPlan([short] * 3), GroupPlan([long] * 3)], size=4, seed=1)
    groups = [workload.group(index) for index in range(40)]
    sizes = {tuple(episode.turns[0].sampled for episode in each.episodes) for each in groups}
    assert sizes == {(1,) * 4, (1000,) * 4}
    assert workload.group(7) == groups[7]
