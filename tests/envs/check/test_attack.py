"""`agentrl envs attack`: it finds what pays without solving, and does not take luck for it."""

from __future__ import annotations

import hashlib
import json
from functools import partial

import pytest

from agentrl import SingleTurnEnv, Task, UserError
from agentrl.cli import main
from agentrl.envs.check import AttackReport, attack_env
from agentrl.envs.check.attack import LEAST_BUDGET
from agentrl.envs.check.strategies import strategies
from agentrl.tools import inline
from tests.envs.check import cheated, hacked
from tests.envs.check.broken import Good

BUDGET = 300


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (hacked.PaysWords, "word of the verifier: 'verified by the grader'"),
        (hacked.PaysForm, "the answer of 1 training tasks"),
        (hacked.PaysQuotes, "of the prompt"),
        (hacked.PaysRepetition, "`look`"),
        (hacked.Stuck, '`turn` with {"way": "up"}'),
        (cheated.PaysNothing, "of what `look` says"),
        (cheated.PaysCalls, "`look`"),
        (cheated.PaysLength, "100,000 letters"),
    ],
)
def test_a_world_that_pays_for_less_is_won(world, words):
    report = attack_env(world, budget=BUDGET)
    assert report.paid, report
    assert all(attempt.low > report.chance_score for attempt in report.paid)
    assert any(words in attempt.strategy for attempt in report.attempts if attempt.paid)


def test_a_good_world_is_not_won():
    report = attack_env(Good, budget=BUDGET)
    assert report.paid == ()
    assert {attempt.mean for attempt in report.attempts} == {0.0}


class Lottery(SingleTurnEnv):
    """One answer in eight wins, another one for every task: a constant answer wins as often as any."""

    chance_score = 0.125
    splits = ("train",)

    def tasks(self, split):
        return [Task.ask(f"{split}-{n}", f"Number {n}?") for n in range(400)]

    @inline
    def grade(self, task, answer):
        return float(hashlib.sha256(f"{task.id}{answer}".encode()).digest()[0] < 32)


def test_luck_in_the_search_is_not_taken_for_a_way_to_win():
    """Of some 45 strategies the luckiest win a third of what the search plays, and an eighth elsewhere."""
    for seed in range(4):
        report = attack_env(Lottery, budget=600, seed=seed)
        assert report.paid == ()
        mean = sum(attempt.mean for attempt in report.attempts) / len(report.attempts)
        assert mean == pytest.approx(0.125, abs=0.06)


class Remembers(Good):
    """Keeps which tasks were played under which seeds."""

    def __init__(self, played):
        super().__init__()
        self.played = played

    async def reset(self, task, *, seed):
        self.played.append((task.id, seed))
        return await super().reset(task, seed=seed)


def test_what_confirms_was_not_searched_and_the_budget_holds():
    played: list[tuple[str, int]] = []
    report = attack_env(partial(Remembers, played), budget=BUDGET)
    # The first one is to see which tools are offered.
    assert len(played) - 1 == report.episodes <= BUDGET
    confirming = sum(attempt.episodes for attempt in report.attempts)
    searched, confirmed = played[1:-confirming], played[-confirming:]
    assert not {id for id, _ in searched} & {id for id, _ in confirmed}
    assert not set(searched) & set(confirmed)


def test_the_same_seed_gives_the_same_attack_and_every_strategy_has_its_own_name():
    reports = [attack_env(hacked.PaysForm, budget=200, seed=5) for _ in range(2)]
    assert reports[0] == reports[1]
    names = [strategy.name for strategy in strategies(Good(), Good().tasks("train"))]
    assert len(names) == len(set(names))


def test_of_several_agents_the_first_one_attacks():
    report = attack_env("RockPaperScissors-v0", budget=LEAST_BUDGET)
    assert isinstance(report, AttackReport)
    assert report.attempts


def test_progress_counts_the_episodes():
    counts = []
    report = attack_env(Good, budget=BUDGET, progress=lambda played, what: counts.append(played))
    assert sum(counts) == report.episodes


