from __future__ import annotations

import itertools
import math
import random
import re
from collections import Counter
from fractions import Fraction

import pytest

from agentrl import ScriptedAgent, UserError, call, play, say
from agentrl.envs.check import check_env
from agentrl.rendering.fresh_tokenizer import train_tokenizer
from agentrl.tools import calculate
from agentrl.types import Ending
from envs_contrib.calculator import Calculator, problems
from envs_contrib.calculator.problems import NUM_PROBLEMS, split_of

CALCULATOR = Calculator()
EVENTS = {
    r"(?:buys|finds|gets) (\d+) more": lambda amount, n: amount + n,
    r"(?:sells|loses|gives away) (\d+)": lambda amount, n: amount - n,
    r"has (\d+) times as many": lambda amount, n: amount * n,
    r"keeps one of (\d+) equal shares": lambda amount, n: amount / n,
}


def _run(script) -> tuple[list[tuple[str, str]], str]:
    pairs = []
    action = next(script)
    while action.tool_calls:
        expression = action.tool_calls[0].arguments["expression"]
        pairs.append((expression, calculate(expression)))
        action = script.send(pairs[-1][1])
    return pairs, action.content


def _solve(text: str) -> Fraction:
    """The answer, computed from the text."""
    first, *events, question = re.split(r"(?<=[.?]) ", text)
    holder, amount, noun = re.fullmatch(r"(\w+) has (\d+) (\w+)\.", first).groups()
    amount = Fraction(amount)
    for sentence in events:
        name, event = sentence.removesuffix(".").split(" ", 1)
        ((change, number),) = [
            (change, int(match[1])) for form, change in EVENTS.items() if (match := re.fullmatch(form, event))
        ]
        # Only "times as many" changes the person; every other event is about the same person.
        assert (name != holder) == ("times as many" in event)
        holder, amount = name, change(amount, number)
    assert question == f"How many {noun} does {holder} have?"
    return amount


@pytest.mark.parametrize("split", NUM_PROBLEMS)
def test_answers_follow_from_the_text_and_are_in_no_question(split):
    tasks = CALCULATOR.tasks(split)
    assert len({task.id for task in tasks}) == len({task.prompt for task in tasks}) == NUM_PROBLEMS[split]
    for task in tasks:
        (message,) = task.prompt
        assert Fraction(task.answer) == _solve(message.content)
        numbers = re.findall(r"\d+", message.content)
        assert task.answer not in numbers
        assert all(2 <= int(number) <= 99 for number in numbers)
        assert 2 <= int(task.answer) <= 999
        assert task.split == split


@pytest.mark.parametrize("split", NUM_PROBLEMS)
def test_a_third_each_takes_one_two_and_three_calls(split):
    counts = Counter(task.metadata["calls"] for task in CALCULATOR.tasks(split))
    assert sorted(counts) == [1, 2, 3]
    assert max(counts.values()) - min(counts.values()) <= 1


def test_every_operator_is_needed_often():
    operators = Counter(
        step[0] for task in CALCULATOR.tasks("train") for step in task.metadata["steps"].split()
    )
    assert set(operators) == set("+-*/")
    assert min(operators.values()) > 0.1 * sum(operators.values())


def test_no_arithmetic_is_in_two_splits_whatever_the_seed():
    owners: dict[str, set[str]] = {}
    for seed in (0, 1):
        for split in NUM_PROBLEMS:
            for task in Calculator(seed).tasks(split):
                owners.setdefault(f"{task.metadata['start']} {task.metadata['steps']}", set()).add(split)
    assert {len(splits) for splits in owners.values()} == {1}


def test_the_splits_shares_hold_over_all_problems():
    rng = random.Random(0)
    drawn = [
        split_of(rng.randint(2, 99), (problems.Operation(rng.choice("+-*/"), rng.randint(2, 99)),))
        for _ in range(20_000)
    ]
    shares = {split: count / len(drawn) for split, count in Counter(drawn).items()}
    assert shares == pytest.approx({"demo": 0.45, "train": 0.40, "validation": 0.05, "test": 0.10}, abs=0.03)


def test_one_seed_gives_one_set_of_problems():
    assert problems.problems.__wrapped__(0, "test") == problems.problems(0, "test")
    assert Calculator(0).tasks("test") == CALCULATOR.tasks("test")
    assert Calculator(1).tasks("test") != CALCULATOR.tasks("test")


@pytest.mark.parametrize("split", NUM_PROBLEMS)
def test_the_expert_is_always_right(split):
    for task in CALCULATOR.tasks(split):
        calls, answer = _run(CALCULATOR.expert(task))
        assert len(calls) == task.metadata["calls"]
        assert CALCULATOR.reward(task, answer) == 1.0


def test_each_call_of_the_expert_is_one_operation_on_the_last_result():
    for task in CALCULATOR.tasks("validation"):
        calls, _ = _run(CALCULATOR.expert(task))
        assert all(re.fullmatch(r"\d+[-+*/]\d+", expression) for expression, _ in calls)
        for (_, result), (expression, _) in itertools.pairwise(calls):
            assert re.split(r"[-+*/]", expression)[0] == result


