"""The GPUs of this machine, and who of a run has which of them: each is handed out once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from agentrl.assembly.cluster import POLICY, fleet_of_model, run_layout
from agentrl.assembly.fleet import FleetPlan, ServedAdapters
from agentrl.assembly.load import load_config
from agentrl.assembly.places import local_places, local_servers, peak_of_ranks
from agentrl.assembly.trainer import check_device
from agentrl.cli.recipes import FOLDER
from agentrl.engine.config import EngineConfig, ServerGroup
from agentrl.engine.sglang.launch.launcher import ServerReplica
from agentrl.errors import ConfigError
from agentrl.processes.children import Children
from agentrl.processes.config import ClusterConfig
from agentrl.processes.gpus import Gpu, bf16_peak, num_gpus, own_gpus, present_gpus
from agentrl.trainer.launch.processes import Processes
from agentrl.trainer.torch.plan import WORKER
from tests.cards import H200_MIB, uuid_of, with_cards
from tests.environ import environment_of

UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
VARIABLE = "CUDA_VISIBLE_DEVICES"
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ("4,5", ["4", "5"]),
        ("7,3,5", ["7", "3", "5"]),
        (f" {UUID} , 3\t, MIG-1 ", [UUID, "3", "MIG-1"]),
        ("", []),
        ("  ", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("-1,0,1", []),
        ("4,-1,5", ["4"]),
        ("4,,5", ["4"]),
    ],
)
def test_they_are_named_as_the_run_was_told(monkeypatch, visible, gpus):
    monkeypatch.setenv(VARIABLE, visible)
    assert own_gpus() == gpus


@pytest.mark.parametrize(
    ("visible", "ids"),
    [
        (None, ["0", "1", "2"]),
        ("2,0", ["2", "0"]),
        (f"{uuid_of(1)[:14]},0", [uuid_of(1)[:14], "0"]),
        ("", []),
        ("7", []),
    ],
)
def test_their_names_and_memory_are_the_drivers_and_cuda_stays_as_it_was(monkeypatch, tmp_path, visible, ids):
    monkeypatch.setenv("PATH", with_cards(tmp_path / "bin", 3))
    monkeypatch.delenv(VARIABLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(VARIABLE, visible)
    assert present_gpus() == [Gpu(name, "NVIDIA H200", H200_MIB << 20) for name in ids]
    assert not torch.cuda.is_initialized()


def test_a_driver_that_says_nothing_is_no_gpu(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    path = with_cards(tmp_path / "bin", 0)
    monkeypatch.setenv("PATH", path)
    assert (present_gpus(), own_gpus()) == ([], [])
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho 'Failed to initialize NVML'\nexit 9\n")
    monkeypatch.setenv("PATH", f"{path}:")
    assert (present_gpus(), own_gpus(), num_gpus()) == ([], [], 0)


def placed(monkeypatch, gpus, **settings):
    """The places of a run on a machine with so many GPUs, of which torch sees all."""
    monkeypatch.setenv(VARIABLE, ",".join(map(str, range(gpus))))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    defaults = {"trainer": "megatron", "engine": "sglang", "rollout_num_gpus_per_engine": 1}
    return local_places(load_config(None, {**defaults, **settings}))


def test_ranks_and_servers_have_gpus_of_their_own_while_they_last(monkeypatch):
    settings = {"actor_num_gpus_per_node": 2, "rollout_num_engines": 2, "rollout_num_gpus_per_engine": 2}
    places = placed(monkeypatch, 8, **settings)
    assert places.gpus.ranks == (("0",), ("1",))
    assert places.fleets[POLICY] == (("2", "3"), ("4", "5"))
    assert places.notice is None


def test_on_the_only_card_ranks_and_servers_are_together_and_it_is_said(monkeypatch):
    places = placed(monkeypatch, 1)
    assert (places.gpus.ranks, places.fleets[POLICY]) == ((("0",),), (("0",),))
    assert places.notice.startswith("Ranks and servers share GPU 0: there are too few for both.")


def test_where_there_are_too_few_for_both_as_few_as_possible_are_shared(monkeypatch):
    places = placed(monkeypatch, 6, actor_num_gpus_per_node=4, rollout_num_engines=4)
    assert places.gpus.ranks == (("0",), ("1",), ("2",), ("3",))
    assert places.fleets[POLICY] == (("2",), ("3",), ("4",), ("5",))
    assert "share GPU 2, 3:" in places.notice


def test_in_turns_they_have_the_same_on_purpose(monkeypatch):
    places = placed(monkeypatch, 8, actor_num_gpus_per_node=2, rollout_num_engines=2, colocate=True)
    assert places.gpus.ranks == places.fleets[POLICY] == (("0",), ("1",))
    assert places.notice is None


def test_an_engine_of_evaluations_and_further_models_have_their_own(monkeypatch, tmp_path):
    places = placed(
        monkeypatch,
        5,
        max_staleness=1,
        correction="tis",
        async_eval=True,
        eval_engine="own",
        sglang_models={"judge": {"hf_checkpoint": str(tmp_path), "num_gpus_per_engine": 2}},
    )
    fleets = {POLICY: (("1",),), fleet_of_model("judge"): (("2", "3"),), "evaluations": (("4",),)}
    assert (places.gpus.ranks, places.fleets) == ((("0",),), fleets)


def test_the_torch_trainer_leaves_all_to_servers(monkeypatch):
    places = placed(monkeypatch, 1, trainer="torch")
    assert (places.gpus.ranks, places.fleets[POLICY], places.notice) == (((),), (("0",),), None)


def test_the_torch_trainer_has_a_gpu_of_its_own_where_it_is_to_compute_on_one(monkeypatch, tmp_path):
    places = placed(monkeypatch, 2, trainer="torch", device="cuda")
    assert (places.gpus.ranks, places.fleets[POLICY], places.notice) == ((("0",),), (("1",),), None)
    shared = placed(monkeypatch, 1, trainer="torch", device="cuda")
    assert (shared.gpus.ranks, shared.fleets[POLICY]) == ((("0",),), (("0",),))
    assert shared.notice.startswith("Ranks and servers share GPU 0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="and device = cuda needs one; take a machine with a GPU, or drop"):
        check_device(load_config(None, {"device": "cuda"}))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    beside_embedded = local_places(load_config(None, {"device": "cuda"}))
    assert beside_embedded.gpus.ranks == (("0",),)


@pytest.mark.parametrize(
    ("visible", "sentence"),
    [
        (
            "4",
            r"CUDA_VISIBLE_DEVICES = '4' gives this run 1 GPU, and its servers need 3; have more, or lower",
        ),
        (
            "",
            r"CUDA_VISIBLE_DEVICES = '' gives this run no GPUs, and its servers need 3; have more, or lower",
        ),
        (None, r"this machine has 2 GPUs, and its servers need 3; have more, or lower rollout_num_gpus_per"),
    ],
)
def test_too_few_for_the_servers_are_one_sentence(monkeypatch, tmp_path, visible, sentence):
    monkeypatch.setenv("PATH", with_cards(tmp_path / "bin", 2))
    monkeypatch.delenv(VARIABLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(VARIABLE, visible)
    groups = [ServerGroup(num_gpus_per_engine=1), ServerGroup(), ServerGroup(num_gpus_per_engine=2)]
    with pytest.raises(ConfigError, match=sentence):
        local_servers(EngineConfig(engine="sglang", sglang_groups=groups), ClusterConfig())


def test_groups_share_them_out_in_order(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, "7,4,6,5")
    groups = [ServerGroup(num_gpus_per_engine=1), ServerGroup(), ServerGroup(num_gpus_per_engine=2)]
    config = EngineConfig(engine="sglang", sglang_groups=groups, sglang_python=sys.executable)
    launcher = local_servers(config, ClusterConfig()).launcher(POLICY)
    plan = FleetPlan(model=tmp_path, config=config, folder=tmp_path, on_event=print, launcher=launcher)
    replicas = [group for group in plan._groups(tmp_path) for _ in range(group.count)]
    servers = launcher.servers([ServerReplica("server", group.settings, ()) for group in replicas])
    assert [server.gpus for server in servers] == [("7",), (), ("4", "6")]


def test_a_rank_sees_its_own_and_no_other(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, "4,5,6,7")
    ranks = Processes(2, tmp_path, preloaded=WORKER, places=Children((("6",), ("5",))))
    try:
        environments = [environment_of(pid) for pid in ranks.pids]
    finally:
        ranks.close()
    seen = [[line for line in lines if line.startswith(VARIABLE)] for lines in environments]
    assert seen == [["CUDA_VISIBLE_DEVICES=6"], ["CUDA_VISIBLE_DEVICES=5"]]


EIGHT = [(str(number),) for number in range(8)]
AS_THE_HEADER_SAYS = {
    **dict.fromkeys(
        ("one_gpu/24gb.toml", "one_gpu/80gb.toml", "coding_agent/run.toml"), (EIGHT[:1], EIGHT[:1])
    ),
    "retool-qwen3-4b.toml": (EIGHT[:4], EIGHT[4:]),
    "math-glm4-9b.toml": (EIGHT[:4], [("4", "5"), ("6", "7")]),
    "search-r1-qwen2.5-3b.toml": (EIGHT, EIGHT),
    "math-qwen3-30b-a3b.toml": (EIGHT, [tuple("01234567")]),
    **dict.fromkeys(
        ("math-qwen3-4b.toml", "math-llama3.1-8b.toml"),
        (EIGHT, [("0", "1"), ("2", "3"), ("4", "5"), ("6", "7")]),
    ),
}
# These need a cluster: machines, and GPUs of a server.
SEVERAL_MACHINES = {"math-deepseek-r1.toml": (16, 64), "math-glm4.5-air.toml": (2, 8)}
RUN_FILES = {
    **{
        str(path.relative_to(EXAMPLES)): path
        for path in EXAMPLES.rglob("*.toml")
        if path.name != "suite.toml"
    },
    **{path.name: path for path in FOLDER.glob("*.toml")},
}
"""Ranks and servers on eight GPUs: `four train (Megatron), four sample (SGLang)`, `on the same GPUs`."""


@pytest.mark.parametrize("name", sorted(RUN_FILES.keys() - SEVERAL_MACHINES.keys()))
def test_every_run_file_has_the_gpus_that_its_header_names(monkeypatch, name):
    monkeypatch.setenv(VARIABLE, "0,1,2,3,4,5,6,7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    ranks, servers = AS_THE_HEADER_SAYS.get(name, ([()], []))
    places = local_places(load_config(RUN_FILES[name], {}))
    assert [*places.gpus.ranks] == ranks
    assert [*places.gpus.servers] == servers
    assert places.notice is None


@pytest.mark.parametrize(("name", "machines", "of_a_server"), [(n, *m) for n, m in SEVERAL_MACHINES.items()])
def test_a_run_file_for_several_machines_shares_all_their_gpus(name, machines, of_a_server):
    """Two servers have all GPUs, each one once; so have the ranks: one each, neighbours on one machine."""
    layout = run_layout(load_config(RUN_FILES[name], {}), has_gpus=True)
    all_gpus = [(machine, gpu) for machine in range(machines) for gpu in range(8)]
    assert [bundle.gpus for bundle in layout.bundles] == [8] * machines
    assert [(slot.bundle, *slot.gpus) for slot in layout.ranks] == all_gpus
    assert [(slot.bundle, gpu) for slot in layout.servers for gpu in slot.gpus] == all_gpus
    assert 2 * of_a_server == len(all_gpus)


def test_no_header_of_a_run_file_is_forgotten():
    headers = {name: path.read_text().partition("\n\n")[0] for name, path in RUN_FILES.items()}
    of_gpus = {name for name, header in headers.items() if "GPU" in header}
    assert of_gpus - SEVERAL_MACHINES.keys() == AS_THE_HEADER_SAYS.keys()
    assert {
        name for name in of_gpus if "machines with eight GPUs" in headers[name]
    } == SEVERAL_MACHINES.keys()


@pytest.mark.parametrize(
    ("late", "keep"),
    [
        ({}, 1),
        ({"max_staleness": 1, "staleness_policy": "strict"}, 2),
        # Another group may be taken before the one in flight: it is a version older, when it ends.
        ({"max_staleness": 1}, 3),
        ({"max_staleness": 2, "staleness_window": 1}, 3),
    ],
)
def test_servers_keep_the_adapters_that_episodes_in_flight_may_have_begun_with(late, keep):
    correction = {"correction": "tis"} if late else {}
    config = load_config(
        None,
        {"engine": "sglang", "lora_rank": 2, "update_weights_transport": "lora", **late, **correction},
    )
    assert ServedAdapters.of(config).keep == keep


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("GPU", None),
    ],
)
def test_a_gpus_peak_is_known_by_its_name_or_not_at_all(name, peak):
    assert bf16_peak(name) == peak


def test_the_peak_of_ranks_is_that_of_their_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", with_cards(tmp_path / "cards", 2))
    monkeypatch.setenv(VARIABLE, "0,1")
    on_gpu = {"device": "cuda", "bf16": True}
    assert peak_of_ranks(load_config(None, on_gpu)) == 989e12
    # In fp32, on the CPU, or on machines that are not asked, there is none.
    assert peak_of_ranks(load_config(None, {**on_gpu, "bf16": False})) is None
    assert peak_of_ranks(load_config(None, {"bf16": True})) is None
    assert peak_of_ranks(load_config(None, {**on_gpu, "cluster": "ray"})) is None
