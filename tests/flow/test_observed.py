"""What a run shows of itself by flag: W&B, the model's config, a trace and the memory of a step."""

from __future__ import annotations

import gzip
import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
import wandb
from transformers import AutoModelForCausalLM

import agentrl
from agentrl.cli import main
from agentrl.engine.embedded.engine import EmbeddedEngine
from agentrl.errors import MissingExtraError
from agentrl.records import reconcile
from agentrl.records.status import read_status
from agentrl.runtime import extras
from tests.flow.runs import SHAPE, journal_of, metrics_of

KEY = "0123456789abcdef" * 3
SMALL = {
    **SHAPE,
    "env": "tests.flow.worlds:Talkative",
    "num_rollout": 2,
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 4,
    "eval_episodes": 4,
    "lr_warmup_iters": 0,
    "use_tensorboard": False,
}
RECORDED = {"profile_step": 2, "memory_snapshot_step": 1}
PHASES = {
    "rollout": "perf/rollout_time",
    "log_probs": "perf/log_probs_time",
    "actor_train": "perf/actor_train_time",
    "update_weights": "perf/update_weights_time",
}


@pytest.fixture(scope="module", autouse=True)
def _service_of_wandb():
    """Its service lives as long as this process; tests of other files look for leftover processes."""
    yield
    wandb.teardown()


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """A run with all of them, that was resumed for one more step."""
    place = {"output_dir": str(tmp_path_factory.mktemp("runs")), "name": "observed"}
    flags = {**RECORDED, "log_model_config": True, "use_wandb": True, "wandb_mode": "offline"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_API_KEY", KEY)
        run = agentrl.train(quiet=True, inline=True, **SMALL, **place, **flags)
        agentrl.train(run.folder, resume=True, quiet=True, num_rollout=3)
    return run.folder


def events_of(path: Path):
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def check_trace(path: Path, row) -> None:
    """The phases follow each other and last as long as the metrics say; operators ran inside them."""
    events = events_of(path)
    phases = [event for event in events if event.get("cat") == "phase"]
    assert [phase["name"] for phase in phases] == list(PHASES)
    for phase in phases:
        assert phase["dur"] == pytest.approx(1e6 * row[PHASES[phase["name"]]], rel=1e-3, abs=1)
    for before, after in pairwise(phases):
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"], abs=1)
    training = phases[2]
    backward = [event for event in events if "Backward" in event.get("name", "") and "dur" in event]
    assert backward
    for event in backward:
        assert training["ts"] <= event["ts"] <= training["ts"] + training["dur"]


def test_a_step_is_traced_with_its_phases(observed):
    (path,) = (observed / "profile").iterdir()
    assert path.name == "step_000002-rank-0.json.gz"
    (row,) = (row for row in metrics_of(observed) if row["step"] == 2 and "perf/step_time" in row)
    check_trace(path, row)


def test_a_synchronous_run_has_no_overlap_and_leaves_its_last_status(observed):
    rows = [row for row in metrics_of(observed) if "perf/step_time" in row]
    assert len(rows) == 3
    for row in rows:
        assert row["perf/overlap_time_ratio"] == 0.0
        waited = row["perf/wait_time_ratio"] + row["perf/rollout_wait_time_ratio"]
        # Each side works at some time, and waits at least while the other one works.
        assert 1.0 <= waited < 2.0
        assert row["perf/rollout_time"] <= row["perf/train_wait_time"]
    status = read_status(observed)
    assert (status.pid, status.episodes, status.oldest, status.working) == (os.getpid(), {}, None, ())


def test_each_attempt_has_a_timeline_and_the_report_a_picture_of_the_last(observed):
    files = sorted(path.name for path in (observed / "timeline").iterdir())
    assert files == ["attempt_1.json.gz", "attempt_2.json.gz"]
    events = events_of(observed / "timeline" / "attempt_1.json.gz")
    kinds = {event["cat"] for event in events if event["ph"] == "X"}
    assert {"play", "reward", "train", "publish", "eval", "RL", "group"} <= kinds
    (trained,) = (row for row in metrics_of(observed) if row["step"] == 2 and "perf/step_time" in row)
    durations = [e["dur"] / 1e6 for e in events if e["name"] == "train" and e["ph"] == "X"]
    assert len(durations) == 2
    assert durations[1] <= trained["perf/actor_train_time"] + 1e-3
    page = (observed / "report.html").read_text()
    assert page.count('<figure class="timeline">') == 2
    assert all(name in page for name in (">play<", ">train<", ">publish<"))


@pytest.mark.full
def test_the_timeline_has_the_turns_of_an_engine_and_a_trainer_that_share_their_memory(tmp_path):
    place = {"output_dir": str(tmp_path), "name": "turns"}
    run = agentrl.train(quiet=True, inline=False, colocate=True, max_staleness=0, **SMALL, **place)
    events = events_of(run.folder / "timeline" / "attempt_1.json.gz")
    titles = {e["pid"]: e["args"]["name"].partition(" (")[0] for e in events if e["name"] == "process_name"}
    assert list(titles.values()) == ["the run", "engine", "rank 0"]
    stages = {
        title: [
            (e["name"], e["ts"], e["ts"] + e["dur"])
            for e in events
            if e["ph"] == "X" and titles[e["pid"]] == title
        ]
        for title in titles.values()
    }
    rests = [(start, end) for name, start, end in stages["engine"] if name == "without memory"]
    updates = [(start, end) for name, start, end in stages["rank 0"] if name == "update"]
    assert updates
    assert all(any(start <= begin and until <= end for start, end in rests) for begin, until in updates)
    assert {"in service", "gets weights"} <= {name for name, *_ in stages["engine"]}
    status = read_status(run.folder).processes
    assert status["engine"].doing.name == "ended"
    assert status["engine"].version == 2


def test_the_memory_of_a_step_is_recorded_by_operator_and_by_process(observed):
    names = {path.name for path in (observed / "memory").iterdir()}
    assert names == {"step_000001-rank-0.txt", "step_000001-processes.txt"}
    table = (observed / "memory" / "step_000001-rank-0.txt").read_text()
    assert "Self CPU Mem" in table
    assert "aten::" in table
    rows = (observed / "memory" / "step_000001-processes.txt").read_text().splitlines()
    own = next(row.split() for row in rows if row.split()[0] == str(os.getpid()))
    assert 10 < int(own[1]) <= int(own[2])


def test_the_models_config_has_the_parameters_of_the_model(observed):
    facts = json.loads((observed / "model_config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(observed / "checkpoint")
    assert facts["parameters"]["total"] == model.num_parameters()
    assert facts["parameters"]["total"] == sum(
        count for name, count in facts["parameters"].items() if name != "total"
    )
    assert facts["parameters"]["embedding"] == model.get_input_embeddings().weight.numel()
    assert (facts["sizes"]["layers"], facts["sizes"]["hidden size"]) == (1, SHAPE["hidden_size"])
    assert facts["config"]["num_hidden_layers"] == 1
    assert facts["dtypes"]["trained in"] == "float32"


def test_all_attempts_are_one_run_of_wandb_and_it_holds_every_step(observed):
    identity = (observed / "wandb_run_id").read_text()
    files = sorted((observed / "wandb").glob("offline-run-*/*.wandb"))
    assert [path.name for path in files] == [f"run-{identity}.wandb"] * 2
    logged = [path.read_bytes() for path in files]
    for name in ("rollout/raw_reward", "eval/greedy", "rollout/retokenization_drift/ratio"):
        assert all(name.encode() in records for records in logged)
    rewards = [row["rollout/raw_reward"] for row in metrics_of(observed) if "rollout/raw_reward" in row]
    assert len(rewards) == 3
    for attempt, own in zip(logged, (rewards[:2], rewards[2:]), strict=True):
        assert all(repr(reward).encode() in attempt for reward in own)


def test_the_key_of_wandb_is_written_nowhere(observed):
    files = [path for path in observed.rglob("*") if path.is_file()]
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def test_without_the_package_the_sentence_names_its_extra(monkeypatch, tmp_path):
    find_spec = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "wandb" else find_spec(name))
    with pytest.raises(MissingExtraError, match=r"use_wandb needs wandb: pip install 'agentrl\[wandb\]'\."):
        agentrl.train(quiet=True, use_wandb=True, output_dir=str(tmp_path), **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_wandb_that_cannot_be_reached_costs_the_run_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "too short")
    settings = {**SMALL, "num_rollout": 1, "inline": True, "output_dir": str(tmp_path), "name": "alone"}
    run = agentrl.train(use_wandb=True, **settings)
    assert "Warning: The tracker `wandb` stopped" in capsys.readouterr().out
    assert metrics_of(run.folder)[-1]["step"] == 1


def test_a_run_stops_before_the_update_that_a_token_law_forbids(monkeypatch, tmp_path, capsys):
    generate = EmbeddedEngine.generate

    async def crooked(self, prompt_ids, sampling, *, session):
        completion = await generate(self, prompt_ids, sampling, session=session)
        if self.version == 1 and session.startswith("g"):
            completion.logprobs.setflags(write=True)
            completion.logprobs[-1] = 0.5
        return completion

    monkeypatch.setattr(EmbeddedEngine, "generate", crooked)
    options = {**SMALL, "num_rollout": 3, "save_interval": 1, "output_dir": tmp_path, "name": "stopped"}
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in options.items() if k != "use_tensorboard"]
    with pytest.raises(SystemExit) as ended:
        main(["train", "--quiet", "--inline", "--no-use-tensorboard", *flags])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert "breaks the token law `logprobs`: sampled token" in printed.out + printed.err
    folder = tmp_path / "stopped"
    assert metrics_of(folder)[-1]["step"] == 1
    assert [path.name for path in (folder / "checkpoints").glob("step_*")] == ["step_000001"]
    fates = {(entry["outcome"], entry["reason"]) for entry in journal_of(folder, "step_000002")}
    assert fates == {("dropped", "token_law_logprobs")}
    assert reconcile(folder).problems == ()
    assert json.loads((folder / "attempts.jsonl").read_text().splitlines()[-1])["ended"] == "failed"


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_in_processes_record_themselves(tmp_path, num_ranks):
    megatron = {"trainer": "megatron", "actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2}
    layout = {**megatron, "num_query_groups": 2} if num_ranks == 2 else {}
    settings = {**SMALL, **RECORDED, **layout}
    run = agentrl.train(quiet=True, output_dir=str(tmp_path), name="processes", **settings)
    (row,) = (row for row in metrics_of(run.folder) if row["step"] == 2 and "perf/step_time" in row)
    traces = sorted((run.folder / "profile").iterdir())
    assert [path.name for path in traces] == [f"step_000002-rank-{n}.json.gz" for n in range(num_ranks)]
    for path in traces:
        check_trace(path, row)
    assert len(list((run.folder / "memory").glob("step_000001-rank-*.txt"))) == num_ranks
    table = (run.folder / "memory" / "step_000001-processes.txt").read_text()
    assert table.count("rank-") == num_ranks
    assert "agentrl.engine.embedded " in table
