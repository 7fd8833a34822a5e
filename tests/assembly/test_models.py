"""Models that are served beside the policy; the servers are stand-ins."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from pathlib import Path

import httpx2
import pytest

import agentrl
from agentrl.assembly.addresses import with_addresses
from agentrl.assembly.fleet import served_models
from agentrl.assembly.places import local_servers
from agentrl.engine.config import EngineConfig, ServerGroup
from agentrl.errors import ConfigError, UserError
from agentrl.processes.config import ClusterConfig
from tests.engine.sglang_launch.starting import STAND_IN
from tests.flow.runs import TINY
from tests.flow.test_bad_input import torn
from tests.flow.worlds import Bandit
from tests.tools.mcp.watching import alive, servers, until


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(9))))
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "config.json").write_text("{}")


def about(url):
    with urllib.request.urlopen(f"{url}/about", timeout=10) as answer:
        return json.load(answer)


def places_of(config):
    return local_servers(config, ClusterConfig())


def judge(folder, **more):
    return {"hf_checkpoint": str(folder / "judge"), **more}


async def test_they_have_arguments_and_gpus_of_their_own_and_come_back(tmp_path):
    events = []
    config = EngineConfig(
        engine="sglang",
        rollout_num_gpus_per_engine=2,
        sglang_groups=[
            ServerGroup(worker_type="prefill"),
            ServerGroup(worker_type="decode", num_engines=3, num_gpus_per_engine=1),
        ],
        sglang={"disable_cuda_graph": True},
        sglang_python=sys.executable,
        max_context_len=99,
        sglang_models={
            "judge": judge(tmp_path, num_gpus_per_engine=2, sglang={"mem_fraction_static": 0.5}),
            "two": judge(tmp_path, num_engines=2, num_gpus_per_engine=1),
        },
    )
    async with served_models(config, tmp_path / "engine", events.append, places_of(config)) as addresses:
        assert set(addresses) == {"judge", "two"}
        server = about(addresses["judge"])
        arguments = server["arguments"]
        assert server["environment"]["CUDA_VISIBLE_DEVICES"] == "5,6"
        assert (arguments["tp_size"], arguments["mem_fraction_static"]) == (2, 0.5)
        assert arguments["disable_cuda_graph"] is False
        assert arguments["custom_weight_loader"] is None
        assert arguments["context_length"] is None
        workers = httpx2.get(f"{addresses['two']}/workers", trust_env=False).json()["workers"]
        places = [about(worker["url"])["environment"]["CUDA_VISIBLE_DEVICES"] for worker in workers]
        assert sorted(places) == ["7", "8"]
        assert "judge: starting 1 server" in events

        os.kill(server["pids"][0], signal.SIGKILL)
        await until(lambda: any("is back" in sentence for sentence in events))
        assert about(addresses["judge"])["pids"][0] != server["pids"][0]
        below = servers()
    assert not any(map(alive, below))


async def test_their_gpus_are_those_that_the_run_was_given(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-8932f937,6")
    config = EngineConfig(
        engine="sglang",
        rollout_num_gpus_per_engine=1,
        sglang_python=sys.executable,
        sglang_models={"judge": judge(tmp_path, num_gpus_per_engine=2)},
    )
    async with served_models(config, tmp_path / "engine", print, places_of(config)) as addresses:
        assert about(addresses["judge"])["environment"]["CUDA_VISIBLE_DEVICES"] == "GPU-8932f937,6"


def test_too_few_gpus_are_told_of_before_anything_is_started(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    models = {"small": judge(tmp_path), "judge": judge(tmp_path, num_gpus_per_engine=3)}
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES = '4,5' gives this run 2 GPUs, .* need 3"):
        places_of(EngineConfig(sglang_models=models))


class Asking(Bandit):
    """Its tasks are the judge's."""

    def __init__(self, judges=()):
        super().__init__()
        self.judges = judges

    def tasks(self, split):
        assert about(self.judges[0])["arguments"]["mem_fraction_static"] == 0.5
        return super().tasks(split)


@pytest.mark.full
def test_a_run_and_an_evaluation_give_their_addresses_to_the_world(tmp_path):
    models = {"judge": judge(tmp_path, sglang={"mem_fraction_static": 0.5})}
    settings = {"sglang_models": models, "sglang_python": sys.executable}
    asking = {"env": f"{__name__}:Asking", "env_kwargs": {"judges": ["sglang_models.judge"]}}
    few = {**TINY, "num_rollout": 0, "eval_episodes": 2}
    run = agentrl.train(quiet=True, output_dir=str(tmp_path), name="run", **few, **asking, **settings)
    assert run.reports["before"]["greedy"].n == 2
    checkpoint = str(run.folder / "checkpoint-start")
    torn(Path(checkpoint))
    report = agentrl.evaluate(model=checkpoint, n=2, quiet=True, **asking, **settings)
    assert report.n == 2
    assert servers() == set()


def test_names_become_addresses_wherever_they_stand():
    addresses = {"judge": "http://127.0.0.1:1"}
    arguments = {
        "a": "sglang_models.judge",
        "b": [{"c": "sglang_models.judge"}, 1],
        "d": "a judge",
        "e": None,
    }
    resolved = {"a": "http://127.0.0.1:1", "b": [{"c": "http://127.0.0.1:1"}, 1], "d": "a judge", "e": None}
    assert with_addresses(arguments, addresses) == resolved
    with pytest.raises(ConfigError, match=r"serves judge\. Did you mean `judge`\?"):
        with_addresses({"a": ["sglang_models.jugde"]}, addresses)


async def test_where_one_does_not_come_up_none_is_left(tmp_path):
    config = EngineConfig(
        sglang_python=sys.executable,
        sglang_models={"judge": judge(tmp_path), "broken": judge(tmp_path, sglang={"habit": "ends"})},
    )
    with pytest.raises(UserError, match="no room for the weights"):
        async with served_models(config, tmp_path / "engine", print, places_of(config)):
            pass
    assert servers() == set()


async def test_a_folder_without_a_model_is_one_sentence(tmp_path):
    config = EngineConfig(sglang_models={"judge": {"hf_checkpoint": str(tmp_path)}})
    with pytest.raises(ConfigError, match=r"sglang_models\.judge: .* holds no config.json"):
        async with served_models(config, Path("nowhere"), print, places_of(config)):
            pass
