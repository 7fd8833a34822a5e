"""The time to grade math answers: the grader `math`, with answers that hang, against math-verify alone.

Both sides grade answers of one seeded generator: integers, fractions, decimals, roots, polynomials and
tuples in several forms, half of them right, in groups of siblings with one label; every repeat has answers of
its own. The grader also gets answers that never end. The baseline calls math-verify in this process: it has
no limit, so it gets the others only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from importlib.metadata import version
from itertools import count

from math_verify import parse, verify

from agentrl.envs.graders.mathematics import MathGrader
from agentrl.tools import release_shared
from agentrl.types import JSON, RewardParts, Task
from benchmarks.compare import Duration, timed
from benchmarks.machine import machine

HANGING = "10^{10^{10}}!"
_SIBLINGS = 8
_GRADER, _DIRECT = "grader math", "math-verify alone"


@dataclass(frozen=True, slots=True)
class GradingSettings:
    """The workload. Frozen.

    answers: of one run, those that hang included. hanging: how many of them hang. timeout_s: CPU seconds of
    one comparison. in_flight: answers that the grader has at a time.
    """

    answers: int = 10_000
    hanging: int = 100
    timeout_s: float = 1.0
    in_flight: int = 256


def bench_grading(settings: GradingSettings | None = None, *, repeats: int = 5) -> dict[str, JSON]:
    """Seconds to grade the answers on both sides, in interleaved repeats.

    Returns:
        summary: one line. sides: the seconds of every repeat, median and spread (max - min, over the median).
        settings: of runs and machine, and the share of right answers.
    """
    return asyncio.run(_bench(settings or GradingSettings(), repeats))


async def _bench(settings: GradingSettings, repeats: int) -> dict[str, JSON]:
    # It warns that it is called without a limit, which is what the baseline measures.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    right: dict[str, list[int]] = {_GRADER: [], _DIRECT: []}
    seeds = {side: count() for side in right}
    grader = MathGrader(timeout_s=settings.timeout_s)

    async def by_grader() -> None:
        pairs = [*answers(settings.answers - settings.hanging, seed=next(seeds[_GRADER]))]
        pairs += [(HANGING, "1")] * settings.hanging
        random.Random(0).shuffle(pairs)
        slots = asyncio.Semaphore(settings.in_flight)

        async def reward(answer: str, label: str) -> RewardParts:
            async with slots:
                return await grader.grade(Task.ask("", "", label), f"Thus \\boxed{{{answer}}}.")

        rewards = await asyncio.gather(*(reward(*pair) for pair in pairs))
        assert sum(reward.parts["grader_timeout"] for reward in rewards) == settings.hanging
        right[_GRADER].append(round(sum(rewards)))

    async def directly() -> None:
        pairs = answers(settings.answers - settings.hanging, seed=next(seeds[_DIRECT]))
        right[_DIRECT].append(sum(_is_equal(*pair) for pair in pairs))

    spent = await timed({_GRADER: by_grader, _DIRECT: directly}, repeats=repeats)
    await release_shared()
    # Else the times would compare different work.
    assert right[_GRADER] == right[_DIRECT], right
    sides = {side: _figures(runs) for side, runs in spent.items()}
    others = settings.answers - settings.hanging
    line = (
        f"{sides[_GRADER]['median_s']:.1f} s for {settings.answers:,} answers of which {settings.hanging} "
        f"hang, against {sides[_DIRECT]['median_s']:.1f} s for the {others:,} others"
    )
    facts: dict[str, JSON] = {
        **asdict(settings),
        "hanging_answer": HANGING,
        "siblings": _SIBLINGS,
        "repeats": repeats,
        "right_share": sum(right[_DIRECT]) / len(right[_DIRECT]) / others,
        "processes": min(os.cpu_count() or 1, 8),
        "math-verify": version("math-verify"),
        "machine": machine(),
    }
    return {"summary": {"grading math": line}, "sides": {**sides}, "settings": facts}


def answers(number: int, *, seed: int) -> Iterator[tuple[str, str]]:
    """Answers and their labels: half of them are right, and none is written as its label is."""
    rng = random.Random(f"answers/{seed}")
    for index in range(number):
        if index % _SIBLINGS == 0:
            make = rng.choice((_integer, _fraction, _decimal, _root, _polynomial, _tuple))
            a, b = rng.randint(2, 999), rng.randint(2, 99)
        label, forms = make(a, b)
        wrong = make(a + 1 + index % 3, b)[1]
        yield rng.choice(forms if rng.random() < 0.5 else wrong), label


def _integer(a: int, b: int) -> tuple[str, list[str]]:
    value = 1000 * a + b
    return f"{value}", [f"{value:,}", f"{value}.0", f"x={value}", f"{value}\\text{{ cm}}", f"\\${value}"]


def _fraction(a: int, b: int) -> tuple[str, list[str]]:
    value = Fraction(a, b)
    over = f"{value.numerator}/{value.denominator}"
    return over, [f"\\frac{{{a}}}{{{b}}}", f"\\dfrac{{{2 * a}}}{{{2 * b}}}", f"\\frac{{{3 * a}}}{{{3 * b}}}"]


def _decimal(a: int, b: int) -> tuple[str, list[str]]:
    hundredths = 100 * a + b
    return f"{a}.{b:02}", [f"\\frac{{{hundredths}}}{{100}}", f"{a}.{b:02}0", f"{hundredths}/100"]


def _root(a: int, b: int) -> tuple[str, list[str]]:
    return f"{a}\\sqrt{{{b}}}", [f"\\sqrt{{{a * a * b}}}", f"\\sqrt{{{b}}} \\cdot {a}"]


def _polynomial(a: int, b: int) -> tuple[str, list[str]]:
    product = f"(x+{a})(x-{b})"
    linear = f"{a - b:+}x" if a != b else ""
    return product, [f"x^2{linear}-{a * b}", f"(x-{b})(x+{a})"]


def _tuple(a: int, b: int) -> tuple[str, list[str]]:
    return f"({a},{b})", [f"({a}, {b})", f"({a}.0, {b})", f"\\left({a},{b}\\right)"]


def _is_equal(answer: str, label: str) -> bool:
    gold = parse(f"\\boxed{{{label}}}", parsing_timeout=None)
    return bool(verify(gold, parse(f"\\boxed{{{answer}}}", parsing_timeout=None), timeout_seconds=None))


def _figures(runs: list[Duration]) -> dict[str, JSON]:
    seconds = [run.wall_s for run in runs]
    median = statistics.median(seconds)
    return {"seconds": [*seconds], "median_s": median, "spread": (max(seconds) - min(seconds)) / median}
