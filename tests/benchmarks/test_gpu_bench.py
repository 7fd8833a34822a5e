"""The benchmark of GPUs, at tiny shapes on the CPU: equal work on all sides, and what became worse."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.engine.config import EngineConfig
from benchmarks.__main__ import main
from benchmarks.batches import batch_of
from benchmarks.gpu import baselines, everything, transports
from benchmarks.gpu.job import Turn
from benchmarks.gpu.kernels import kernels_of
from benchmarks.gpu.peer import Peer
from benchmarks.gpu.plan import Options, common_spec, entries
from benchmarks.gpu.shapes import SHAPES, lengths_of, model_folder, shape_of, work_of
from benchmarks.gpu.variants import parsed
from tests.house.source import ROOT

GIB = 1 << 30


def test_a_variant_sets_the_fields_that_it_names():
    variant = parsed('4B:rows=4096,recompute=none,megatron_config={"a":1,"b":2},samples=3,weight_decay=0.1')
    assert (variant.shape, variant.side) == ("4B", "megatron")
    assert variant.trainer == {"max_tokens_per_gpu": 4096, "weight_decay": 0.1}
    assert variant.layout == {"recompute_granularity": None, "megatron_config": {"a": 1, "b": 2}}
    assert variant.number("samples", 64) == 3
    assert parsed("0.6B:transformers,rows=512").name == "0.6B transformers rows=512"
    assert parsed("0.6B:kernels").name == parsed("0.6B").name == "0.6B megatron"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainers", "0.7B"], "no shape `0.7B`; there are 0.6B, 1.7B, 4B"),
        (["--trainers", "0.6B:rosw=3"], "mean `rows`"),
        (["--trainers", "0.6B:transfomers"], "mean `transformers`"),
        (["--parts", "trainer"], "mean `trainers`"),
        (["--sglang", "dtype"], "write --sglang dtype=VALUE"),
        (["--episodes", "4"], "at least 8"),
        (["--parts", "hw"], "torch sees no GPU here"),
        (["--tiny", "--compare", "missing.json"], "holds no figures of a card"),
    ],
)
def test_a_mistake_is_a_one_line_error(capsys, monkeypatch, arguments, message):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit) as exited:
        main(["gpu", *arguments])
    assert exited.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_the_most_valuable_parts_come_first_and_the_large_shapes_last(tmp_path):
    options = Options()
    names = [entry.spec.name for entry in entries(options, common_spec(options, tmp_path))]
    assert names[:2] == ["trainers 0.6B:kernels", "trainers 0.6B:transformers"]
    rest = [name for name in names if not name.startswith("trainers 0.6B")]
    assert rest[:5] == ["transports", "generator", "runs", "agree", "layer"]
    assert [name.split(":")[0] for name in rest[5:]] == ["trainers 1.7B"] * 2 + ["trainers 4B"] * 2


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_layers_are_left_out_where_the_states_do_not_fit(shape):
    config = shape.config(4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert shape.parameters(4) == pytest.approx(counted, rel=1e-3)
    assert shape.fitting_layers(140 * GIB, 1) == shape.layers
    few = shape.fitting_layers(8 * GIB, 1)
    assert few == 4 or shape.parameters(few) * 18 < 8 * GIB
    assert work_of(SHAPES["4B"], 79 * GIB, 1, tiny=False).layers < 36
    assert work_of(SHAPES["4B"], 79 * GIB, 8, tiny=False).layers == 36


def test_the_baseline_computes_what_transformers_computes_for_each_sample_alone(tmp_path):
    shape = shape_of("0.6B", tiny=True)
    folder = model_folder(tmp_path, shape, "cpu")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # A model that has learned nothing hardly looks at what came before.
            parameter.mul_(1.0 if "norm" in name else 8.0)
    model.save_pretrained(folder)
    batch = batch_of(lengths_of(6, tiny=True), shape.vocab)
    peer = Peer(folder, batch, 128, "cpu", recompute=False)
    apart = []
    for row, logprobs in zip(peer.rows, peer.score(), strict=True):
        for member, positions, packed in zip(
            row.members, row.positions, row.split(logprobs.numpy()), strict=True
        ):
            ids = torch.from_numpy(batch.samples[member].token_ids.astype(np.int64))
            with torch.no_grad():
                alone = torch.log_softmax(model(ids[None]).logits[0, :-1].float(), -1)
            expected = alone.gather(1, ids[1:, None])[:, 0].numpy()[positions - 1]
            apart.append(np.abs(packed - expected))
    assert np.concatenate(apart).mean() < 0.05
    assert len(peer.rows) > 1


def test_the_baseline_learns(tmp_path):
    shape = shape_of("0.6B", tiny=True)
    batch = batch_of((24, 17), shape.vocab)
    peer = Peer(model_folder(tmp_path, shape, "cpu"), batch, 64, "cpu", recompute=True)
    before = torch.cat(peer.score())
    assert all(peer.update() > 0 for _ in range(3))
    assert not torch.equal(before, torch.cat(peer.score()))


def test_kernels_are_added_up_by_name_and_by_what_they_do():
    def event(name: str, at: float, us: float, category: str = "kernel"):
        return {"cat": category, "name": name, "ts": at, "dur": us, "ph": "X"}

    events = [
        event("sm90_gemm_bf16", 0, 3000),
        event("sm90_gemm_bf16", 5000, 1000),
        event("flash_fwd_kernel", 3000, 1500),
        event("Memcpy DtoH", 9000, 500, "gpu_memcpy"),
        event("aten::mm", 0, 9e6, "cpu_op"),
        {"cat": "ac2g", "name": "x", "ts": 1},
    ]
    kernels = kernels_of(events, 1.0)
    assert [(*total,) for total in kernels.longest] == [
        ("sm90_gemm_bf16", 2, 4.0),
        ("flash_fwd_kernel", 1, 1.5),
        ("Memcpy DtoH", 1, 0.5),
    ]
    assert {total.name: total.ms for total in kernels.kinds} == {
        "matmul": 4.0,
        "attention": 1.5,
        "copies": 0.5,
    }
    assert (kernels.launches, kernels.busy_ms, kernels.wall_ms) == (4, 6.0, 9.5)


def test_every_transport_that_a_run_may_choose_is_measured():
    names = transports.names()
    assert {"tensor", "distributed", "disk", "delta"} <= set(names)
    for name in names:
        EngineConfig.model_validate(
            {"engine": "sglang", "sglang_url": "http://127.0.0.1:1", "update_weights_transport": name}
        )


def test_figures_that_became_worse_by_more_than_5_percent_are_named(tmp_path):
    path = tmp_path / "card.json"
    baselines.save(path, "Card", {"a: tokens_per_s": 100.0, "b: step_s": 2.0, "c: ratio": 1.0}, {})
    best = baselines.read(path)
    figures = {"a: tokens_per_s": 94.0, "b: step_s": 2.2, "c: ratio": 0.96, "d: new": 1.0}
    assert [figure.name for figure in baselines.worse(figures, best)] == ["a: tokens_per_s", "b: step_s"]
    better = {"a: tokens_per_s": 110.0, "b: step_s": 1.5, "c: ratio": 0.5}
    assert baselines.worse({**better, "c: ratio": 0.951}, best) == []
    baselines.save(path, "Card", better, {})
    assert baselines.read(path) == {"a: tokens_per_s": 110.0, "b: step_s": 1.5, "c: ratio": 1.0}
    assert baselines.file_of("NVIDIA H100 80GB HBM3").name == "nvidia-h100-80gb-hbm3.json"


class _Job:
    """A job that ends as soon as its turn comes; one of trainers asks for quiet first."""

    turns: list[tuple[str, Turn]]
    starts_s = 0.05

    def __init__(self, spec, on_row, on_note, quiet):
        self.spec, self._quiet = spec, quiet
        self.facts, self.error, self.told, self._over = {}, "", asyncio.Event(), asyncio.Event()
        self.is_started = self.is_running = False

    async def start(self):
        self.is_started = True

    def give(self, turn):
        self.turns.append((self.spec.name, turn))
        self._work = asyncio.create_task(self._run())

    async def _run(self):
        if self.spec.kind == "hw":
            self.facts = {"card": "Card", "memory": 7, "cards": 1, "matmul": 1.0, "copy": 1.0}
        elif self.spec.kind == "server":
            await asyncio.sleep(self.starts_s)
            self.facts = {"url": "http://127.0.0.1:1"}
            self.turns.append((f"{self.spec.name} is up", Turn(0)))
        elif self.spec.kind == "trainers":
            await self._quiet()
        self.told.set()
        self._over.set()
        self.turns.append((f"{self.spec.name} ended", Turn(0)))

    async def finished(self):
        await self._over.wait()

    async def ended(self, within_s):
        await asyncio.wait_for(self._over.wait(), within_s)

    async def stop(self, within_s=0):
        pass

    async def kill(self):
        pass


async def test_nothing_is_timed_while_a_server_starts_and_every_job_knows_the_card(monkeypatch, tmp_path):
    monkeypatch.setattr(everything, "Child", _Job)
    monkeypatch.setattr(_Job, "turns", [], raising=False)
    options = Options(tiny=True, python="python", parts=("trainers", "agree"), variants=("0.6B",), seconds=60)
    common = common_spec(options, tmp_path)
    bench = everything.Bench(options, common, lambda row: None, lambda note: None)
    await bench.run(entries(options, common))
    names = [name for name, _ in _Job.turns if name != "server 0.6B ended"]
    assert (
        names.index("trainers 0.6B") < names.index("server 0.6B is up") < names.index("trainers 0.6B ended")
    )
    assert names[-2:] == ["agree", "agree ended"]
    turns = dict(_Job.turns)
    assert [turns[name].memory for name in ("server 0.6B", "trainers 0.6B", "agree")] == [7, 7, 7]
    assert turns["agree"].urls == {"0.6B": "http://127.0.0.1:1"}
    assert (bench.failed, bench.left_out) == ([], [])


@pytest.mark.full
def test_trainers_at_tiny_shapes_in_processes_of_their_own(tmp_path):
    """Each row is a line as soon as it is known; one that is worse than the best makes the exit code 1."""
    best = tmp_path / "best.json"
    name = "trainers, 0.6B megatron update: tokens_per_s"
    baselines.save(best, "a faster card", {name: 1e12}, {})
    command = [sys.executable, "-m", "benchmarks", "gpu", "--tiny", "--parts", "trainers", "--json"]
    variants = ["--trainers", "0.6B:kernels 0.6B:transformers 0.6B:torch", "--trainers", "0.6B:rows=64"]
    done = subprocess.run(
        [*command, *variants, "--compare", str(best), "--folder", str(tmp_path / "bench")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    *rows, result = map(json.loads, done.stdout.splitlines())
    assert rows == result["rows"], done.stderr
    assert (result["failed"], result["left_out"]) == ([], [])
    by_name = {row["name"]: row for row in rows}
    sides = ("megatron", "transformers", "torch", "megatron rows=64")
    assert set(by_name) == {"hw", "0.6B megatron kernels"} | {
        f"0.6B {side} {work}" for side in sides for work in ("update", "score")
    }
    updates = [by_name[f"0.6B {side} update"] for side in sides]
    assert len({(row["tokens"], row["loss_tokens"]) for row in updates}) == 1
    norms = [row["grad_norm"] for row in updates]
    # transformers computes in bf16, and takes its own logprobs for those before the update.
    assert norms[1] == pytest.approx(norms[0], rel=0.1)
    assert norms[2:] == pytest.approx([norms[0]] * 2, rel=1e-3)
    assert by_name["0.6B megatron kernels"]["launches"] > 100
    assert result["worse"] == [f"{name}: {updates[0]['tokens_per_s']:.4g}, the best is 1e+12"]
    assert done.returncode == 1


@pytest.mark.full
def test_a_layer_of_a_mixture_at_a_tiny_shape(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "gpu", "--tiny", "--parts", "layer", "--json"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    *rows, result = map(json.loads, done.stdout.splitlines())
    assert (done.returncode, result["failed"]) == (0, []), done.stderr
    forward, both = rows[1:]
    assert [row["name"] for row in (forward, both)] == [
        "30B-A3B layer forward",
        "30B-A3B layer forward and backward",
    ]
    # Attention has 4 heads twice and 2 twice, of 16 each; two of eight experts have 3 matrices each. Of 192
    # tokens 96 are predicted, and sequences of 48 have 48 x 49 / 2 pairs.
    matrices = 64 * 16 * 12 + 64 * 8 + 2 * 3 * 64 * 32
    flops = 2 * (192 * matrices + 96 * 64 * 2048 + 4 * (48 * 49 / 2) * 4 * 32)
    assert forward["model_tflops"] * 1e12 * forward["seconds"]["median"] == pytest.approx(flops)
    assert both["model_tflops"] * 1e12 * both["seconds"]["median"] == pytest.approx(3 * flops)


@pytest.mark.full
def test_whole_runs_with_the_embedded_engine(tmp_path):
    """Without SGLang the parts that need it are left out, in a sentence, and runs sample on the CPU."""
    command = [sys.executable, "-m", "benchmarks", "gpu", "--tiny", "--parts", "runs,agree", "--json"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    *rows, result = map(json.loads, done.stdout.splitlines())
    assert (done.returncode, result["failed"]) == (0, []), done.stderr
    assert {row["name"] for row in rows} == {"hw", "side by side", "colocated", "asynchronous"}
    for row in rows[1:]:
        assert sum(row["spent_s"].values()) > 0
        assert row["step_s"]["median"] > 0
    assert result["left_out"] == ["agree: no SGLang: name its interpreter with --sglang-python"]
    assert not list(Path(tmp_path).glob("server-*"))
