"""Servers compute on the GPUs that the run was given, and on no one else's."""

from __future__ import annotations

import sys

import pytest

from agentrl.assembly.fleet import FleetPlan
from agentrl.engine.config import EngineConfig, ServerGroup
from agentrl.errors import ConfigError
from agentrl.gpus import own_gpus

UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"


@pytest.mark.parametrize(
    ("visible", "first", "gpus"),
    [
        (None, 0, ["0", "1"]),
        (None, 5, ["5", "6"]),
        ("4,5", 0, ["4", "5"]),
        ("7,3,5", 1, ["3", "5"]),
        (f" {UUID} , 3\t, MIG-1 ", 0, [UUID, "3"]),
        (f" {UUID} , 3\t, MIG-1 ", 1, ["3", "MIG-1"]),
    ],
)
def test_they_are_named_as_the_run_was_told(monkeypatch, visible, first, gpus):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert own_gpus(first, 2) == gpus
    assert own_gpus(first + 90, 0) == []


@pytest.mark.parametrize(
    ("visible", "first", "count"),
    [
        ("", 0, 0),
        ("  ", 0, 0),
        ("-1", 0, 0),
        ("NoDevFiles", 0, 0),
        ("-1,0,1", 0, 0),
        ("4", 0, 1),
        ("4,-1,5", 0, 1),
        ("4,,5", 0, 1),
        ("4,5", 1, 2),
        ("4,5", 9, 2),
    ],
)
def test_too_few_are_one_sentence(monkeypatch, visible, first, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError) as error:
        own_gpus(first, 2)
    assert f"CUDA_VISIBLE_DEVICES = {visible!r} gives this run {count} GPUs" in str(error.value)
    assert f"need {first + 2}; name more there, or lower rollout_num_gpus_per_engine" in str(error.value)
    assert own_gpus(first, 0) == []


async def test_groups_share_them_out_in_order(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    groups = [ServerGroup(num_gpus_per_engine=1), ServerGroup(), ServerGroup(num_gpus_per_engine=2)]
    config = EngineConfig(engine="sglang", sglang_groups=groups, sglang_python=sys.executable)
    plan = FleetPlan(model=tmp_path, config=config, folder=tmp_path, on_event=print)
    assert [list(group.gpus) for group in plan._groups()] == [["4"], [], ["5", "6"]]
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        await FleetPlan(model=tmp_path, config=config, folder=tmp_path, on_event=print, first_gpu=2).start()
