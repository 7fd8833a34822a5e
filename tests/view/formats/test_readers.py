"""What is exported, opened by the packages that own the formats."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from agentrl.cli import main
from agentrl.records import Outcome
from tests.house.source import ROOT
from tests.view.episodes.journals import HOSTILE, entry, hostile, write
from tests.view.formats.played import entries

pytestmark = pytest.mark.full

PYTHON = ROOT / ".venv-clients" / "bin" / "python"
SCRIPT = Path(__file__).parent / "scripts" / "read.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "played"
    write(folder, {1: entries()})
    return folder


def exported(run, name, out):
    main(["export", str(run), "--format", name, "--out", str(out)])
    return out


def read(format, path):
    """What the owner of a format reads."""
    assert PYTHON.exists(), "make .venv-clients/.installed makes the environment of these readers"
    done = subprocess.run([PYTHON, SCRIPT, format, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_models_of_atif_take_every_document(run, tmp_path):
    found = read("atif", exported(run, "atif", tmp_path / "x.jsonl"))
    assert [one["id"] for one in found] == ["g0-0", "g0-1", "g0-2-retry1", "g1-0", "g2-0", "g3-0"]
    assert found[0]["steps"] == ["user", "agent", "agent"]
    assert found[0]["ids"] == [[3, 4], [7]]
    assert found[2]["steps"] == ["user", "system"], "the failure is said"
    assert found[3]["subagents"] == ["g1-0#1"]
    assert found[4]["subagents"] == ["g2-0#1"]


def test_inspect_shows_samples_scores_calls_and_tokens(run, tmp_path):
    (log,) = read("inspect", exported(run, "inspect", tmp_path / "logs"))
    assert log["status"] == "success"
    assert log["task"] == "Echo-v0 step_000001"
    assert log["means"]["reward"] == pytest.approx((1 + 0 + 1 + 0.25) / 4)
    assert (log["means"]["white/reward"], log["means"]["black/reward"]) == (1.0, -1.0)
    first = log["samples"][0]
    assert (first["id"], first["epoch"]) == ("rl/1", 1)
    assert first["roles"] == ["user", "assistant", "tool", "assistant"]
    assert first["calls"] == [["search", {"query": "Torba"}]]
    assert first["results"] == [["call_0", "Torba was born in Kelmar"]]
    assert first["scores"] == {"reward": 1.0, "env": 1.0, "style": 0.5}
    # The prompt of the second request is all that was before it: 5 + 2 + 2 tokens.
    assert first["usage"] == [[5 + 9, 3]]
    assert first["answer"] == "Kelmar"
    assert log["samples"][2]["error"] == "tool_timeout: took longer than 3 s"
    assert log["samples"][5]["limit"] == "custom"
    assert [sample["epoch"] for sample in log["samples"]] == [1, 2, 3, 4, 5, 6]


def test_a_collector_reads_the_spans_of_otel(run, tmp_path):
    spans = read("otel", exported(run, "otel", tmp_path / "traces.jsonl"))
    first = [span for span in spans if span["trace"] == spans[0]["trace"]]
    assert [span["name"] for span in first] == [
        "invoke_agent agent", "chat policy", "execute_tool search", "chat policy",
    ]  # fmt: skip
    root, chat, tool, last = first
    assert root["parent"] == ""
    assert {span["parent"] for span in first[1:]} == {root["id"]}
    assert root["events"] == ["gen_ai.evaluation.result"]
    assert chat["values"]["gen_ai.usage.input_tokens"] == 5
    assert last["values"]["gen_ai.usage.input_tokens"] == 9
    roles = [message["role"] for message in last["values"]["gen_ai.input.messages"]]
    assert roles == ["user", "assistant", "tool"]
    assert tool["values"]["gen_ai.tool.call.arguments"] == {"query": "Torba"}
    assert tool["values"]["gen_ai.tool.call.result"] == "Torba was born in Kelmar"
    game = [span["name"] for span in spans if "white" in span["name"] or "workflow" in span["name"]]
    assert game == ["invoke_workflow Echo-v0", "invoke_agent white"]
    assert any(span["error"] == "tool_timeout: took longer than 3 s" for span in spans)
    assert len({span["id"] for span in spans}) == len(spans)


@pytest.mark.parametrize("format", ["inspect", "otel", "atif"])
def test_hostile_text_is_text_for_their_readers(format, tmp_path):
    texts = [text for text in HOSTILE if format != "atif" or text.isascii()]
    folder = tmp_path / "played"
    written = [
        entry(hostile(text, f"g{n}-0"), None, Outcome.DROPPED, reason="x") for n, text in enumerate(texts)
    ]
    write(folder, {1: written})
    found = read(format, exported(folder, format, tmp_path / "out.jsonl"))
    assert found
