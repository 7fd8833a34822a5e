"""Steps of a tool task of several turns of ragged lengths, beside TRL's own loop of tool calls.

tools     whole steps: playing, credit, update, and for ours publishing
success   the same until held-out tasks are solved so often; evaluations, which ours play for both sides, are
          not counted
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

import agentrl
from agentrl.assembly.keywords import TrainSettings
from agentrl.errors import UserError
from agentrl.run.open_run import OpenRun
from agentrl.types import JSON
from benchmarks.compare import rates
from benchmarks.peers.sides import Side
from benchmarks.sections import ResultRow
from benchmarks.trainer.beside_trl import asking, trl_program
from benchmarks.trainer.boxes import HELD_OUT, TEMPLATE
from benchmarks.trainer.boxes_env import MOST_TOKENS, NUM_TASKS, TURN_TOKENS, Boxes, begun, with_form
from benchmarks.trainer.context import OURS, TrainerContext

_TARGET = 3.0
_WARM_START, _INTERVAL, _MOST_STEPS = 300, 5, 100
_SUCCESS = 0.75
_SEEDS = (0, 1, 2)
_LR = 2e-4


class Solved(NamedTuple):
    """When a side solved held-out tasks often enough. share: of them."""

    steps: int
    seconds: float
    share: float


async def bench_tools(context: TrainerContext) -> list[ResultRow]:
    """Whole steps of equally many episodes."""
    bench, model = context.bench, await _model(context)
    async with AsyncExitStack() as stack:
        run = await stack.enter_async_context(
            agentrl.open_run(None, quiet=True, **_settings(context, model, "tools"))
        )
        theirs = await stack.enter_async_context(trl_program(context, **_theirs(model)).started())
        sides = {OURS: lambda: _step(run), "trl": asking(theirs)}
        result = await rates(sides, bench.episodes, "episodes_per_s", repeats=2 * bench.repeats)
    return [context.row("tools", result, _TARGET, unit="episodes/s")]


async def bench_success(context: TrainerContext) -> list[ResultRow]:
    """Seconds of steps until held-out tasks are solved so often, in evaluations after every fifth step."""
    model, found = await _model(context), dict[str, list[Solved]]({OURS: [], "trl": []})
    for seed in _SEEDS:
        for side, solved in ((OURS, _ours_solved), ("trl", _theirs_solved)):
            found[side].append(took := await solved(context, model, seed))
            context.on_event(f"success: seed {seed}, {side}: {took.seconds:.0f} s in {took.steps} steps")
    seconds = {side: median(each.seconds for each in runs) for side, runs in found.items()}
    steps = {side: median(each.steps for each in runs) for side, runs in found.items()}
    ratio = seconds["trl"] / seconds[OURS]
    line = (
        f"{ratio:.2f}x: {seconds[OURS]:.0f} s in {steps[OURS]} steps against {seconds['trl']:.0f} s in "
        f"{steps['trl']}, to {_SUCCESS:.0%} of held-out tasks, target {_TARGET}x"
    )
    context.on_event(f"success: {line}")
    sides: dict[str, JSON] = {side: [each._asdict() for each in runs] for side, runs in found.items()}
    return [ResultRow("success", line, {"ratio": ratio, "target": _TARGET, "sides": sides})]


async def _ours_solved(context: TrainerContext, model: Path, seed: int) -> Solved:
    settings = _settings(context, model, f"success-{seed}", seed=seed)
    async with agentrl.open_run(None, quiet=True, **settings) as run:

        async def solved() -> float:
            return (await run.evaluate())["eval/sampled"]

        return await _until_solved(lambda: _step(run), solved)


async def _theirs_solved(context: TrainerContext, model: Path, seed: int) -> Solved:
    folder = context.folder / f"theirs-{seed}"
    async with trl_program(context, **_theirs(model), seed=seed).started() as theirs:
        return await _until_solved(asking(theirs), lambda: _solved_by(theirs, folder))


async def _until_solved(
    step: Callable[[], Awaitable[None]], solved: Callable[[], Awaitable[float]]
) -> Solved:
    """The steps, and the seconds that they took.

    Raises:
        UserError: it was not reached.
    """
    seconds = share = 0.0
    for number in range(1, _MOST_STEPS + 1):
        began = time.perf_counter()
        await step()
        seconds += time.perf_counter() - began
        if number % _INTERVAL == 0 and (share := await solved()) >= _SUCCESS:
            return Solved(number, seconds, share)
    raise UserError(f"a side solved {share:.0%} after {_MOST_STEPS} steps; nothing can be compared.")


async def _solved_by(side: Side, folder: Path) -> float:
    await side.ask(f"save {folder}")
    report = await agentrl.evaluate_async(
        Boxes,
        folder,
        quiet=True,
        n=len(HELD_OUT),
        temperature=1.0,
        eval_max_response_len=TURN_TOKENS,
        dialect="chat",
        chat_format="qwen3",
        apply_chat_template_kwargs=TEMPLATE,
    )
    return report.mean


async def _step(run: OpenRun) -> None:
    await run.update(await run.credit(await run.play()))
    await run.publish()


async def _model(context: TrainerContext) -> Path:
    """What both sides begin with.

    Raises:
        UserError: no interpreter is named.
    """
    folder = context.folder / "boxes"
    if context.trl is None:
        raise UserError("there is no TRL here; name an interpreter that has trl 1.16, with --trl-python.")
    if (made := folder / "begun" / "checkpoint").exists():
        return made
    threads = context.bench.threads
    return await asyncio.to_thread(begun, folder, context.trl, steps=_WARM_START, threads=threads)


def _settings(context: TrainerContext, model: Path, name: str, *, seed: int = 0) -> TrainSettings:
    bench = context.bench
    settings = TrainSettings(
        env=Boxes,
        hf_checkpoint=str(model),
        output_dir=str(context.folder / "runs"),
        name=name,
        seed=seed,
        warm_start_steps=0,
        num_rollout=_MOST_STEPS,
        rollout_batch_size=bench.prompts,
        n_samples_per_prompt=bench.siblings,
        max_tokens_per_gpu=bench.row_tokens,
        num_threads=bench.threads,
        lr=_LR,
        lr_warmup_iters=0,
        adam_beta2=0.999,
    )
    return with_form(settings)


def _theirs(model: Path) -> dict[str, JSON]:
    return {
        "model": str(model),
        "boxes": True,
        "tasks": NUM_TASKS,
        "turn": TURN_TOKENS,
        "most": MOST_TOKENS,
        "lr": _LR,
    }
