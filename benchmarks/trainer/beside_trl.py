"""Steps of ours against TRL's `GRPOTrainer`, which runs in an environment of its own.

step     one turn, episodes of one length: sampling, credit and update, and for ours publishing. TRL
         samples by `generate` of transformers, ours by the embedded engine
ragged   the update alone, of the same rows on both sides: long-tailed samples, half of whose tokens a
         tool wrote. TRL gets them in place of what it would sample
"""

from __future__ import annotations

import json
import os
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import agentrl
from agentrl.assembly.keywords import TrainSettings
from agentrl.errors import UserError
from agentrl.types import JSON, Group, Task, TrainBatch
from benchmarks.batches import batch_of
from benchmarks.compare import Side as Step
from benchmarks.compare import rates
from benchmarks.models import vocab_size
from benchmarks.peers.sides import ROOT, Program, Side
from benchmarks.sections import ResultRow
from benchmarks.trainer.context import OURS, TrainerContext
from benchmarks.trainer.settings import long_tailed

_STEPS = 10_000
_PROGRAM = Path(__file__).with_name("on_trl.py")


async def bench_step(context: TrainerContext) -> list[ResultRow]:
    """Whole steps, with sampling."""
    bench = context.bench
    program, settings = trl_program(context), _run_settings(context)
    async with AsyncExitStack() as stack:
        run = await stack.enter_async_context(agentrl.open_run(None, quiet=True, **settings))

        async def step() -> None:
            batch = await run.credit([_drawn(group) for group in await run.play()])
            await run.update(batch)
            await run.publish()

        theirs = await stack.enter_async_context(program.started())
        result = await rates(
            {OURS: step, "trl": asking(theirs)},
            bench.episodes * bench.new,
            "tokens_per_s",
            repeats=bench.repeats,
        )
    return [context.row("step", result, 1.2)]


async def bench_ragged(context: TrainerContext) -> list[ResultRow]:
    """Updates of the same rows."""
    bench = context.bench
    lengths = long_tailed(bench.episodes, bench.longest)
    batch = batch_of(lengths, vocab_size(context.model()))
    rows = context.folder / "rows.json"
    rows.write_text(json.dumps(_rows_of(batch)))
    async with trl_program(context, rows=str(rows)).started() as theirs:
        sides = {OURS: context.updating(batch), "trl": asking(theirs)}
        result = await rates(sides, sum(lengths), "tokens_per_s", repeats=bench.repeats)
    return [context.row("ragged", result, 3.0, lengths=[*lengths])]


def asking(side: Side) -> Step:
    """A step of the other side."""

    async def step() -> None:
        await side.ask("step")

    return step


def trl_program(context: TrainerContext, **more: JSON) -> Program:
    """The other side.

    Raises:
        UserError: no interpreter is named.
    """
    if context.trl is None:
        raise UserError("there is no TRL here; name an interpreter that has trl 1.16, with --trl-python.")
    bench = context.bench
    names = ("threads", "prompts", "siblings", "prompt", "new", "padded")
    settings: dict[str, JSON] = {name: getattr(bench, name) for name in names}
    settings |= {"folder": str(context.folder / "trl"), **more}
    if "model" not in settings:
        settings["model"] = str(context.saved())
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(bench.threads)}
    # It imports this package, and nothing of agentrl's.
    environment["PYTHONPATH"] = str(ROOT)
    log = context.folder / "trl.log"
    return Program("trl", [str(context.trl), str(_PROGRAM)], settings, environment, log)


def _rows_of(batch: TrainBatch) -> list[JSON]:
    """Token ids, the tokens that the loss is over, and how many tokens come before the first of these."""
    return [
        {
            "ids": sample.token_ids.tolist(),
            "mask": sample.loss_mask.astype(int).tolist(),
            "prompt": int(sample.loss_mask.argmax()),
        }
        for sample in batch.samples
    ]


def _run_settings(context: TrainerContext) -> TrainSettings:
    """A run of ours whose step is that of TRL."""
    bench, prompts = context.bench, context.folder / "prompts.jsonl"
    rows = [
        {"input": " ".join(f"t{2 + (7 * number + place) % 1000}" for place in range(bench.prompt))}
        for number in range(bench.prompts)
    ]
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return TrainSettings(
        hf_checkpoint=str(context.saved()),
        output_dir=str(context.folder / "runs"),
        env="SingleTurn-v0",
        prompt_data=str(prompts),
        input_key="input",
        reward="benchmarks.trainer.beside_trl:nothing",
        warm_start_steps=0,
        num_rollout=_STEPS,
        rollout_batch_size=bench.prompts,
        n_samples_per_prompt=bench.siblings,
        rollout_max_response_len=bench.new,
        max_tokens_per_gpu=bench.row_tokens,
        num_threads=bench.threads,
        lr=1e-5,
    )


def nothing(_task: Task, _answer: str) -> float:
    """The reward of the run, whose answers are all cut off; `_drawn` replaces it."""
    return 0.0


def _drawn(group: Group) -> Group:
    """As on the other side, as good as random: siblings differ, and none is left out of the update."""
    scored = (replace(v, total=float(crc32(v.episode_id.encode()) % 5)) for v in group.verdicts)
    return replace(group, verdicts=tuple(scored))
