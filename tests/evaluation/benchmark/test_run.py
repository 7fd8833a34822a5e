"""A benchmark: one row for every environment and policy, whatever happens to the others; it goes on."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.assembly.token_texts import token_texts
from agentrl.cli import main
from agentrl.config import read_toml
from agentrl.envs import find
from agentrl.errors import UserError
from agentrl.evaluation.benchmark.report import Benchmark
from agentrl.evaluation.benchmark.results import RESULT, CellResult, usage_of
from agentrl.evaluation.benchmark.run import run_benchmark
from agentrl.evaluation.benchmark.suite import Suite, SuiteFile, envs_of, with_flags
from agentrl.evaluation.identity import code_version
from agentrl.records import members, read_journal
from agentrl.records.history import locked
from agentrl.records.journal import to_line
from agentrl.rendering.fresh_tokenizer import CALL_MARKERS, train_tokenizer
from agentrl.types import Episode, Limits, Task, Trajectory, Turn, Usage, say
from agentrl.view.console import RunConsole
from tests.engine.chat.chat_server import ChatServer, assistant
from tests.evaluation.benchmark import worlds
from tests.flow.runs import HEARING
from tests.trainer.tiny import SHAPE
from tests.worlds import turn_tokens

ROOT = Path(__file__).parents[3]
W = "tests.evaluation.benchmark.worlds"


def suite_of(envs, models=("expert", "null", "random"), prices=None, **override):
    file = SuiteFile(env=envs_of(",".join(f"{W}:{env}" for env in envs)))
    return Suite.of(with_flags(file, models=models, prices=prices, override=override))


def play(folder, suite, **options):
    return run_benchmark(suite, folder, RunConsole(quiet=True), **options)


def rows_of(benchmark):
    return {(row["env"].partition(":")[2], row["policy"]): row for row in benchmark.rows}


@pytest.fixture
def resets(tmp_path, monkeypatch):
    """The lines of all resets so far."""
    path = tmp_path / "played"
    monkeypatch.setenv("PLAYED", str(path))
    return lambda: path.read_text().splitlines() if path.exists() else []


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Worlds of all kinds with three policies."""
    folder = tmp_path_factory.mktemp("bench") / "b"
    envs = ("Guess", "Tools", "Pair", "Unbuildable", "Expertless", "Failing")
    return play(folder, suite_of(envs, n=24))


def test_every_environment_and_policy_is_a_row_those_of_an_environment_together(mixed):
    rows = rows_of(mixed)
    assert len(rows) == 18
    assert [env for env, _ in rows][:3] == ["Guess"] * 3
    assert rows["Guess", "expert"]["mean"]["value"] == 1.0
    assert rows["Guess", "null"]["mean"]["value"] == 0.0
    assert 0.0 <= rows["Guess", "random"]["mean"]["value"] < 0.8
    assert rows["Pair", "expert"]["mean"]["value"] == 1.0
    assert rows["Guess", "expert"]["mean"]["method"] == "wilson"
    assert rows["Guess", "expert"]["by"] == {"parity=0": 1.0, "parity=1": 1.0}
    assert rows["Guess", "null"]["invalid_moves"] == 24
    assert rows["Tools", "random"]["turns"] > 1.0


def test_what_cannot_be_built_or_played_is_a_row_with_its_sentence(mixed):
    rows = rows_of(mixed)
    for policy in ("expert", "null", "random"):
        assert "the server of this world is down" in rows["Unbuildable", policy]["error"]
    assert "has no expert" in rows["Expertless", "expert"]["error"]
    assert rows["Expertless", "null"]["state"] == "done"
    assert not mixed.is_complete
    assert len(list(mixed.notes())) == 4


def test_failed_episodes_are_counted_by_kind_and_in_no_mean(mixed):
    row = rows_of(mixed)["Failing", "expert"]
    assert re.match(r"reset error: RuntimeError: no world \(worlds.py, line \d+\)", row["first_failure"])
    assert (row["planned"], row["scored"], row["failures"]) == (24, 16, {"reset_error": 8})
    assert row["mean"]["value"] == 1.0


