"""An evaluation with its servers on Ray plays what it plays with servers of this machine."""

from __future__ import annotations

import json
import os

import pytest

import agentrl
from agentrl.cli import main
from agentrl.errors import ConfigError
from agentrl.evaluation.config import EvalConfig
from tests.engine.serving import save_tiny, sglang_python
from tests.flow.runs import journal_of
from tests.trainer.megatron.launching import descendants, words_of

PLAYED = {"n": 4, "seed": 3, "temperature": 0.0, "rollout_max_context_len": 256, "split": "test"}
SERVED = {"engine": "sglang", "num_cpus_per_server": 0.5}
ENV = "Calculator-v0"


def texts(folder):
    """The tokens of all episodes, in the order of their tasks."""
    entries = sorted(journal_of(folder), key=lambda entry: entry["episode"]["id"])
    return [
        [turn["tokens"]["completion"]["token_ids"] for turn in trajectory["turns"]]
        for entry in entries
        for trajectory in entry["episode"]["trajectories"]
    ]


@pytest.mark.full
def test_an_evaluation_on_ray_plays_what_servers_of_this_machine_play(tmp_path):
    model = str(save_tiny(tmp_path / "model", context_len=2048))
    served = {"engine": "sglang", "sglang_python": str(sglang_python())}
    reports = {}
    for cluster in ({}, {"cluster": "ray", "num_cpus_per_server": 0.5}):
        folder = tmp_path / ("ray-eval" if cluster else "local-eval")
        reports[folder] = agentrl.evaluate(
            ENV, model, quiet=True, output_dir=str(folder), **served, **PLAYED, **cluster
        )
    (local, here), (on_ray, there) = reports.items()
    assert there.failures == here.failures == {}
    assert there.mean == here.mean
    assert len(texts(local)) == 4
    assert texts(on_ray) == texts(local)
    assert (on_ray / "ray" / "logs" / "raylet.out").exists()
    assert "host='127.0.0.1'" in (on_ray / "engine" / "server-0.log").read_text()
    # The resource tracker of this process's multiprocessing stays, once anything has started it.
    left = {pid: words_of(pid) for pid in descendants(os.getpid())}
    assert not {pid: words for pid, words in left.items() if not any(b"resource_tracker" in w for w in words)}
    # Where its servers are is no part of what an evaluation is: it is finished, and starts nothing.
    again = agentrl.evaluate(ENV, model, quiet=True, output_dir=str(on_ray), resume=True, **served, **PLAYED)
    assert again.as_json() == there.as_json()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"cluster": "ray"}, "cluster has no effect without servers that are started"),
        (
            {"cluster": "ray", **SERVED, "num_cpus_per_rank": 2},
            "num_cpus_per_rank has no effect in an evaluation, which starts servers alone",
        ),
        ({"ray_address": "auto", "engine": "sglang"}, "ray_address has no effect without cluster = ray"),
    ],
)
def test_settings_of_a_cluster_that_an_evaluation_does_not_need_are_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        agentrl.evaluate(ENV, "nowhere", quiet=True, **settings)


def test_a_cluster_without_room_for_the_servers_is_one_sentence(capsys, tmp_path):
    flags = ["--engine", "sglang", "--cluster", "ray", "--num-cpus-per-server", "1000"]
    flags += ["--model", str(save_tiny(tmp_path / "model")), "--output-dir", str(tmp_path / "eval")]
    with pytest.raises(SystemExit) as ended:
        main(["eval", ENV, *flags])
    assert ended.value.code == 2
    assert "it asks for 1000 CPUs, each part of that on one machine" in capsys.readouterr().err


def test_the_settings_of_a_cluster_have_the_names_that_a_run_has(tmp_path):
    config = EvalConfig.model_validate({"engine": {"engine": "sglang"}, "cluster": {"cluster": "ray"}})
    assert json.loads(config.model_dump_json())["cluster"]["cluster"] == "ray"
    assert config.cluster.placement_timeout_s == 300
