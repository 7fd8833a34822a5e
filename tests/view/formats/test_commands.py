"""`agentrl export` and `agentrl import`: whole or not at all, and files of anybody."""

from __future__ import annotations

import gzip
import json

import pytest

from agentrl.cli import main
from agentrl.records import members, read_journal
from tests.view.episodes.journals import HOSTILE, entry, failed, hostile, searched, write
from tests.view.formats.played import entries

FOREIGN = {
    "schema_version": "ATIF-v1.6",
    "session_id": "s-1",
    "agent": {"name": "terminus-2", "version": "2.0"},
    "steps": [
        {"step_id": 1, "source": "user", "message": "Fix it."},
        {
            "step_id": 2,
            "source": "agent",
            "message": "I look.",
            "tool_calls": [{"tool_call_id": "c1", "function_name": "bash", "arguments": {"command": "ls"}}],
            "observation": {"results": [{"source_call_id": "c1", "content": "a.py"}]},
            "metrics": {
                "prompt_token_ids": [1, 2, 3],
                "completion_token_ids": [4, 5],
                "logprobs": [-0.25, -1.5],
            },
        },
        {
            "step_id": 3,
            "source": "agent",
            "message": "Done.",
            "metrics": {
                "prompt_token_ids": [1, 2, 3, 4, 5, 6],
                "completion_token_ids": [7],
                "logprobs": [-0.5],
            },
        },
    ],
}


def fails(capsys, *arguments):
    """The sentence of a command that ends with exit code 2."""
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    assert ended.value.code == 2
    return capsys.readouterr().err


def imported(path, tmp_path, *arguments):
    out = tmp_path / "back"
    main(["import", str(path), "--out", str(out), *arguments])
    return out


def journal(folder):
    """The lines of a journal, file by file."""
    return {path.name: [*members.read_lines(path)] for path in sorted((folder / "trajectories").iterdir())}


def lines_of(path, *documents):
    path.write_text("".join(f"{json.dumps(document)}\n" for document in documents))
    return path


@pytest.fixture
def run(tmp_path):
    return write(tmp_path / "run", {1: entries(), 2: [entry(searched(f"g{n}-0")) for n in range(20, 4, -1)]})


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "folder"])
def test_a_journal_comes_back_line_by_line(run, tmp_path, name, capsys):
    main(["export", str(run), "--format", "atif", "--out", str(tmp_path / name)])
    assert "Nothing of an episode is lost" in capsys.readouterr().out
    assert journal(imported(tmp_path / name, tmp_path)) == journal(run)


def test_evaluations_and_texts_of_every_kind_come_back(tmp_path):
    told = {("test", 3): [entry(hostile(t, f"g{n}-0"), None, "evaluated") for n, t in enumerate(HOSTILE)]}
    run = write(tmp_path / "run", evaluations=told)
    main(["export", str(run), "--format", "atif", "--out", str(tmp_path / "x")])
    assert journal(imported(tmp_path / "x", tmp_path)) == journal(run)


def test_a_choice_of_files_is_exported(run, tmp_path, capsys):
    arguments = ["--files", "step_000002", "--out", str(tmp_path / "x.jsonl"), "--json"]
    main(["export", str(run), "--format", "otel", *arguments])
    facts = json.loads(capsys.readouterr().out)
    assert (facts["episodes"], facts["left_out"], facts["format"]) == (16, {}, "otel")
    assert len((tmp_path / "x.jsonl").read_text().splitlines()) == 16
    assert "fits `eval_*`; its files are step_000001" in fails(
        capsys, "export", run, "--format", "otel", "--files", "eval_*", "--out", tmp_path / "y"
    )


def test_what_exists_is_not_replaced_and_what_fails_leaves_nothing(run, tmp_path, capsys):
    taken = tmp_path / "taken"
    taken.write_text("mine")
    assert "taken exists" in fails(capsys, "export", run, "--format", "messages", "--out", taken)
    assert taken.read_text() == "mine"
    with (run / "trajectories" / "step_000002.jsonl.gz").open("r+b") as file:
        file.write(b"broken")
    for format in ("atif", "messages", "inspect", "otel"):
        assert "broken" in fails(capsys, "export", run, "--format", format, "--out", tmp_path / "new")
        assert {path.name for path in tmp_path.iterdir()} == {"run", "taken"}


