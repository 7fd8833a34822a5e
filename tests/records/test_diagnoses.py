"""Each diagnosis holds on the metrics of a run with its fault, and none on those of a healthy run.

The histories in `histories/` are recorded: metrics.jsonl of short runs, reduced to what diagnoses read (each
file names its command). The others are made by hand, at the edges of the thresholds.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.records.conditions import (
    CONDITIONS,
    ENTROPY_GROWS,
    GAP_GROWS,
    MIN_IDLE_GROUPS,
    MIN_IDLE_STEPS,
    REPETITION_GROWS,
)
from agentrl.records.diagnoses import DIAGNOSES, Diagnoses, read_diagnoses
from agentrl.records.history import record_sizes, roll_back
from agentrl.records.trends import WINDOW, MetricHistory, RunFacts

HISTORIES = sorted((Path(__file__).parent / "histories").glob("*.json"))
STEADY = {
    "rollout/raw_reward": 0.3,
    "rollout/raw_reward_std": 0.4,
    "rollout/zero_std/ratio": 0.2,
    "rollout/prompts": 32.0,
    "rollout/truncated_ratio": 0.05,
    "rollout/truncated_reward": 0.0,
    "rollout/repetition_ratio": 0.0,
    "train/entropy_loss": 0.4,
    "train/optimizer_steps": 1.0,
}
SILENT = {
    "rollout/raw_reward": 0.0,
    "rollout/raw_reward_std": 0.0,
    "rollout/zero_std/ratio": 1.0,
    "train/optimizer_steps": 0.0,
}


def iterations(number, *, first=1, **columns):
    """Rows of iterations. columns: by the end of a metric's name, a value or a list with one for each."""
    rows = []
    for index in range(number):
        row = dict(STEADY)
        for end, values in columns.items():
            key = next(name for name in STEADY if name.replace("/", "_").endswith(end))
            row[key] = values[index] if isinstance(values, list) else values
        rows.append((first + index, row))
    return rows


def silent(number, first=1, **changes):
    return [(step, row | SILENT | changes) for step, row in iterations(number, first=first)]


def diagnosed(folder, rows, *, is_supervised=False, **facts):
    """The steps at which diagnoses are made, by name."""
    diagnoses = Diagnoses(folder, RunFacts(**facts), is_supervised=is_supervised)
    return {made.name: made.step for step, row in rows for made in diagnoses.add(step, row)}


def sentences_of(runs, folder, *, is_supervised=False):
    """The diagnoses of all these runs, whose sentences have the form of the others."""
    made = []
    for rows in runs:
        diagnoses = Diagnoses(folder, is_supervised=is_supervised)
        made += [item for step, row in rows for item in diagnoses.add(step, row)]
    for item in made:
        assert str(item).isprintable()
        assert item.text.endswith(".")
        assert f". Try: {item.remedy}" in str(item)
        assert item.remedy.endswith(".")
    return made


def grown(low, high, number=WINDOW):
    return [low] * number + [high] * number


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
def test_recorded_runs_have_the_diagnoses_of_their_faults_and_no_others(path, tmp_path):
    recorded = json.loads(path.read_text(encoding="utf-8"))
    rows = [(row["step"], row) for row in recorded["metrics"]]
    assert set(diagnosed(tmp_path, rows, **recorded["facts"])) == set(recorded["diagnoses"])


def test_every_diagnosis_is_in_a_recorded_run_and_healthy_runs_are_recorded():
    recorded = [set(json.loads(path.read_text(encoding="utf-8"))["diagnoses"]) for path in HISTORIES]
    assert set().union(*recorded) == set(CONDITIONS)
    assert set() in recorded


# No signal


