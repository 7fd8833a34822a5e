"""What a batch looks like in numbers: failed episodes apart, rewards and tools by name."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from agentrl.rollout.group import GroupOutcome
from agentrl.run.metrics import (
    cached_ratio,
    engine_metrics,
    rollout_metrics,
    staleness_counts,
    staleness_metrics,
)
from agentrl.types import (
    Completion,
    Ending,
    Episode,
    Failure,
    Finish,
    Group,
    Limits,
    Message,
    RequestTimes,
    Restart,
    RolloutId,
    Task,
    ToolStats,
    Trajectory,
    Turn,
    TurnTokens,
    Verdict,
)

TASK = Task.ask("t", "?")


def episode(name: str, ending: Ending = Ending.COMPLETED, add: ToolStats | None = None) -> Episode:
    failure = Failure("reward", "error", "x") if ending is Ending.FAILED else None
    tools = {} if add is None else {"add": add}
    return Episode(name, "E-v0", TASK, 0, Limits(), (), (1.0,), ending, failure, tools=tools)


def outcome(parts: list[dict[str, float]], episodes: tuple[Episode, ...]) -> GroupOutcome:
    verdicts = tuple(Verdict(e.id, "env", own["env"], own) for e, own in zip(episodes, parts, strict=True))
    lost = (episode("lost", Ending.FAILED, ToolStats(calls=100, seconds=1e-6, failed={"crashed": 1})),)
    return GroupOutcome(Group("g", TASK, 0, episodes, verdicts), lost, episodes)


def test_rewards_and_tools_are_told_by_name_and_failed_episodes_apart() -> None:
    episodes = (
        episode("a", add=ToolStats(calls=1, seconds=0.0005)),
        episode(
            "b",
            Ending.TRUNCATED,
            ToolStats(calls=3, seconds=0.0035, rejected={"type": 1}, took={"3ms": 3}),
        ),
    )
    metrics = rollout_metrics(
        [outcome([{"env": 1.0, "brevity": 3.0}, {"env": 0.0, "brevity": 1.0}], episodes)]
    )
    assert metrics["rollout/raw_reward"] == 0.5
    assert metrics["rollout/raw_reward_std"] == 0.5
    assert metrics["rollout/truncated_reward"] == 0.0
    assert metrics["rollout/reward/env/mean"] == 0.5
    assert metrics["rollout/reward/brevity/mean"] == 2.0
    assert metrics["rollout/tool/add/calls/mean"] == 2.0
    assert metrics["rollout/tool/add/rejected/type/mean"] == 0.5
    assert metrics["rollout/tool/add/latency_ms"] == 1.0
    assert metrics["rollout/tool/add/took/3ms"] == 3.0
    assert metrics["rollout/tool/add/failed/crashed"] == 1.0
    assert metrics["rollout/failed_episodes"] == 1.0
    assert not any(name.endswith("us/mean") for name in metrics)


def test_the_steps_own_reward_is_told_once() -> None:
    metrics = rollout_metrics([outcome([{"env": 1.0}], (episode("a"),))])
    assert not any(name.startswith("rollout/reward/") for name in metrics)
    assert metrics["rollout/raw_reward_std"] == 0.0
    assert "rollout/truncated_reward" not in metrics


def test_restarts_are_counted_by_their_reason_and_reasoning_by_the_turn() -> None:
    def turn(step: int, reasoning: str | None = None) -> Turn:
        return Turn((), Message("assistant", "x", reasoning=reasoning), None, step)

    split = (
        Trajectory((turn(0), turn(1, "hm"))),
        Trajectory((turn(2),), 0, Restart.COMPACTED),
        Trajectory((turn(3),), 1, Restart.COMPACTED),
    )
    in_parts = replace(episode("a"), trajectories=split)
    metrics = rollout_metrics([outcome([{"env": 1.0}], (in_parts,))])
    assert metrics["rollout/restarts/compacted"] == 2.0
    assert metrics["rollout/restarts/tools_changed"] == 0.0
    assert metrics["rollout/reasoning_ratio"] == 0.25


def test_the_cached_share_is_that_of_the_prompts() -> None:
    def turn(step: int, world: int, sampled: int, cached: int) -> Turn:
        ids = np.zeros(sampled, np.int32)
        completion = Completion(ids, np.zeros(sampled, np.float32), ids, Finish.STOP, cached_tokens=cached)
        return Turn((), Message("assistant"), TurnTokens(np.zeros(world, np.int32), completion), step)

    unbroken = Trajectory((turn(0, 10, 5, 0), turn(1, 5, 4, 15)))
    anew = Trajectory((turn(2, 6, 1, 2),), 0, Restart.REWRITTEN)
    with_tokens = replace(episode("a"), trajectories=(unbroken, anew))
    assert cached_ratio([with_tokens]) == pytest.approx((0 + 15 + 2) / (10 + 20 + 6))
    assert cached_ratio([]) == 0.0


def test_what_the_engine_took_is_told_by_the_turn_as_far_as_it_says_so() -> None:
    def turn(step: int, seconds: RequestTimes) -> Turn:
        ids = np.zeros(1, np.int32)
        completion = Completion(ids, np.zeros(1, np.float32), ids, Finish.STOP, seconds=seconds)
        return Turn((), Message("assistant"), TurnTokens(ids, completion), step)

    def of(*trajectories: Trajectory) -> dict[str, float]:
        timed = replace(episode("a"), trajectories=trajectories)
        metrics = rollout_metrics([outcome([{"env": 1.0}], (timed,))])
        return {name.removeprefix("perf/"): value for name, value in metrics.items() if "_time" in name}

    first = turn(0, RequestTimes(4.0, 1.0, 0.5, 2.0))
    assert of(Trajectory((first, turn(1, RequestTimes(request=1.0))))) == {
        **{"request_time": 2.5, "request_time_max": 4.0},
        **{"queue_time": 1.0, "prefill_time": 0.5, "decode_time": 2.0},
    }
    assert of(Trajectory((turn(0, RequestTimes()),))) == {}


def test_groups_and_rollouts_that_were_dropped_are_counted_by_what_dropped_them() -> None:
    played = outcome([{"env": 1.0}], (episode("a"),))
    reasons = ("", "too_easy", "too_easy", "over_sampled", "not_chosen")
    cut = GroupOutcome(None, (), (episode("b", Ending.ABORTED),), "over_sampled")
    removed = {RolloutId("a"): "truncated"}
    metrics = rollout_metrics([*(replace(played, reason=reason) for reason in reasons), cut], removed)
    counts = {name: value for name, value in metrics.items() if "drop" in name or "prompts" in name}
    assert counts == {
        "rollout/prompts": 6,
        "rollout/dynamic_filter/drop_too_easy": 2,
        "rollout/dropped/over_sampled": 2,
        "rollout/dropped/not_chosen": 1,
        "rollout/sample_filter/drop_truncated": 1,
    }


def test_staleness_is_the_time_in_flight_and_the_time_in_the_queue() -> None:
    """Two groups, trained while version 9 is served. By hand: 9 - version, and how much of it in flight.

    The first group began at 5, ended at 8; the last token of the second came just before its version was
    recorded, so none of its staleness is time in flight.
    """
    first = replace(grown("a", [5, 5, 7], [6]), start_version=5, end_version=8)
    second = replace(grown("b", [6], [7]), start_version=6)
    assert staleness_metrics([first, second], version=9) == {
        "rollout/staleness/mean": pytest.approx((4 + 4 + 2 + 3 + 3 + 2) / 6),
        "rollout/staleness/max": 4.0,
        "rollout/staleness/flight/mean": pytest.approx((3 + 3 + 1 + 2 + 0 + 0) / 6),
        "rollout/staleness/queue/mean": pytest.approx((1 + 1 + 1 + 1 + 3 + 2) / 6),
        **{f"rollout/staleness/flight/groups_{versions}": 1.0 for versions in (3, 0)},
        **{f"rollout/staleness/queue/groups_{versions}": 1.0 for versions in (1, 3)},
    }
    # By their oldest tokens, 4 and 3 versions: 3 + 1 and 0 + 3.
    assert staleness_counts([first, second], version=9) == ({3: 1, 0: 1}, {1: 1, 3: 1})
    assert staleness_counts([first, first], version=9) == ({3: 2}, {1: 2})
    assert set(staleness_metrics([], version=9).values()) == {0.0}
    (opponent,) = (replace(t, trainable=False, agent="b") for t in first.episodes[0].trajectories)
    played = replace(
        first.episodes[0],
        trajectories=(*first.episodes[0].trajectories, opponent),
        agents=("agent", "b"),
        frozen_agents=("b",),
    )
    verdicts = tuple(Verdict(played.id, "s", 1.0, agent=agent) for agent in played.agents)
    two = Group("a", TASK, 0, (played,), verdicts, 5, 8)
    assert staleness_metrics([two], version=9)["rollout/staleness/mean"] == pytest.approx((4 + 4 + 2) / 3)


def grown(name: str, *versions: list[int]) -> Group:
    """A group with an episode for each list: the versions of its tokens."""
    episodes = []
    for number, of_tokens in enumerate(versions):
        count = len(of_tokens)
        completion = Completion(
            np.zeros(count, np.int32), np.zeros(count, np.float32), np.array(of_tokens, np.int32), Finish.STOP
        )
        turn = Turn((), Message("assistant", "!"), TurnTokens(np.zeros(1, np.int32), completion))
        episodes.append(replace(episode(f"{name}{number}"), trajectories=(Trajectory((turn,)),)))
    verdicts = tuple(Verdict(e.id, "s", 1.0) for e in episodes)
    return Group(name, TASK, 0, tuple(episodes), verdicts)


def test_pass_at_k_counts_the_choices_of_k_siblings_with_a_solved_one() -> None:
    scores = [[1.0, 0.0, 0.2, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.5, 0.0, 0.0], [1.0, 0.0]]
    outcomes = [
        outcome([{"env": score} for score in own], tuple(episode(f"{g}.{n}") for n in range(len(own))))
        for g, own in enumerate(scores)
    ]
    metrics = rollout_metrics(outcomes)
    for k in (2, 4):
        shares = [
            sum(max(chosen) >= 1.0 for chosen in combinations(own, k)) / len(list(combinations(own, k)))
            for own in scores
            if len(own) >= k
        ]
        assert metrics[f"rollout/pass@{k}"] == pytest.approx(sum(shares) / len(shares))
    assert "rollout/pass@1" not in metrics
    assert not any("pass@" in name for name in rollout_metrics([outcome([{"env": 1.0}], (episode("a"),))]))


def test_prompts_of_several_files_are_told_apart() -> None:
    def of(id: str, score: float) -> GroupOutcome:
        task = Task.ask(id, "?")
        played = replace(episode(f"e{id}"), task=task)
        verdict = Verdict(played.id, "env", score)
        return GroupOutcome(Group(id, task, 0, (played,), (verdict,)), (), (played,))

    mixed = [of("data/gsm8k.jsonl:3", 1.0), of("data/gsm8k.jsonl:10", 0.0), of("x/aime.jsonl.gz:0", 0.25)]
    metrics = rollout_metrics([*mixed, of("test-127-works-2", 1.0)])
    assert {name: value for name, value in metrics.items() if "/source/" in name} == {
        "rollout/source/gsm8k/raw_reward": 0.5,
        "rollout/source/gsm8k/groups": 2.0,
        "rollout/source/aime/raw_reward": 0.25,
        "rollout/source/aime/groups": 1.0,
    }
    assert not any("/source/" in name for name in rollout_metrics(mixed[:2]))


@pytest.mark.parametrize(
    ("text", "repeats"),
    [
        ("", False),
        ("Torek", False),
        (Path(__file__).read_text(), False),
        ("I should look that up. " * 300, True),
        ("Wait, " * 3, False),
        # Only the end counts: a long answer that was varied and then runs in circles.
        (Path(__file__).read_text() + "and so on " * 1000, True),
        ("and so on " * 1000 + Path(__file__).read_text(), False),
    ],
)
def test_an_episode_that_says_the_same_over_and_over_repeats(text: str, repeats: bool) -> None:
    half = len(text) // 2
    for said in (Message("assistant", text), Message("assistant", text[half:], text[:half] or None)):
        played = replace(episode("a"), trajectories=(Trajectory((Turn((), said, None),)),))
        assert rollout_metrics([outcome([{"env": 1.0}], (played,))])["rollout/repetition_ratio"] == repeats
    # What a frozen opponent says is not the policy's.
    theirs = Trajectory((Turn((), said, None),), agent="b", trainable=False)
    two = {"agents": ("agent", "b"), "frozen_agents": ("b",)}
    played = replace(episode("a"), trajectories=(theirs,), **two)
    verdicts = tuple(Verdict("a", "env", 1.0, agent=agent) for agent in two["agents"])
    found = rollout_metrics([GroupOutcome(Group("g", TASK, 0, (played,), verdicts), (), (played,))])
    assert found["rollout/repetition_ratio"] == 0.0


def test_of_drafts_an_iteration_counts_its_own():
    before = {"spec_proposed": 40, "spec_accepted": 40, "spec_verified": 10, "lost": 1}
    now = {"spec_proposed": 100, "spec_accepted": 70, "spec_verified": 30, "lost": 2}
    assert engine_metrics(now, before) == {
        "engine/lost": 2.0,
        "rollout/spec_accept_rate": 0.5,
        # 30 tokens were taken in 20 passes, each of which adds one.
        "rollout/spec_accept_length": 2.5,
    }
    assert engine_metrics(now, now) == {"engine/lost": 2.0}
