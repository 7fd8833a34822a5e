"""Whether a run trains in bf16 is decided once, by the machine that it begins on, and kept."""

from __future__ import annotations

import pytest
import torch

from agentrl.config import write_toml
from agentrl.engine.config import EngineConfig, ServerGroup
from agentrl.errors import UserError
from agentrl.run.resuming import start_of
from tests.flow.runs import TINY

MEGATRON = {**TINY, "env": "tests.flow.worlds:Bandit", "trainer": "megatron"}


@pytest.fixture
def cards(monkeypatch):
    """Sets how many cards torch sees."""

    def with_cards(number):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(number))))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)

    return with_cards


def begun(tmp_path, **settings):
    chosen = {**MEGATRON, "output_dir": str(tmp_path), **settings}
    return start_of(None, chosen, resume=False).config.trainer.bf16


@pytest.mark.parametrize(
    ("number", "settings", "bf16"),
    [
        (0, {}, False),
        (1, {}, True),
        (1, {"bf16": False}, False),
        (0, {"bf16": True}, True),
        (1, {"trainer": "torch"}, False),
        (1, {"cluster": "ray"}, True),
        (1, {"cluster": "ray", "num_gpus_per_rank": 0}, False),
        (0, {"cluster": "ray", "num_gpus_per_rank": 1}, True),
        (0, {"cluster": "ray", "ray_address": "10.0.0.7:6379"}, True),
    ],
)
def test_it_is_on_where_ranks_get_gpus_unless_it_is_set(tmp_path, cards, number, settings, bf16):
    cards(number)
    assert begun(tmp_path, **settings) is bf16


@pytest.mark.parametrize(
    ("number", "settings", "tokens"),
    [(0, {}, 1024), (1, {}, 8192), (1, {"max_tokens_per_gpu": 300}, 300), (1, {"trainer": "torch"}, 1024)],
)
def test_rows_are_long_where_ranks_get_gpus(tmp_path, cards, number, settings, tokens):
    cards(number)
    chosen = {**MEGATRON, "output_dir": str(tmp_path), **settings}
    assert start_of(None, chosen, resume=False).config.trainer.max_tokens_per_gpu == tokens


@pytest.mark.parametrize("began_with", [0, 1])
def test_a_run_resumes_in_what_it_began_with_whatever_the_machine(tmp_path, cards, began_with):
    settings = {**MEGATRON, "output_dir": str(tmp_path), "name": "x"}
    cards(began_with)
    start = start_of(None, settings, resume=False)
    start.folder.path.mkdir()
    write_toml(start.config, start.folder.config, signed=True)
    (start.folder.path / "metrics.jsonl").write_text("")
    cards(1 - began_with)
    for resumed in (start_of(start.folder.path, {}, resume=True), start_of(None, settings, resume=True)):
        assert resumed.resumes
        assert resumed.config.trainer.bf16 is bool(began_with)
        assert resumed.changes == {}
    with pytest.raises(UserError, match="bf16"):
        start_of(None, {**settings, "bf16": not began_with}, resume=True)


FP32 = {"dtype": "float32"}


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout_num_gpus_per_engine": 1, "sglang": FP32},
        {"sglang_groups": [ServerGroup(), ServerGroup(num_gpus_per_engine=1, sglang=FP32)]},
        {"sglang_groups": [ServerGroup(num_gpus_per_engine=1)], "sglang": {"--dtype": "float"}},
        {"sglang_models": {"judge": {"hf_checkpoint": "x", "num_gpus_per_engine": 1, "sglang": FP32}}},
    ],
)
def test_no_server_of_a_run_is_in_fp32_on_a_gpu(settings):
    with pytest.raises(ValueError, match="cannot compute in float32, since SGLang's CUDA kernels take half"):
        EngineConfig(engine="sglang", **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"sglang": FP32},
        {"rollout_num_gpus_per_engine": 1},
        {"sglang_groups": [ServerGroup(sglang=FP32), ServerGroup(num_gpus_per_engine=1)]},
        {"rollout_num_gpus_per_engine": 1, "sglang": {"dtype": "float16"}},
    ],
)
def test_the_cpu_and_half_precision_are_not_refused(settings):
    EngineConfig(engine="sglang", **settings)