def test_bad_input_is_a_one_sentence_error():
    with pytest.raises(UserError, match="at least 80 episodes, got budget = 79"):
        attack_env(Good, budget=79)
    with pytest.raises(UserError, match="has no tasks to attack"):
        attack_env("SingleTurn-v0")


@pytest.mark.parametrize(("world", "code"), [("broken:Good", 0), ("hacked:PaysWords", 1)])
def test_the_command_exits_with_1_where_something_paid(capsys, world, code):
    arguments = ["envs", "attack", f"tests.envs.check.{world}", "--budget", "200"]
    for flags in ([], ["--json"]):
        exit_code = 0
        try:
            main([*arguments, *flags])
        except SystemExit as leaving:
            exit_code = leaving.code
        assert exit_code == code
        out = capsys.readouterr().out
    report = json.loads(out)
    assert (report["paid"], report["model"]) == (code, None)
    assert len(report["attempts"]) == 5


class PaysTurns(Good):
    """Pays any answer after three turns with a call: the fourth turn is the last."""

    asked = 0
    least = 3

    async def reset(self, task, *, seed):
        self.asked = 0
        return await super().reset(task, seed=seed)

    async def step(self, action):
        self.asked += bool(action.tool_calls)
        return await super().step(action)

    def reward(self, task, answer):
        return float(answer == task.answer or (bool(answer) and self.asked >= self.least))


class PaysCrowds(PaysTurns):
    """Pays any answer after more calls than there are turns."""

    least = 5

    async def step(self, action):
        self.asked += len(action.tool_calls)
        return await Good.step(self, action)


@pytest.mark.parametrize(("world", "words"), [(PaysTurns, "turn after turn"), (PaysCrowds, "at once")])
def test_a_world_that_pays_any_answer_after_enough_calls_is_won(world, words):
    report = attack_env(world, budget=BUDGET)
    assert [attempt.strategy for attempt in report.paid if words in attempt.strategy], report


class NotANumber(Good):
    """Its reward is no number, whatever the answer."""

    def reward(self, task, answer):
        return float("nan")


class NoReset(Good):
    """No episode of it begins."""

    async def reset(self, task, *, seed):
        raise RuntimeError("the world is down")


class SometimesDown(Good):
    """Every answer is worth 1.0, but to one task in two the grader does not reply."""

    def reward(self, task, answer):
        if hashlib.sha256(task.id.encode()).digest()[0] % 2:
            raise RuntimeError("the grader is down")
        return 1.0


def test_a_failure_is_in_no_mean_and_a_strategy_that_only_fails_is_named():
    report = attack_env(NoReset, budget=100)
    assert report.attempts == ()
    assert report.failures == report.episodes == 100
    assert len(report.failed) == report.tried
    assert "the world is down" in report.failure
    report = attack_env(NotANumber, budget=100)
    assert any(name.startswith("always") for name in report.failed)
    assert report.failures >= len(report.failed)
    report = attack_env(SometimesDown, budget=100)
    assert 0 < report.failures < report.episodes
    # Zeros for the failures would make it less.
    assert {attempt.mean for attempt in report.paid} == {1.0}
    healthy = attack_env(Good, budget=100)
    assert (healthy.failures, healthy.failed, healthy.failure) == (0, (), "")


@pytest.mark.parametrize("world", ["NoReset", "NotANumber"])
def test_the_command_exits_with_1_where_a_strategy_only_failed(capsys, world):
    arguments = ["envs", "attack", f"tests.envs.check.test_attack:{world}", "--budget", "100"]
    for flags in ([], ["--json"]):
        with pytest.raises(SystemExit) as leaving:
            main([*arguments, *flags])
        assert leaving.value.code == 1
        out = capsys.readouterr().out
        assert "failed" in out
    report = json.loads(out)
    assert (report["paid"], report["failures"] > 0) == (0, True)