async def test_the_expert_plays_through_the_episode_loop():
    for task in CALCULATOR.tasks("test")[:64]:
        calculator = Calculator()
        episode = await play(calculator, ScriptedAgent(calculator.expert(task)), task)
        assert episode.ending is Ending.COMPLETED
        assert episode.step_rewards[-1] == 1.0
        assert episode.events == dict.fromkeys(("tool_calls", "tool/calc/calls"), task.metadata["calls"])


async def test_what_is_not_arithmetic_is_counted_and_answered():
    calculator = Calculator()
    await calculator.reset(calculator.tasks("train")[0], seed=0)
    step = await calculator.step(call("calc", expression="many"))
    assert [message.content for message in step.observation] == [
        "'m' is not arithmetic; use numbers, + - * / ** and parentheses only."
    ]
    assert calculator.counts["rejected_calls"] == 1
    step = await calculator.step(call("calc", expression="12*7"))
    assert [message.content for message in step.observation] == ["84"]


async def test_only_the_right_digits_are_worth_anything():
    calculator = Calculator()
    task = calculator.tasks("train")[0]
    await calculator.reset(task, seed=0)
    assert (await calculator.step(say(f" {task.answer}\n"))).reward == 1.0
    for wrong in (
        "",
        f"-{task.answer}",
        f"{task.answer}0",
        f"{task.answer} {task.answer}",
        f"{task.answer}/2",
    ):
        assert calculator.reward(task, wrong) == 0.0


def test_an_unknown_split_is_a_one_sentence_error():
    with pytest.raises(UserError, match="no split `dev`; it has demo, train, validation, test"):
        CALCULATOR.tasks("dev")


def test_limits_and_dialect():
    assert (Calculator.limits.max_turns, Calculator.limits.max_tokens) == (5, 224)
    assert Calculator.dialect.names(["calc"]) == ("calc", "result", "answer")


def test_demonstrations_err_at_their_rates():
    rng = random.Random(0)
    outcomes: dict[str, list[bool]] = {}
    chosen: Counter[str] = Counter()

    def note(kind: str, happened: bool) -> None:
        outcomes.setdefault(kind, []).append(happened)

    for task in CALCULATOR.tasks("demo"):
        calls, answer = _run(CALCULATOR.demonstrator(task, rng))
        steps = task.metadata["steps"].split()
        note("right", CALCULATOR.reward(task, answer) == 1.0)
        note("no tool", not calls)
        if not calls:
            assert answer in re.findall(r"\d+", task.prompt[0].content)
            continue
        before = str(task.metadata["start"])
        for number, ((expression, result), step) in enumerate(zip(calls, steps, strict=False), start=1):
            assert expression[: len(before)] == before
            assert expression[len(before) + 1 :] == step[1:]
            operator = expression[len(before)]
            note("operator", operator != step[0])
            chosen[operator] += operator != step[0]
            if number < len(steps):
                note("stop", number == len(calls))
            before = result
        assert answer == calls[-1][1]
    for kind, rate in {"no tool": 0.15, "operator": 0.20, "stop": 0.20}.items():
        spread = math.sqrt(rate * (1 - rate) / len(outcomes[kind]))
        assert sum(outcomes[kind]) / len(outcomes[kind]) == pytest.approx(rate, abs=4 * spread)
    assert min(chosen[operator] for operator in "+-*/") > 0.1 * chosen.total()
    assert 0.42 < sum(outcomes["right"]) / len(outcomes["right"]) < 0.50


def test_a_demonstration_depends_on_its_generator_only():
    tasks = CALCULATOR.tasks("demo")[:50]
    first = [_run(CALCULATOR.demonstrator(task, random.Random(7))) for task in tasks]
    assert first == [_run(CALCULATOR.demonstrator(task, random.Random(7))) for task in tasks]
    assert first != [_run(CALCULATOR.demonstrator(task, random.Random(8))) for task in tasks]


def test_every_word_of_a_problem_is_one_token_and_the_calls_fit_the_limit():
    tokenizer = train_tokenizer(CALCULATOR.corpus(), special_tokens=(), vocab_size=512)
    for task in CALCULATOR.tasks("test"):
        text = f" {task.prompt[0].content}"
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert len(tokens) == len(re.findall(r" ?[A-Za-z]+|[ .?]|\d", text))
        assert len(tokens) < 100


def test_the_environment_passes_its_check_without_a_warning():
    report = check_env(Calculator, seed=1)
    assert report.findings == (), str(report)


@pytest.mark.parametrize("most", [1, 2])
def test_problems_of_fewer_steps_are_those_of_all(most):
    few, every = Calculator(max_calls=most).tasks("test"), CALCULATOR.tasks("test")
    assert list(few) == [task for task in every if task.metadata["calls"] <= most]
    assert {task.metadata["calls"] for task in few} == set(range(1, most + 1))


@pytest.mark.parametrize("most", [0, 4])
def test_problems_of_other_numbers_of_steps_are_refused(most):
    with pytest.raises(UserError, match="1 to 3 calls"):
        Calculator(max_calls=most)
