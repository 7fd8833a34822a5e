"""Updates and scores of one variant of a trainer: tokens/s, share of the matrix rate, memory, kernels."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

from agentrl.errors import TrainerError
from agentrl.trainer.batch import micro_batches
from agentrl.trainer.ranks import RankTrainer
from agentrl.types import JSON, TrainBatch
from agentrl.weights.hf.source import Operations
from benchmarks.batches import batch_of
from benchmarks.gpu import card
from benchmarks.gpu.job import Bench, Turn
from benchmarks.gpu.kernels import record_update
from benchmarks.gpu.ranks import Ranks, is_out_of_memory
from benchmarks.gpu.shapes import Shape, Work, lengths_of, model_folder, shape_of, work_of
from benchmarks.gpu.timing import repeated, seconds_of
from benchmarks.gpu.variants import Variant, parsed

_FORWARD_AND_BACKWARD = 3
_GIB = 1 << 30
_TORCH_ROWS = 4096
_LEAST_ROWS = 2048
_OF_TIME = 0.6
"""The share of the time left that updates may take; scores get the rest."""
_PROFILED = 8


@dataclass(frozen=True, slots=True)
class Load:
    """What a trainer gets, and where its figures go.

    rows: tokens of a micro-batch. ranks: processes with a card each. facts: of the row.
    """

    bench: Bench
    turn: Turn
    variant: Variant
    shape: Shape
    work: Work
    rows: int
    ranks: int
    base: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of the samples (tokens)."""
        count = self.variant.number("samples", self.work.samples * self.ranks)
        return lengths_of(count, tiny=self.bench.spec.tiny)

    @property
    def batch(self) -> TrainBatch:
        """Random tokens; the second half of every sample is trained on."""
        return batch_of(self.lengths, self.shape.vocab)

    @property
    def model(self) -> Path:
        """The directory of the model; made where there is none."""
        return model_folder(self.bench.folder, self.shape, self.bench.spec.device, self.work.layers)

    def report(self, what: str, tokens_per_s: float, passes: int, line: str, facts: dict[str, JSON]) -> None:
        """Report a rate. passes: 1 forward; a backward pass counts as two more."""
        batch, lengths = self.batch, self.lengths
        operations = Operations.of(self.shape.config(self.work.layers))
        flops = 0.0 if operations is None else operations.forward(lengths, batch.num_loss_tokens)
        per_s = passes * flops / sum(lengths) * tokens_per_s
        share = per_s / (self.turn.matmul * self.ranks) if self.turn.matmul else 0.0
        memory = (card.used() - self.base) / _GIB
        cut = "" if self.work.layers == self.shape.layers else f", {self.work.layers} of its layers"
        text = f"{tokens_per_s:,.0f} tokens/s, {share:.1%} of the matrix rate, {memory:.1f} GiB{cut} ({line})"
        figures: dict[str, JSON] = {
            "shape": self.shape.name,
            "layers": self.work.layers,
            "rows": self.rows,
            "ranks": self.ranks,
            "samples": len(lengths),
            "tokens": sum(lengths),
            "loss_tokens": batch.num_loss_tokens,
            "tokens_per_s": tokens_per_s,
            "model_tflops": per_s / 1e12,
            "of_matmul": share,
            "memory_gib": memory,
        }
        best = {"tokens_per_s": tokens_per_s}
        if what == "update":
            best["memory_gib"] = memory
        self.bench.row(f"{self.variant.name} {what}", text, {**figures, **facts}, best)


async def run(bench: Bench) -> None:
    """The rows of one variant."""
    variant = parsed(bench.spec.argument)
    num_ranks = variant.number("ranks", bench.spec.ranks or max(card.cards(), 1))
    ranks = Ranks(num_ranks, bench.folder) if variant.side == "megatron" else None
    if variant.side != "megatron":
        # Imported before the turn; the other sides do without it.
        import_module("benchmarks.gpu.peer")
    turn = bench.turn()
    shape = shape_of(variant.shape, tiny=bench.spec.tiny)
    num_ranks = num_ranks if ranks else 1
    work = work_of(shape, turn.memory, num_ranks, tiny=bench.spec.tiny)
    layers = variant.number("layers", work.layers)
    work = Work(work.samples, work.rows, work.recompute, layers)
    rows = variant.trainer.get("max_tokens_per_gpu", work.rows)
    assert isinstance(rows, int), "the settings of a trainer are checked before"
    load = partial(Load, bench, turn, variant, shape, work, ranks=num_ranks, base=card.used())
    if ranks is not None:
        await _megatron(load, rows, ranks)
    elif variant.side == "torch":
        is_given = "max_tokens_per_gpu" in variant.trainer
        await _torch(load(rows=rows if is_given else min(rows, _TORCH_ROWS)))
    else:
        await _transformers(load(rows=rows))


