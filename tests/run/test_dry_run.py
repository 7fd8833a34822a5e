"""A dry run validates all of a run, and starts and writes nothing."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from agentrl.assembly import cluster
from agentrl.assembly.memory import MemoryNeed
from agentrl.cli import main
from agentrl.errors import UserError
from agentrl.processes import gpus as gpus_module
from agentrl.processes.gpus import Gpu
from agentrl.run import dry_run_memory as memory_module
from agentrl.run.dry_run import MissingPartsError, dry_run
from tests.cards import with_cards
from tests.engine.serving import save_tiny
from tests.engine.sglang_launch.starting import STAND_IN
from tests.flow.runs import SHAPE, TINY
from tests.flow.worlds import Bandit
from tests.records.test_gpu_memory import driver

PROMPTS = str(Path(__file__).parents[1] / "flow" / "prompts.jsonl")
BANDIT = {**TINY, "env": "tests.flow.worlds:Bandit"}
SINGLE = {**TINY, "env": "SingleTurn-v0", "prompt_data": PROMPTS, "rollout_max_context_len": 96}
# Not the interpreter of the tests itself, so that it is asked for its SGLang.
PYTHON = str(Path(sys.executable).with_name("python3"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_it_reports_what_the_run_would_do_and_writes_nothing(tmp_path):
    report = dry_run(None, {**BANDIT, "warm_start_steps": 5})
    facts = report.as_json()
    assert facts["run"]["iterations"] == 40
    assert (facts["run"]["prompts_per_iteration"], facts["run"]["episodes_per_prompt"]) == (8, 8)
    assert facts["environment"]["tools"] == ["press"]
    assert (facts["environment"]["max_turns"], facts["environment"]["max_tokens"]) == (3, 64)
    assert (facts["prompts"]["training"], facts["prompts"]["held_out"]) == (8, 8)
    assert facts["prompts"]["first"].startswith("<|user|> press ")
    assert facts["prompts"]["shortest"] <= facts["prompts"]["median"] <= facts["prompts"]["longest"] < 20
    assert facts["model"]["sizes"]["layers"] == 1
    parameters = facts["model"]["parameters"]["total"]
    assert facts["memory"]["trainer"]["weights_bytes"] == 4 * parameters
    cache = 64 * 2 * 32 * (64 + 1) * 4
    assert facts["memory"]["embedded engine"]["kv_cache_bytes"] == cache
    assert facts["disk"]["checkpoint_bytes"] == pytest.approx(12 * parameters, rel=0.01)
    assert (facts["missing"], facts["notes"]) == ([], [])
    json.dumps(facts)
    assert list(tmp_path.iterdir()) == []


def test_functions_by_path_are_tried_out_and_listed():
    report = dry_run(None, {**SINGLE, "reward": "tests.flow.worlds:shortness"})
    assert report.sections["run"]["functions"] == {"reward": "tests.flow.worlds:shortness"}
    assert report.sections["prompts"]["held_out"] is None
    begins = [note.split(",")[0] for note in report.notes]
    assert begins == ["the model is new and has no warm start: it writes noise", "Nothing is held out"]


def test_prompts_whose_labels_the_reward_does_not_pay_are_named(tmp_path):
    rows = [{"input": "2 + 2? Answer in \\boxed{}.", "answer": label} for label in ("4", "5", None)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = {**SINGLE, "prompt_data": "rows.jsonl", "input_key": "input", "label_key": "answer"}
    settings = {**settings, "rollout_shuffle": False}
    with pytest.raises(UserError) as caught:
        dry_run(None, {**settings, "reward": "exact_match"})
    assert "3 of 3 prompts do not fit the reward exact_match: rows.jsonl:0: its label, written as" in str(
        caught.value
    )
    with pytest.raises(
        UserError, match=r"1 of 3 prompts do not fit the reward math: rows.jsonl:2: the task has no"
    ):
        dry_run(None, {**settings, "reward": "math"})
    dry_run(None, {**settings, "reward": "math", "prompt_data": "rows.jsonl@[:2]"})
    (note,) = [note for note in dry_run(None, settings).notes if "do not fit" in note]
    assert note.startswith("3 of 3 prompts do not fit the reward of SingleTurn-v0: rows.jsonl:0: its label")


def without_weights(folder):
    save_tiny(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    return {**BANDIT, "hf_checkpoint": str(folder)}


def with_a_run(folder):
    (folder / "taken").mkdir(parents=True)
    (folder / "taken" / "metrics.jsonl").write_text("")
    return {**BANDIT, "output_dir": str(folder), "name": "taken"}


class Unclosable(Bandit):
    """Its end fails, and one of its beginnings as well."""

    def __init__(self, *, begins=True):
        super().__init__()
        self.begins = begins

    async def reset(self, task, *, seed):
        if not self.begins:
            raise RuntimeError("no such planet")
        return await super().reset(task, seed=seed)

    async def close(self):
        raise RuntimeError("no such door")


class Needing(Bandit):
    """Its extra is not installed beside the tests."""

    needs = ("verifiers",)


WRONG = {
    "an environment": ({**BANDIT, "env": "HopSerch-v0"}, "Did you mean `HopSearch-v0`?"),
    "its arguments": ({**BANDIT, "env_kwargs": {"size": 1}}, "there is no argument `size`"),
    "a tool": ({**BANDIT, "tools": ["serch"]}, "Did you mean `search`?"),
    "opponents": ({**BANDIT, "opponents": {"agent": "script"}}, "has one agent"),
    "prompts": ({**SINGLE, "prompt_data": "nowhere.jsonl"}, "nowhere.jsonl"),
    "a column": ({**SINGLE, "input_key": "nothing"}, "name one with input_key"),
    "a function": ({**SINGLE, "reward": "tests.flow.worlds:nothing"}, "tests.flow.worlds:nothing"),
    "an episode that cannot begin": ({**BANDIT, "env": "tests.flow.worlds:Dead"}, "no such planet"),
    "an episode that cannot end": ({**BANDIT, "env": "tests.run.test_dry_run:Unclosable"}, "no such door"),
    "an episode that can do neither": (
        {**BANDIT, "env": "tests.run.test_dry_run:Unclosable", "env_kwargs": {"begins": False}},
        "no such planet",
    ),
    "no room": ({**BANDIT, "rollout_max_context_len": 4}, "raise rollout_max_context_len"),
    "a model": ({**BANDIT, "hf_checkpoint": "nowhere"}, "nowhere holds no config.json"),
    "weights": (without_weights, "holds no model.safetensors"),
    "a layout": (
        {**BANDIT, "trainer": "megatron", "tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 2},
        "does not divide the model's 1 heads of keys and values",
    ),
    "a folder": (with_a_run, "already holds a run"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_first_thing_that_is_wrong_is_a_sentence(name, tmp_path):
    settings, sentence = WRONG[name]
    if callable(settings):
        settings = settings(tmp_path / "place")
    chosen = {k: v for k, v in settings.items() if "hf_checkpoint" not in settings or k not in SHAPE}
    with pytest.raises(UserError) as error:
        dry_run(None, chosen)
    assert sentence in str(error.value)


def test_all_that_is_missing_is_one_list_with_the_memory_that_config_json_tells(model, tmp_path, capsys):
    downloaded = tmp_path / "downloaded"
    downloaded.mkdir()
    shutil.copy(Path(model) / "config.json", downloaded)
    settings = {
        **{"env": "tests.run.test_dry_run:Needing", "hf_checkpoint": str(downloaded)},
        **{"prompt_data": "a.jsonl", "eval_prompt_data": "b.jsonl@[0:3]"},
    }
    with pytest.raises(MissingPartsError) as caught:
        dry_run(None, settings)
    report = caught.value.report
    files = ("a.jsonl", "b.jsonl", "holds no tokenizer", "no model.safetensors")
    parts = ("agentrl[verifiers]", *files)
    assert len(report.missing) == len(parts)
    assert all(part in line for part, line in zip(parts, report.missing, strict=True))
    assert str(caught.value).startswith("5 things are missing here: (1) `tests.run")
    there = {name: value for name, value in BANDIT.items() if name not in SHAPE}
    whole = dry_run(None, {**there, "hf_checkpoint": str(model)}).sections
    assert (
        report.sections["memory"]["trainer"]["weights_bytes"] == whole["memory"]["trainer"]["weights_bytes"]
    )
    assert report.sections["model"]["parameters"] == whole["model"]["parameters"]
    assert "environment" not in report.sections
    aside = {**settings, "use_kl_loss": True, "kl_loss_coef": 0.1, "ref_load": "reference"}
    with pytest.raises(MissingPartsError, match=r"\(6\) reference holds no config"):
        dry_run(None, aside)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    with pytest.raises(SystemExit) as ended:
        main(["train", "--dry-run", *words])
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert "memory" in printed.out
    assert len(printed.err.splitlines()) == 1


def test_a_full_disk_is_noticed_before_the_run(monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1000))
    with pytest.raises(
        UserError, match=r"4 checkpoints and the models take .* 0.0 GiB are free; lower save_total"
    ):
        dry_run(None, BANDIT)


def test_what_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(
        memory_module, "present_gpus", lambda: (Gpu("0", "H100", 80 << 30), Gpu("1", "unknown", 0))
    )
    shortage = memory_module.memory_shortage
    assert shortage({"trainer, each of 8 ranks": MemoryNeed(weights=79 << 30)}) is None
    found = shortage({"trainer, each of 8 ranks": MemoryNeed(weights=81 << 30)})
    assert "of a rank take 81.0 GiB, and a GPU has 80.0 GiB; take more ranks" in found
    found = shortage({"trainer": MemoryNeed(1 << 50), "embedded engine": MemoryNeed()})
    assert re.search(r"trainer and embedded engine take .* and this machine has", found)
    published = {memory_module.PUBLISHED: MemoryNeed(published=1 << 50)}
    assert "published weights, where rank 0 is take 1048576.0 GiB" in shortage(published)
    assert shortage(published, is_elsewhere=True) is None


def test_a_run_for_gpus_is_validated_where_the_memory_is_too_small_and_one_for_this_machine_is_not(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(memory_module, "machine_memory", lambda: 1000)
    with pytest.raises(UserError, match=r"trainer and embedded engine take .* this machine has"):
        dry_run(None, BANDIT)
    settings = {**BANDIT, "trainer": "megatron", "bf16": True, "inline": False}
    report = dry_run(None, settings)
    assert report.missing[0].startswith("1 GPUs for its ranks")
    assert "this machine has 0.0 GiB" in report.missing[1]


def served(model, **settings):
    base = {k: v for k, v in BANDIT.items() if k not in SHAPE and k != "max_slots"}
    return {
        **base,
        "hf_checkpoint": str(model),
        "engine": "sglang",
        "rollout_num_gpus_per_engine": 2,
        **settings,
    }


def test_arguments_of_servers_are_those_of_the_installed_version(model, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    report = dry_run(
        None, served(model, bf16=True, sglang_python=PYTHON, sglang={"mem_fraction_static": 0.3})
    )
    (command,) = report.sections["servers"].values()
    assert f"--model-path {model}" in command
    assert "--mem-fraction-static=0.3" in command
    assert "--tp-size=2" in command
    assert report.missing == ("2 GPUs for its servers: this machine has none.",)
    with pytest.raises(
        UserError, match=r"no argument `mem_fraction_statik`. Did you mean `mem_fraction_static`"
    ):
        dry_run(None, served(model, bf16=True, sglang_python=PYTHON, sglang={"mem_fraction_statik": 0.3}))


def test_a_run_for_gpus_is_validated_without_any(model):
    settings = {"trainer": "megatron", "actor_num_gpus_per_node": 4, "rollout_num_engines": 2}
    report = dry_run(None, served(model, **settings))
    assert report.sections["model"]["dtypes"] == {
        "model directory": "float32",
        "trained in": "bfloat16",
        "sampled in": "bfloat16",
    }
    assert report.sections["gpus"] == {"of_the_trainer": 4, "of_servers": 4, "present": []}
    assert report.missing == (
        "SGLang is not installed here, so the arguments of servers were not checked.",
        "4 GPUs for its servers: this machine has none.",
        "4 GPUs for its ranks: here they would compute on the CPU.",
    )
    assert report.notes == ()
    assert report.sections["cards"] == {
        **{f"GPU {n}": [f"rank {n}"] for n in range(4)},
        **{f"GPU {n}": ["policy server 0"] for n in (4, 5)},
        **{f"GPU {n}": ["policy server 1"] for n in (6, 7)},
    }
    ranks = report.sections["memory"]["trainer, each of 4 ranks"]
    parameters = report.sections["model"]["parameters"]["total"]
    assert ranks["weights_bytes"] == pytest.approx(2 * parameters, rel=0.2)
    assert ranks["optimizer_bytes"] == pytest.approx(3 * parameters, rel=0.2)


def test_it_says_how_long_a_row_the_card_has_room_for(model, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", with_cards(tmp_path / "bin", 1, mib=2048))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    own = {name: value for name, value in BANDIT.items() if name not in SHAPE}
    settings = {**own, "hf_checkpoint": str(model), "warm_start_steps": 0, "device": "cuda"}
    facts = [
        dry_run(None, {**settings, **more}).sections["gpus"]
        for more in ({}, {"gradient_checkpointing": True})
    ]
    kept, again = (each["longest_row_tokens"] for each in facts)
    assert 1000 < kept < again
    assert "longest_row_tokens" not in dry_run(None, BANDIT).sections["gpus"]


def test_it_says_who_has_the_only_card(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", with_cards(tmp_path / "bin", 1))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    settings = {"trainer": "megatron", "rollout_num_gpus_per_engine": 1, "sglang_python": PYTHON}
    report = dry_run(None, served(model, **settings))
    assert report.sections["gpus"]["present"] == ["NVIDIA H200, 140 GiB"]
    assert report.sections["cards"] == {"GPU 0": ["rank 0", "policy server 0"]}
    assert (report.missing, [note[:34] for note in report.notes]) == (
        (),
        ["Ranks and servers share GPU 0: the"],
    )
    assert "--dtype=bfloat16" in report.sections["servers"]["policy, group 1"]
    given = report.sections["shared_gpus"]["arguments_of_the_server"]["mem_fraction_static"]
    assert f"--mem-fraction-static={given}" in report.sections["servers"]["policy, group 1"]
    turns = dry_run(None, served(model, **settings, colocate=True, sglang={"mem_fraction_static": 0.5}))
    assert (turns.sections["cards"], turns.notes) == (report.sections["cards"], ())
    words = [f"--{key.replace('_', '-')}={value}" for key, value in served(model, **settings).items()]
    main(["train", "--dry-run", *words])
    assert "GPU 0 rank 0, policy server 0" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(
        UserError, match="this machine has 1 GPU, and its servers need 2; have more, or lower"
    ):
        dry_run(None, served(model, **settings, rollout_num_engines=2))
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("settings", "versions", "of_deltas"),
    [
        ({}, 2, None),
        ({"max_staleness": 1, "correction": "tis", "async_eval": True, "eval_engine": "own"}, 3, None),
        ({"update_weights_transport": "delta"}, 2, 1),
        ({"update_weights_transport": "delta", "cluster": "ray"}, 2, 3),
        ({"trainer": "megatron", "bf16": True}, 1, None),
    ],
)
def test_the_versions_of_the_weights_that_servers_get_are_counted(model, settings, versions, of_deltas):
    report = dry_run(None, served(model, **settings))
    memory = report.sections["memory"]
    size = 4 * report.sections["model"]["parameters"]["total"]
    assert memory[memory_module.PUBLISHED]["published_bytes"] == versions * size
    found = memory.get(memory_module.DELTAS, {"published_bytes": None})["published_bytes"]
    assert found == (of_deltas and of_deltas * size)


def test_gpus_that_ranks_and_servers_share_are_shared_out(model, tmp_path, monkeypatch):
    driver(tmp_path, monkeypatch, total_gib=80)
    for module in (cluster, gpus_module):
        monkeypatch.setattr(module, "num_gpus", lambda: 1)
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    chosen = {"trainer": "megatron", "bf16": True, "sglang_python": PYTHON, "rollout_num_gpus_per_engine": 1}
    report = dry_run(None, served(model, **chosen))
    facts, (command,) = report.sections["shared_gpus"], report.sections["servers"].values()
    assert facts["gpus"] == ["0"]
    rank = report.sections["memory"]["trainer, each of 1 ranks"]
    assert facts["rank"]["weights_bytes"] == rank["weights_bytes"]
    assert facts["server"]["total_bytes"] + facts["rank"]["total_bytes"] == facts["peak_bytes"] < 80 << 30
    fraction = facts["arguments_of_the_server"]["mem_fraction_static"]
    assert f"--mem-fraction-static={fraction}" in command
    set_by_hand = dry_run(None, served(model, **chosen, sglang={"mem_fraction_static": 0.25}))
    assert set_by_hand.sections["shared_gpus"]["arguments_of_the_server"] == {}
    (command,) = set_by_hand.sections["servers"].values()
    assert "--mem-fraction-static=0.25" in command


def test_gpus_of_a_cluster_are_not_those_of_this_machine(model):
    settings = {"trainer": "megatron", "actor_num_gpus_per_node": 4, "bf16": True, "cluster": "ray"}
    report = dry_run(None, served(model, **settings, ray_address="10.0.0.7:6379"))
    assert report.missing == ("SGLang is not installed here, so the arguments of servers were not checked.",)
    assert report.notes == ()
    assert report.sections["cluster"]["reserves"] == "(4 CPUs, 4 GPUs) + (1 CPU, 2 GPUs)"
    assert report.sections["cards"] == {
        **{f"GPU {n} of bundle 0": [f"rank {n}"] for n in range(4)},
        **{f"GPU {n} of bundle 1": ["policy server 0"] for n in range(2)},
    }
    own = dry_run(None, served(model, **settings))
    assert "2 GPUs for its servers: this machine has none." in own.missing


def test_the_command_prints_a_page_or_json(capsys, tmp_path):
    words = [f"--{name.replace('_', '-')}={value}" for name, value in BANDIT.items()]
    main(["train", "--dry-run", *words])
    page = capsys.readouterr().out
    assert "Valid; nothing was started." in page
    assert "tests.flow.worlds:Bandit" in page
    assert len(page.splitlines()) < 80
    main(["train", "--dry-run", "--json", *words])
    assert json.loads(capsys.readouterr().out)["environment"]["id"] == "tests.flow.worlds:Bandit"
    assert list(tmp_path.iterdir()) == []


def test_json_belongs_to_a_dry_run(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "--json"])
    assert ended.value.code == 2
    assert "add --dry-run" in capsys.readouterr().err