def test_a_document_of_another_tool_has_its_turns_and_tokens(tmp_path):
    folder = imported(lines_of(tmp_path / "x.jsonl", FOREIGN), tmp_path)
    (found,) = read_journal(folder / "trajectories" / "eval_imported_000000.jsonl.gz")
    episode = found.episode
    assert (episode.env_id, episode.task.id, found.verdicts) == ("terminus-2", "s-1", ())
    assert [message.text for message in episode.task.prompt] == ["Fix it."]
    (trajectory,) = episode.trajectories
    assert [turn.tokens.world_ids.tolist() for turn in trajectory.turns] == [[1, 2, 3], [6]]
    assert [turn.tokens.completion.token_ids.tolist() for turn in trajectory.turns] == [[4, 5], [7]]
    assert [turn.tokens.completion.logprobs.tolist() for turn in trajectory.turns] == [[-0.25, -1.5], [-0.5]]
    (result,) = trajectory.turns[1].observation
    assert (result.role, result.name, result.tool_call_id, result.text) == ("tool", "bash", "c1", "a.py")


def test_a_prompt_that_was_written_anew_begins_a_trajectory(tmp_path):
    document = json.loads(json.dumps(FOREIGN))
    document["steps"][2]["metrics"]["prompt_token_ids"] = [1, 2, 9, 9]
    document["final_metrics"] = {"extra": {"reward": 0.5}}
    folder = imported(lines_of(tmp_path / "x.jsonl", document), tmp_path)
    (found,) = read_journal(folder / "trajectories" / "eval_imported_000000.jsonl.gz")
    _, second = found.episode.trajectories
    assert (second.parent, second.reason) == (0, "rewritten")
    assert second.turns[0].tokens.world_ids.tolist() == [1, 2, 9, 9]
    assert [message.role for message in second.turns[0].observation] == ["user", "assistant", "tool"]
    assert found.verdict.total == 0.5
    assert [turn.step for turn in found.episode.turns] == [0, 1]


def test_tokens_without_logprobs_are_left_out_and_counted(tmp_path, capsys):
    document = json.loads(json.dumps(FOREIGN))
    del document["steps"][2]["metrics"]["logprobs"]
    folder = imported(lines_of(tmp_path / "x.jsonl", document), tmp_path)
    assert "1 turns have token ids without logprobs" in capsys.readouterr().out
    (found,) = read_journal(folder / "trajectories" / "eval_imported_000000.jsonl.gz")
    assert [turn.tokens is None for turn in found.episode.turns] == [False, True]


def test_a_last_line_without_its_end_is_skipped_and_counted(tmp_path, capsys):
    path = lines_of(tmp_path / "x.jsonl", FOREIGN, FOREIGN)
    path.write_text(path.read_text() + json.dumps(FOREIGN)[:200])
    imported(path, tmp_path, "--json")
    facts = json.loads(capsys.readouterr().out)
    assert (facts["episodes"], [*facts["left_out"].values()]) == (2, [1])
    packed = tmp_path / "y.jsonl.gz"
    packed.write_bytes(gzip.compress(lines_of(tmp_path / "y.jsonl", *[FOREIGN] * 50).read_bytes())[:-9])
    main(["import", str(packed), "--out", str(tmp_path / "again"), "--json"])
    assert json.loads(capsys.readouterr().out)["episodes"] >= 1


def changed(**changes):
    return {**FOREIGN, **changes}


def with_metrics(**metrics):
    document = json.loads(json.dumps(FOREIGN))
    document["steps"][1]["metrics"] |= metrics
    return document


def own(file="step_000001", **entry):
    """A document that says that agentrl wrote it."""
    episode = {"id": "g0-0", "env_id": "e", "task": {"id": "t", "prompt": []}, "seed": 0, "limits": {}}
    episode |= {"step_rewards": [], "ending": "completed"}
    entry = {"outcome": "evaluated", "verdicts": [], "episode": episode, **entry}
    return changed(extra={"agentrl": {"file": file, "entry": entry}})