def test_no_signal_needs_some_iterations_and_some_groups(tmp_path):
    assert diagnosed(tmp_path, silent(9)) == {"no-signal": MIN_IDLE_STEPS}
    few = silent(40, **{"rollout/prompts": 2.0})
    assert diagnosed(tmp_path, few) == {"no-signal": MIN_IDLE_GROUPS // 2}


def test_a_single_group_with_signal_begins_the_count_again(tmp_path):
    rows = [*silent(2), *iterations(1, first=3, zero_std_ratio=0.97), *silent(3, first=4)]
    assert diagnosed(tmp_path, rows) == {"no-signal": 6}


@pytest.mark.parametrize(("reward", "names"), [(0.94, {"no-signal"}), (0.96, set()), (1.0, set())])
def test_siblings_that_all_solve_their_task_are_no_fault(tmp_path, reward, names):
    rows = silent(9, **{"rollout/raw_reward": reward})
    assert set(diagnosed(tmp_path, rows)) == names
    scaled = silent(9, **{"rollout/raw_reward": reward * 3 - 1})
    assert set(diagnosed(tmp_path, scaled, expert_score=2.0, chance_score=-1.0)) == names


def test_an_estimator_that_compares_all_episodes_has_a_signal_where_they_differ(tmp_path):
    differing = silent(9, **{"rollout/raw_reward_std": 0.3, "train/optimizer_steps": 1.0})
    assert diagnosed(tmp_path, differing, compares=False) == {}
    assert diagnosed(tmp_path, differing, compares=True) == {"no-signal": 3}
    assert diagnosed(tmp_path, silent(9), compares=False) == {"no-signal": 3}


def test_scores_that_a_function_has_changed_are_a_signal(tmp_path):
    assert diagnosed(tmp_path, silent(9, **{"rollout/rewards": 0.3})) == {}


def test_noise_costs_a_policy_nothing_that_has_earned_nothing(tmp_path):
    truncated = [*[0.05] * 9, *[0.95] * 9]
    assert diagnosed(tmp_path, iterations(18, truncated_ratio=truncated, raw_reward=[0.0] * 18)) == {}


def test_a_teacher_is_a_signal_and_a_run_that_only_plays_needs_none(tmp_path):
    assert diagnosed(tmp_path, silent(9, **{"train/opd_kl": 0.5})) == {}
    playing = [
        (step, {k: v for k, v in row.items() if not k.startswith("train/")}) for step, row in silent(9)
    ]
    assert diagnosed(tmp_path, playing) == {}


def test_a_fresh_model_without_a_warm_start_is_the_first_suspect(tmp_path):
    texts = {}
    for is_untrained in (True, False):
        diagnoses = Diagnoses(tmp_path, RunFacts(is_untrained=is_untrained))
        texts[is_untrained] = "".join(
            str(made) for step, row in silent(3) for made in diagnoses.add(step, row)
        )
    assert "Try: a warm start (warm_start_steps)" in texts[True]
    assert "warm_start_steps" not in texts[False]
    assert "in all 96 groups of the last 3 iterations" in texts[False]


# Truncation that pays


def test_truncation_that_grows_with_the_reward_is_named():
    rows = iterations(
        2 * WINDOW,
        truncated_ratio=grown(0.1, 0.6),
        raw_reward=grown(-0.3, -0.1),
        truncated_reward=0.0,
    )
    assert CONDITIONS["truncation-pays"](MetricHistory(dict(rows)), RunFacts()) == (
        "truncated episodes went from 10% to 60%, while the reward rose from -0.3 to -0.1: they earn 0, no "
        "less than those that end."
    )


@pytest.mark.parametrize(
    "columns",
    [
        {"truncated_ratio": grown(0.1, 0.29)},
        {"raw_reward": grown(-0.3, -0.29)},
        {"raw_reward": grown(-0.1, -0.3)},
        {"truncated_reward": -0.2},
        {"truncated_ratio": grown(0.6, 0.1)},
    ],
    ids=["it hardly grows", "the reward hardly does", "the reward falls", "it earns less", "it falls"],
)
def test_other_truncation_is_not(tmp_path, columns):
    fault = {
        "truncated_ratio": grown(0.1, 0.6),
        "raw_reward": grown(-0.3, -0.1),
        "truncated_reward": 0.0,
    }
    assert set(diagnosed(tmp_path, iterations(2 * WINDOW, **fault))) == {"truncation-pays"}
    assert diagnosed(tmp_path, iterations(2 * WINDOW, **{**fault, **columns})) == {}


def test_a_breakdown_in_the_second_iteration_is_named_after_one_more_window(tmp_path):
    columns = {
        "truncated_ratio": [0.0] + [1.0] * 9,
        "raw_reward": [-1.0] + [0.0] * 9,
        "truncated_reward": 0.0,
    }
    assert diagnosed(tmp_path, iterations(10, **columns)) == {"truncation-pays": WINDOW + 1}
    assert diagnosed(tmp_path, iterations(10, entropy_loss=[0.4] + [5.0] * 9)) == {
        "entropy-grows": WINDOW + 1
    }


# Entropy


def test_entropy_that_doubles_while_the_reward_does_not_rise_is_named(tmp_path):
    doubled = 0.4 * ENTROPY_GROWS
    assert diagnosed(tmp_path, iterations(10, entropy_loss=grown(0.4, doubled))) == {"entropy-grows": 10}
    falling = iterations(10, entropy_loss=grown(0.4, doubled), raw_reward=grown(0.3, 0.1))
    assert diagnosed(tmp_path, falling) == {"entropy-grows": 10}


@pytest.mark.parametrize(
    "columns",
    [
        {"entropy_loss": grown(0.4, 0.79)},
        {"entropy_loss": grown(0.05, 0.34)},
        {"entropy_loss": grown(0.8, 0.4)},
        {"entropy_loss": grown(0.4, 0.9), "raw_reward": grown(0.3, 0.5)},
    ],
    ids=["not doubled", "doubled from next to nothing", "it falls", "the reward rises"],
)
def test_other_entropy_is_not(tmp_path, columns):
    assert diagnosed(tmp_path, iterations(10, **columns)) == {}


def test_a_single_batch_is_no_trend(tmp_path):
    entropy = [*[0.4] * 9, 2.0]
    truncated = [*[0.0] * 9, 0.9]
    assert diagnosed(tmp_path, iterations(10, entropy_loss=entropy)) == {}
    assert diagnosed(tmp_path, iterations(10, truncated_ratio=truncated, raw_reward=0.3)) == {}


# Repetition


def test_a_policy_that_begins_to_repeat_itself_is_named_whatever_it_earns(tmp_path):
    begins = grown(0.0, REPETITION_GROWS)
    assert diagnosed(tmp_path, iterations(10, repetition_ratio=begins)) == {"repeats": 10}
    paid = iterations(10, repetition_ratio=grown(0.05, 0.26), raw_reward=grown(0.3, 0.5))
    assert diagnosed(tmp_path, paid) == {"repeats": 10}


@pytest.mark.parametrize(
    "columns",
    [
        {"repetition_ratio": grown(0.0, REPETITION_GROWS - 0.01)},
        {"repetition_ratio": 0.5},
        {"repetition_ratio": grown(0.5, 0.1)},
        {"repetition_ratio": [*[0.0] * 9, 0.9]},
    ],
    ids=["a little", "from the first", "less and less", "a single batch"],
)
def test_other_repetition_is_not(tmp_path, columns):
    assert diagnosed(tmp_path, iterations(10, **columns)) == {}


# Overfitting


def evaluated(train, held_out):
    """Ten iterations whose reward rises in equal parts, evaluated before and after them."""
    (start, end), (before, after) = train, held_out
    rewards = [start] + [end] * 9
    return [
        (0, {"eval/sampled": before}),
        *iterations(10, raw_reward=rewards),
        (10, {"eval/sampled": after}),
    ]


@pytest.mark.parametrize(
    ("train", "held_out", "is_made"),
    [
        ((0.3, 0.9), (0.3, 0.35), True),
        ((0.3, 0.9), (0.3, 0.2), True),
        ((0.3, 0.9), (0.3, 0.8), False),
        ((0.3, 0.45), (0.3, 0.1), False),
        ((0.3, 0.3), (0.3, 0.0), False),
        ((0.6, 0.9), (0.2, 0.45), False),
    ],
    ids=["held out stays", "it falls", "it follows", "little is gained", "both", "it is harder, and follows"],
)
def test_overfitting_is_training_that_gains_what_held_out_tasks_do_not(tmp_path, train, held_out, is_made):
    names = diagnosed(tmp_path, evaluated(train, held_out))
    assert names.get("overfitting") == (10 if is_made else None)


def test_few_evaluated_episodes_need_a_larger_gap(tmp_path):
    rows = evaluated((0.3, 0.3 + GAP_GROWS + 0.1), (0.3, 0.3))
    assert diagnosed(tmp_path, rows, eval_episodes=256) == {"overfitting": 10}
    assert diagnosed(tmp_path, rows, eval_episodes=32) == {}
    assert diagnosed(tmp_path, evaluated((0.0, 1.0), (0.0, 0.0)), eval_episodes=32) == {"overfitting": 10}


# A collapse


@pytest.mark.parametrize(
    ("rewards", "step"),
    [
        ([0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.4, 0.1, 0.0, 0.0], 9),
        ([0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6], None),
        ([0.9, 0.9, 0.9, 0.6, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5], None),
        ([0.1, 0.3, 0.3, 0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1], None),
        ([0.8, 0.8, 0.8, 0.0, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8], None),
        ([0.0] * 10, None),
    ],
    ids=[
        "most is lost",
        "a part is",
        "nearly half is",
        "within what batches differ by",
        "one batch",
        "nothing was",
    ],
)
def test_a_collapse_is_a_reward_that_has_lost_most_of_its_gain(tmp_path, rewards, step):
    rows = iterations(10, raw_reward=rewards)
    assert diagnosed(tmp_path, rows) == ({} if step is None else {"collapsed": step})
    # On another scale, and from another chance.
    scaled = iterations(10, raw_reward=[2 * reward - 1 for reward in rewards])
    facts = {"expert_score": 1.0, "chance_score": -1.0}
    assert diagnosed(tmp_path, scaled, **facts) == ({} if step is None else {"collapsed": step})


def test_small_batches_need_a_larger_fall(tmp_path):
    rows = iterations(10, raw_reward=[0.6] * 5 + [0.2] * 5)
    assert diagnosed(tmp_path, rows) == {"collapsed": 8}
    few = [(step, row | {"rollout/prompts": 4.0}) for step, row in rows]
    assert diagnosed(tmp_path, few) == {}


@pytest.mark.parametrize(("scores", "is_made"), [((0.3, 0.8, 0.2), True), ((0.3, 0.8, 0.5), False)])
def test_a_held_out_score_may_collapse_while_the_reward_does_not(tmp_path, scores, is_made):
    rows = [(5 * n, {"eval/sampled": score}) for n, score in enumerate(scores)]
    between = iterations(10)
    made = diagnosed(tmp_path, [rows[0], *between[:5], rows[1], *between[5:], rows[2]])
    assert made == ({"collapsed": 10} if is_made else {})


@pytest.mark.parametrize(
    ("shares", "rewards", "step"),
    [
        ([0.05] * 5 + [0.95] * 5, [0.12] * 5 + [0.01] * 5, 8),
        ([0.05] * 5 + [0.85] * 5, [0.12] * 5 + [0.01] * 5, None),
        ([0.05] * 5 + [0.95] * 5, [0.12] * 5 + [0.09] * 5, None),
        ([0.6] * 5 + [0.95] * 5, [0.12] * 5 + [0.01] * 5, None),
    ],
    ids=["hardly any ends", "some end", "they earn as much", "many never ended"],
)
def test_a_policy_that_writes_noise_is_lost_though_it_had_learned_little(tmp_path, shares, rewards, step):
    rows = iterations(10, raw_reward=rewards, truncated_ratio=shares)
    assert diagnosed(tmp_path, rows) == ({} if step is None else {"collapsed": step})


# Prompts without room


@pytest.mark.parametrize(("share", "is_made"), [(0.01, True), (0.125, True), (0.009, False), (0.0, False)])
def test_prompts_without_room_are_named_in_their_first_iteration(tmp_path, share, is_made):
    rows = iterations(3)
    rows[1][1]["rollout/no_room_ratio"] = share
    assert diagnosed(tmp_path, rows) == ({"no-room": 2} if is_made else {})


# Tokens that are too old


def aged(number, **shares):
    """Iterations whose tokens of each age have these effective shares, one for each iteration."""
    rows = iterations(number)
    for name, values in shares.items():
        for (_, row), value in zip(rows, values, strict=True):
            row[f"train/staleness_{name[1:]}/ess"] = value
    return rows


def test_tokens_with_hardly_any_weight_are_named_by_their_age(tmp_path):
    falling = [0.97, 0.85, 0.6, 0.3, 0.29, 0.29]
    assert diagnosed(tmp_path, aged(6, _1=falling)) == {"stale": 5}
    made = sentences_of([aged(6, _1=[0.9] * 6, _2=falling)], tmp_path)
    assert "tokens that are 2 versions old count for 40% of their number" in made[0].text


@pytest.mark.parametrize("shares", [[0.9] * 6, [0.9, 0.9, 0.1, 0.9, 0.9, 0.9], [0.51] * 6])
def test_other_tokens_are_not_too_old(tmp_path, shares):
    assert diagnosed(tmp_path, aged(6, _1=shares)) == {}


# The life of a diagnosis


def test_none_is_made_of_a_steady_run_of_an_empty_one_or_of_metrics_that_are_not_finite(tmp_path):
    rows = iterations(50)
    assert diagnosed(tmp_path, rows) == {}
    assert diagnosed(tmp_path, []) == {}
    broken = [(step, dict.fromkeys(row, float("nan"))) for step, row in rows]
    assert diagnosed(tmp_path, broken) == {}
    assert diagnosed(tmp_path, [(step, dict.fromkeys(row)) for step, row in rows]) == {}
    assert all(condition(MetricHistory(), RunFacts()) is None for condition in CONDITIONS.values())


def test_each_is_made_once_written_and_not_repeated_by_a_run_that_resumes(tmp_path):
    for step, row in silent(4):
        (tmp_path / "metrics.jsonl").open("a").write(json.dumps({"step": step, "time_s": 1.0, **row}) + "\n")
    first = Diagnoses.opened(tmp_path)
    assert [made.name for made in first.add(5, silent(1)[0][1])] == ["no-signal"]
    assert first.add(6, silent(1)[0][1]) == []
    assert read_diagnoses(tmp_path) == first.made
    resumed = Diagnoses.opened(tmp_path)
    assert resumed.made == first.made
    assert resumed.add(7, silent(1)[0][1]) == []
    assert len(read_diagnoses(tmp_path)) == 1


def test_a_roll_back_undoes_what_was_diagnosed_after_the_checkpoint(tmp_path):
    sizes = record_sizes(tmp_path)
    assert diagnosed(tmp_path, silent(3)) == {"no-signal": 3}
    roll_back(tmp_path, sizes, attempt=1)
    assert not (tmp_path / DIAGNOSES).exists()
    assert Diagnoses.opened(tmp_path).made == []


def test_a_folder_that_cannot_be_written_costs_the_file_and_not_the_run(tmp_path):
    assert diagnosed(tmp_path / "nowhere", silent(3)) == {"no-signal": 3}


def test_every_sentence_is_one_line_that_ends_and_says_what_to_try(tmp_path):
    faults = [
        [(1, STEADY | {"rollout/no_room_ratio": 0.25})],
        silent(3),
        iterations(10, truncated_ratio=grown(0.1, 0.6), raw_reward=grown(-0.3, -0.1), truncated_reward=0.0),
        iterations(10, entropy_loss=grown(0.4, 0.9)),
        iterations(10, repetition_ratio=grown(0.0, 0.9)),
        evaluated((0.3, 0.9), (0.3, 0.3)),
        iterations(10, raw_reward=[0.8] * 5 + [0.0] * 5),
        aged(3, _1=[0.2] * 3),
    ]
    made = sentences_of(faults, tmp_path)
    assert [item.name for item in made] == [*CONDITIONS]