def test_the_table_the_page_and_the_folder_hold_the_same(mixed):
    assert json.loads((mixed.folder / "benchmark.json").read_text()) == mixed.as_json()
    assert Benchmark.read(mixed.folder).rows == mixed.rows
    page = (mixed.folder / "benchmark.html").read_text()
    assert page.count("<tr>") > 18
    assert "<script" not in page
    assert "the server of this world is down" in page


def test_the_page_has_a_table_for_each_environment_with_bars_and_no_empty_columns(mixed):
    page = mixed.page()
    envs = list(dict.fromkeys(row["env"] for row in mixed.rows))
    assert [re.sub("<.*?>", "", line).strip() for line in page.splitlines() if "<h2" in line] == envs
    scored = [row for row in mixed.rows if row["mean"] is not None]
    bars = re.findall(r'<i style="left:([\d.]+)%;width:([\d.]+)%"></i><b style="left:([\d.]+)%', page)
    assert [float(width) for _, width, _ in bars] == pytest.approx(
        [100 * row["mean"]["value"] for row in scored], abs=0.01
    )
    assert [float(low) for _, _, low in bars] == pytest.approx(
        [100 * row["mean"]["low"] for row in scored], abs=0.01
    )
    assert "cost</th>" not in page


def test_the_table_fits_80_columns_and_cuts_no_interval(mixed):
    stream = io.StringIO()
    Console(file=stream, width=80).print(mixed.table())
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    for row in mixed.rows:
        if row["mean"] is not None:
            mean = row["mean"]
            text = f"{mean['value']:.3f} [{mean['low']:.3f}, {mean['high']:.3f}]"
            assert any(text in line for line in lines)


def test_hostile_text_is_escaped_on_the_page_and_visible_in_the_table(mixed):
    row = {**mixed.rows[0], "env": "<script>alert(1)</script>\x1b[31m", "error": "<b>", "state": "error"}
    benchmark = Benchmark(mixed.folder, (row,))
    assert "<script>" not in benchmark.page()
    assert "&lt;script&gt;" in benchmark.page()
    assert "\x1b" not in "".join(benchmark.notes()) + str(benchmark.table().columns[0]._cells)


def test_what_is_finished_is_not_played_again_and_a_changed_part_is(tmp_path, resets, monkeypatch):
    folder = tmp_path / "b"
    first = play(folder, suite_of(["Guess"], n=6))
    assert len(resets()) == 18
    again = play(folder, suite_of(["Guess"], n=6))
    assert len(resets()) == 18
    assert again.rows == first.rows
    play(folder, suite_of(["Guess"], models=("expert",), n=6, seed=1))
    assert len(resets()) == 24
    monkeypatch.setattr(
        worlds.Guess, "tasks", lambda self, split: [Task.ask(f"x{n}", "?", "yes", parity=0) for n in range(6)]
    )
    play(folder, suite_of(["Guess"], models=("expert",), n=6))
    assert len(resets()) == 30, "other data"
    monkeypatch.setattr("agentrl.evaluation.benchmark.run.code_version", lambda spec: "other")
    play(folder, suite_of(["Guess"], models=("expert",), n=6))
    assert len(resets()) == 36, "other code"


def test_a_half_cell_goes_on_with_the_episodes_that_it_lacks(tmp_path, resets):
    folder = tmp_path / "b"
    suite = suite_of(["Ranked"], models=("random",), n=6, n_samples_per_eval_prompt=2)
    whole = play(tmp_path / "whole", suite)
    (cell,) = (play(folder, suite).folder / "cells").iterdir()
    (journal,) = (cell / "trajectories").iterdir()
    entries = list(read_journal(journal))
    assert {entry.verdict.parts["size"] for entry in entries} == {2.0}, "rewards of groups are in the journal"
    (cell / RESULT).unlink()
    _truncate(journal, entries[:5])
    before = len(resets())
    assert [_scores(row) for row in play(folder, suite).rows] == [_scores(row) for row in whole.rows]
    assert len(resets()) - before == 7
    assert Counter(entry.episode.id for entry in read_journal(journal)).most_common(1)[0][1] == 1