FOREIGN_VERDICT = {"episode_id": "b", "scorer": "x", "total": 1}
BAD = {
    "no object": ([1, 2], "line 1 holds no object"),
    "nothing known": ({"x": 1}, "line 1 holds neither a trajectory of ATIF"),
    "another version": (changed(schema_version="ATIF-v2.0"), "schema_version is 'ATIF-v2.0'"),
    "no steps": (changed(steps=3), "line 1 is no trajectory of ATIF: steps: Input should be a valid list"),
    "a token that is none": (with_metrics(prompt_token_ids=[-1]), "steps.1.metrics.prompt_token_ids.0"),
    "a large token": (with_metrics(completion_token_ids=[2**40, 1]), "completion_token_ids.0"),
    "no prompt": (with_metrics(prompt_token_ids=[]), "step 2: prompt_token_ids is empty"),
    "too few logprobs": (with_metrics(logprobs=[-1.0]), "must share one length"),
    "text for logprobs": (with_metrics(logprobs=["x", "y"]), "metrics.logprobs.0"),
    "a path out": (own("../../etc/step_000001", outcome="evaluated"), "is no name of a file of a journal"),
    "an absolute path": (own("/etc/step_000001"), "is no name of a file of a journal"),
    "the wrong file": (own("step_000001"), "evaluated does not belong into step_000001"),
    "a verdict of another": (own("eval_x_000000", verdicts=[FOREIGN_VERDICT]), "do not belong to episode"),
    "a reward of other JSON": (own("eval_x_000000", verdicts=3), "verdicts: Input should be a valid tuple"),
    "advantages of objects": (own("eval_x_000000", advantages={"a": [{}]}), "no list of numbers"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_one_sentence_and_leaves_nothing(name, tmp_path, capsys):
    document, sentence = BAD[name]
    path = lines_of(tmp_path / "x.jsonl", document)
    said = fails(capsys, "import", path, "--out", tmp_path / "back")
    assert said.count("\n") == 1
    assert sentence in said
    assert "x.jsonl line 1" in said
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


def test_an_episode_that_is_there_twice_is_refused(run, tmp_path, capsys):
    main(["export", str(run), "--format", "atif", "--out", str(tmp_path / "x.jsonl")])
    path = tmp_path / "x.jsonl"
    path.write_text(path.read_text() * 2)
    assert "is there twice" in fails(capsys, "import", path, "--out", tmp_path / "back")


def test_steps_whose_tokens_contradict_each_other_are_refused(run, tmp_path, capsys):
    main(["export", str(run), "--format", "atif", "--out", str(tmp_path / "x.jsonl")])
    first, *_ = (tmp_path / "x.jsonl").read_text().splitlines()
    document = json.loads(first)
    document["steps"][2]["metrics"]["prompt_token_ids"][0] += 1
    path = lines_of(tmp_path / "y.jsonl", document)
    assert "does not begin with the tokens" in fails(capsys, "import", path, "--out", tmp_path / "back")


def test_deep_and_long_lines_are_refused(tmp_path, capsys, monkeypatch):
    deep = tmp_path / "deep.jsonl"
    deep.write_text('{"schema_version": "ATIF-v1.8", "extra": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    assert "deep.jsonl line 1" in fails(capsys, "import", deep, "--out", tmp_path / "back")
    nested = FOREIGN
    for number in range(300):
        nested = changed(subagent_trajectories=[nested], trajectory_id=str(number))
    path = lines_of(tmp_path / "nested.jsonl", nested)
    said = fails(capsys, "import", path, "--out", tmp_path / "back")
    assert "maximum validation depth" in said
    assert len(said) < 500 + len(str(path))
    monkeypatch.setattr("agentrl.view.formats.reading.MAX_BYTES", 500)
    path = lines_of(tmp_path / "long.jsonl", FOREIGN)
    assert "long.jsonl line 1 has more than 500 bytes" in fails(
        capsys, "import", path, "--out", tmp_path / "back"
    )


def test_files_named_in_a_document_are_not_read(tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"secret")
    part = {"type": "image", "source": {"media_type": "image/png", "path": str(secret)}}
    steps = [{"step_id": 1, "source": "user", "message": [part]}, *FOREIGN["steps"][1:]]
    folder = imported(lines_of(tmp_path / "x.jsonl", changed(steps=steps)), tmp_path)
    (found,) = read_journal(folder / "trajectories" / "eval_imported_000000.jsonl.gz")
    assert found.episode.turns[0].observation[0].text == f"[image: {secret}]"


def test_what_is_not_there_is_named(tmp_path, capsys):
    assert "there is no file or folder" in fails(capsys, "import", tmp_path / "x", "--out", tmp_path / "back")
    (tmp_path / "empty").mkdir()
    assert "holds no .jsonl" in fails(capsys, "import", tmp_path / "empty", "--out", tmp_path / "back")
    lines_of(tmp_path / "empty" / "x.jsonl")
    assert "holds no episodes" in fails(capsys, "import", tmp_path / "empty", "--out", tmp_path / "back")
    lines_of(tmp_path / "empty" / "x.jsonl", FOREIGN)
    arguments = ("--out", tmp_path / "back", "--config", tmp_path / "empty" / "x.jsonl")
    assert "is not a TOML file" in fails(capsys, "import", tmp_path / "empty", *arguments)


def test_a_folder_of_harbors_jobs_has_trials_with_their_rewards(tmp_path, capsys):
    results = [{"rewards": {"reward": 1}}, {"rewards": {"reward": 0.25, "quality": 1}}, None]
    for number, result in enumerate(results):
        trial = tmp_path / "jobs" / f"fix-it__{number}"
        (trial / "agent").mkdir(parents=True)
        (trial / "agent" / "trajectory.json").write_text(json.dumps(FOREIGN))
        (trial / "result.json").write_text(json.dumps({"task_name": "fix-it", "verifier_result": result}))
    folder = imported(tmp_path / "jobs", tmp_path)
    found = [*read_journal(folder / "trajectories" / "eval_imported_000000.jsonl.gz")]
    assert [entry.verdict and entry.verdict.total for entry in found] == [1.0, 0.25, None]
    assert {entry.episode.task.id for entry in found} == {"fix-it"}
    assert [entry.episode.id for entry in found] == ["g0-0", "g1-0", "g2-0"]
    (tmp_path / "jobs" / "fix-it__2" / "result.json").write_text("[")
    assert "result.json is not JSON" in fails(capsys, "import", tmp_path / "jobs", "--out", tmp_path / "x")


def test_tokens_that_somebody_removed_are_counted(run, tmp_path, capsys):
    main(["export", str(run), "--format", "atif", "--out", str(tmp_path / "x.jsonl")])
    first, *_ = (tmp_path / "x.jsonl").read_text().splitlines()
    document = json.loads(first)
    for step in document["steps"]:
        step.pop("metrics", None)
    capsys.readouterr()
    imported(lines_of(tmp_path / "y.jsonl", document), tmp_path, "--json")
    assert [*json.loads(capsys.readouterr().out)["left_out"].values()] == [2]


def test_subagents_of_another_tool_are_trajectories_of_the_episode(tmp_path):
    inner = changed(trajectory_id="inner", steps=FOREIGN["steps"])
    folder = imported(lines_of(tmp_path / "x.jsonl", changed(subagent_trajectories=[inner, inner])), tmp_path)
    (found,) = read_journal(folder / "trajectories" / "eval_imported_000000.jsonl.gz")
    links = [(trajectory.parent, trajectory.reason) for trajectory in found.episode.trajectories]
    assert links == [(None, None), (0, "sub_agent"), (0, "sub_agent")]
    assert [turn.step for turn in found.episode.turns] == [*range(6)]


def test_the_journals_of_a_benchmark_keep_their_folders(tmp_path):
    for cell in ("cells/Echo-v0--random--1f", "cells/Echo-v0--expert--2a"):
        write(tmp_path / "bench" / cell, evaluations={("test", 0): [entry(searched(), outcome="evaluated")]})
    main(["export", str(tmp_path / "bench"), "--format", "atif", "--out", str(tmp_path / "x.jsonl")])
    folder = imported(tmp_path / "x.jsonl", tmp_path)
    for path in (tmp_path / "bench").rglob("*.jsonl.gz"):
        again = folder / path.relative_to(tmp_path / "bench")
        assert [*members.read_lines(again)] == [*members.read_lines(path)]


def test_settings_that_come_with_documents_start_nothing_of_others(run, tmp_path, capsys):
    main(["export", str(run), "--format", "atif", "--out", str(tmp_path / "x")])
    (tmp_path / "x" / "config.toml").write_text('[run]\nname = "x"\n[env]\nenv = "theirs:Env"\n')
    folder = imported(tmp_path / "x", tmp_path)
    assert "theirs:Env" in (folder / "config.toml").read_text()
    rescore = ("rescore", folder, "--reward", "f1", "--step-rewards", "again")
    assert "was not written for this user" in fails(capsys, *rescore)


@pytest.mark.parametrize("format", ["messages", "atif", "otel"])
def test_episodes_are_counted_that_the_file_has(tmp_path, capsys, format):
    """By the lines of the file; of a failed episode there is no conversation to imitate."""
    home = tmp_path / "run"
    write(home, {1: [entry(searched()), failed(), entry(searched(id="other"))]})
    out = tmp_path / "x.jsonl"
    main(["export", str(home), "--format", format, "--out", str(out), "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["episodes"] == len(out.read_text().splitlines()) == (2 if format == "messages" else 3)
    assert sum(facts["left_out"].values()) == 3 - facts["episodes"]