async def _megatron(load: Callable[..., Load], rows: int, ranks: Ranks) -> None:
    """Half the rows wherever they do not fit, unless the variant names them."""
    current = load(rows=rows)
    try:
        await _megatron_rows(current, ranks)
    except TrainerError as error:
        is_given = "max_tokens_per_gpu" in current.variant.trainer
        if is_given or rows <= _LEAST_ROWS or not is_out_of_memory(error, ranks):
            raise
        current.bench.note(f"rows of {rows} tokens do not fit; half of them now")
        await _megatron(load, rows // 2, Ranks(ranks.count, current.bench.folder))


async def _megatron_rows(load: Load, ranks: Ranks) -> None:
    variant, recompute = load.variant, "full" if load.work.recompute else None
    layout: dict[str, JSON] = {"recompute_granularity": recompute, **variant.layout}
    training = ranks.training(
        load.model,
        rows=load.rows,
        bf16=load.bench.spec.device == "cuda",
        layout=layout,
        trainer={name: value for name, value in variant.trainer.items() if name != "max_tokens_per_gpu"},
    )
    async with training as trainer:
        facts: dict[str, JSON] = {"attention": ranks.attention, **layout, **variant.trainer}
        if variant.own.get("kernels"):
            await _kernels(load, trainer)
        await _timed_trainer(load, trainer, facts)


async def _transformers(load: Load) -> None:
    from benchmarks.gpu.peer import Peer

    given = load.variant.layout.get("recompute_granularity", load.work.recompute)
    peer = Peer(load.model, load.batch, load.rows, load.bench.spec.device, recompute=bool(given))

    async def update() -> float:
        return peer.update()

    async def score() -> None:
        peer.score()

    await _timed(load, update, score, {"attention": peer.attention, "recompute": bool(given)})


async def _torch(load: Load) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from agentrl.losses import PolicyLoss
    from agentrl.trainer.config import TrainerConfig
    from agentrl.trainer.torch import TorchTrainer
    from benchmarks.gpu.shapes import tokenizer

    model = AutoModelForCausalLM.from_pretrained(load.model, trust_remote_code=False, dtype=torch.float32)
    torch.nn.Module.to(model, load.bench.spec.device)
    settings = {**load.variant.trainer, "max_tokens_per_gpu": load.rows}
    config = TrainerConfig.model_validate({"lr": 1e-6, "bf16": load.bench.spec.device == "cuda", **settings})
    trainer = TorchTrainer(model, PolicyLoss(), config, tokenizer=tokenizer(), total_steps=1_000_000)
    await _timed_trainer(load, trainer, {**load.variant.trainer})


async def _timed_trainer(load: Load, trainer: RankTrainer, facts: dict[str, JSON]) -> None:
    batch = load.batch

    async def update() -> float:
        return (await trainer.update(batch)).metrics["train/grad_norm"]

    async def score() -> None:
        await trainer.score(batch.samples, ("old",))

    await _timed(load, update, score, facts)


async def _timed(
    load: Load,
    work: Callable[[], Awaitable[float]],
    score: Callable[[], Awaitable[None]],
    facts: dict[str, JSON],
) -> None:
    """The rows of an update and of a score. work: one update; the norm of its gradient."""
    bench, num_tokens = load.bench, sum(load.lengths)
    norms: list[float] = []

    async def update() -> None:
        norms.append(await work())

    first_s = await seconds_of(update)
    bench.quiet()
    updates = await repeated(update, bench.left_s * _OF_TIME, first_s=first_s)
    shown = {**facts, **updates.figures(), "grad_norm": norms[-1]}
    load.report("update", num_tokens / updates.median, _FORWARD_AND_BACKWARD, f"{updates}", shown)
    scores = await repeated(score, bench.left_s * _OF_TIME)
    load.report("score", num_tokens / scores.median, 1, f"{scores}", {**facts, **scores.figures()})


async def _kernels(load: Load, trainer: RankTrainer) -> None:
    """The kernels of one update of an eighth of the batch: a trace of all of it takes minutes to write."""
    samples = max(len(load.lengths) // _PROFILED, 2)
    batch = batch_of(load.lengths[:samples], load.shape.vocab)
    rows = micro_batches(batch.samples, [sample.loss_mask for sample in batch.samples], load.rows)
    update: Callable[[], Awaitable[object]] = partial(trainer.update, batch)
    await update()
    kernels = await record_update(trainer, update, load.bench.folder)
    passes = len(rows) * load.work.layers
    figures: dict[str, JSON] = {"samples": samples, "rows": len(rows), **kernels.figures()}
    per_layer = kernels.launches / passes
    line = f"{kernels}; {per_layer:.0f} launches a layer and row"
    best = {"launches_per_layer_less": per_layer}
    load.bench.row(f"{load.variant.name} kernels", line, {**figures, "launches_per_layer": per_layer}, best)