def _truncate(journal, entries):
    """Keep some entries, as a process leaves them that was killed."""
    end = 0
    for entry in entries:
        end = members.append(journal, [to_line(entry)], at=end)
    members.append(journal, [to_line(entries[0])], at=end)
    os.truncate(journal, (end + journal.stat().st_size) // 2)


def _scores(row):
    """A row without times and places."""
    return {name: value for name, value in row.items() if name != "folder"}


def test_failed_episodes_are_played_again_on_request(tmp_path, monkeypatch, resets):
    folder, suite = tmp_path / "b", suite_of(["Failing"], models=("expert",), n=6)
    assert play(folder, suite).rows[0]["scored"] == 4
    monkeypatch.setenv("MENDED", "1")
    assert play(folder, suite).rows[0]["scored"] == 4
    count = len(resets())
    (row,) = play(folder, suite, retry_failed=True).rows
    assert (row["scored"], row["failures"]) == (6, {})
    assert len(resets()) - count == 2


def test_samples_give_pass_at_k_and_bootstrap_intervals(tmp_path):
    suite = suite_of(["Guess"], models=("random",), n=12, n_samples_per_eval_prompt=4)
    (row,) = play(tmp_path / "b", suite).rows
    assert (row["planned"], row["samples"], list(row["pass_at"])) == (48, 4, ["1", "2", "4"])
    assert row["pass_at"]["1"]["value"] == pytest.approx(row["mean"]["value"])
    assert row["pass_at"]["1"]["value"] <= row["pass_at"]["2"]["value"] <= row["pass_at"]["4"]["value"]
    (cell,) = (tmp_path / "b" / "cells").iterdir()
    result = CellResult.read(cell)
    assert [len(scores) for prompts in result.units.values() for scores in prompts.values()] == [4] * 12


async def test_an_endpoint_has_tokens_and_costs_by_the_prices_of_its_name(tmp_path):
    async with ChatServer(lambda request: assistant("yes")).serving() as server:
        prices = {"chat": {"prompt": 2.0, "completion": 10.0, "cached": 1.0}}
        models = ("expert", f"chat=m@{server.url}")
        suite = suite_of(["Guess"], models=models, prices=prices, n=5)
        benchmark = await asyncio.to_thread(play, tmp_path / "b", suite)
    rows = rows_of(benchmark)
    row = rows["Guess", "chat"]
    assert row["mean"]["value"] == 1.0
    assert (row["prompt_tokens"], row["completion_tokens"], row["cached_tokens"]) == (100, 25, 40)
    assert row["cost"] == pytest.approx((60 * 2.0 + 40 * 1.0 + 25 * 10.0) / 1e6)
    assert row["cost_per_episode"] == pytest.approx(row["cost"] / 5)
    assert rows["Guess", "expert"]["cost"] is None


def test_the_tokens_of_a_cell_are_read_by_the_tokenizer_of_its_model(tmp_path):
    words = train_tokenizer(["yes or no"], special_tokens=CALL_MARKERS, vocab_size=400)
    words.save_pretrained(tmp_path / "model")
    Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "vocab_size": 400})).save_pretrained(tmp_path / "model")
    suite = suite_of(
        ["Guess"], models=("expert", f"tiny={tmp_path / 'model'}"), n=2, rollout_max_context_len=64
    )
    rows = rows_of(play(tmp_path / "b", suite))
    assert token_texts(tmp_path / "b" / rows["Guess", "expert"]["folder"]) is None
    cell = tmp_path / "b" / rows["Guess", "tiny"]["folder"]
    texts = token_texts(cell)
    (journal,) = cell.glob("trajectories/*")
    ids = [
        id for e in read_journal(journal) for turn in e.episode.turns for id in turn.tokens.world_ids.tolist()
    ]
    assert len(ids) > 0
    assert list(map(texts, ids)) == [words.decode([id]) for id in ids]


def test_a_model_that_cannot_be_opened_costs_only_its_own_rows(tmp_path):
    models = ("expert", "chat=m@http://127.0.0.1:9/v1")
    rows = rows_of(play(tmp_path / "b", suite_of(["Guess"], models=models, n=3, openai_attempts=1)))
    assert rows["Guess", "expert"]["state"] == "done"
    assert "127.0.0.1:9" in rows["Guess", "chat"]["error"]


def test_the_prompt_of_a_turn_is_all_before_it():
    turns = (Turn((), say("a"), turn_tokens(5, 2), 0), Turn((), say("b"), turn_tokens(3, 4), 1))
    episode = Episode("e", "E-v0", Task.ask("t", "?"), 0, Limits(), (Trajectory(turns),), (), "completed")
    assert usage_of(episode) == Usage(prompt_tokens=5 + (5 + 2 + 3), completion_tokens=6)


def test_the_code_version_is_that_of_the_files_not_of_their_place(tmp_path, monkeypatch):
    def version(folder, text, name="mine"):
        package = tmp_path / folder / name
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(
            "from tests.evaluation.benchmark.worlds import Guess\nclass Mine(Guess): pass\n"
        )
        (package / "helper.py").write_text(text)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path / folder))
            sys.modules.pop(name, None)
            return code_version(find(f"{name}:Mine"))

    assert version("a", "x = 1") == version("b", "x = 1")
    assert version("a", "x = 2") != version("b", "x = 1")


def test_the_command_prints_the_table_and_its_exit_code_is_that_of_the_cells(tmp_path, capsys):
    def command(*words):
        with pytest.raises(SystemExit) as ended:
            main(["benchmark", *words])
        return ended.value.code

    folder = str(tmp_path / "b")
    main(["benchmark", f"{W}:Guess", "--model", "expert", "--n", "4", "--output-dir", folder, "--json"])
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["mean"]["value"] == 1.0
    main(["benchmark", folder, "--resume"])
    assert "1.000" in capsys.readouterr().out
    assert read_toml(tmp_path / "b" / "suite.toml")["override"] == {"n": "4"}
    assert command(f"{W}:Unbuildable", "--model", "expert", "--output-dir", str(tmp_path / "c")) == 1
    assert "is down" in capsys.readouterr().out
    for words in (
        ("Nope-v0", "--model", "expert"),
        (",".join(["Nope-v0"] * 100), "--model", "expert"),
        (f"{W}:Guess",),
        (str(tmp_path), "--resume"),
        (folder,),
        (),
    ):
        assert command(*words, "--output-dir", str(tmp_path / "d")) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "d").exists()


def test_two_processes_cannot_work_on_one_folder(tmp_path):
    with locked(tmp_path), pytest.raises(UserError, match="another process"):
        play(tmp_path, suite_of(["Guess"], n=2))


@pytest.mark.faults
@pytest.mark.parametrize("sign", ["KILL", "INT"])
def test_a_benchmark_that_is_stopped_at_half_ends_as_one_that_was_not(tmp_path, sign):
    """No episode that stands in a journal is played again, and the table is that of an undisturbed run."""
    words = [f"{W}:Guess,{W}:SlowGuess", "--model", "expert", "--model", "random", "--n", "200"]

    def start(folder, log):
        command = [sys.executable, "-c", HEARING, "benchmark", *words, "--output-dir", str(folder), "--json"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PLAYED": str(log)}
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)

    whole = json.loads(start(tmp_path / "whole", tmp_path / "a").communicate(timeout=300)[0])
    folder, log = tmp_path / "b", tmp_path / "c"
    process = start(folder, log)
    deadline = time.monotonic() + 200
    while not (log.exists() and len(log.read_text().splitlines()) > 300):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(getattr(signal, f"SIG{sign}"))
    process.communicate(timeout=60)
    recorded = {
        (path.parent.parent.name, entry.episode.id): entry.episode
        for path in folder.glob("cells/*/trajectories/*")
        for entry in read_journal(path)
    }
    assert 200 < len(recorded) < 800
    first_pid = log.read_text().split()[0]
    resumed = json.loads(start(folder, log).communicate(timeout=300)[0])
    second = [line.split() for line in log.read_text().splitlines() if not line.startswith(first_pid)]
    assert len(second) == 800 - len(recorded)
    assert [_scores(row) for row in resumed["rows"]] == [_scores(row) for row in whole["rows"]]
