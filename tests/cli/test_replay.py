"""`agentrl replay`: a recorded episode is played again in the environment of its run."""

from __future__ import annotations

import asyncio
import json

import pytest

from agentrl import ScriptedAgent, Task, call, make, play, say
from agentrl.assembly.load import load_config
from agentrl.cli import main
from agentrl.config import parse, write_toml
from agentrl.envs import Scorer
from agentrl.evaluation.config import EvalConfig
from agentrl.records import Entry, Journal, Outcome
from tests.cli.light import run_light

TASK = Task.ask("t", "What is 2 + 3?", answer="5")


def script(*actions):
    return (action for action in actions)


async def entry(id, outcome, env_id="Calculator-v0"):
    env = make(env_id)
    actions = script(call("calc", expression="2 + 3"), say("5"))
    episode = await play(env, ScriptedAgent(actions), TASK, episode_id=id)
    scored = await Scorer(env.rewards).judge([await Scorer(env.rewards).mark(episode)])
    return Entry(episode, tuple(scored), outcome)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A run and an eval-only run."""
    monkeypatch.chdir(tmp_path)

    async def write():
        async with Journal(tmp_path / "runs" / "x") as journal:
            await journal.write_step(1, [await entry("g0-0", Outcome.TRAINED)])
            await journal.write_step(2, [await entry("g1-0", Outcome.TRAINED)])
            for name in ("a", "b"):
                await journal.write_eval(name, 0, [await entry("e0", Outcome.EVALUATED)])
        async with Journal(tmp_path / "scored") as journal:
            await journal.write_eval("test", 0, [await entry("e0", Outcome.EVALUATED)])

    asyncio.run(write())
    config = load_config(None, {"env": "Calculator-v0"})
    write_toml(config, tmp_path / "runs" / "x" / "config.toml", signed=True)
    write_toml(parse(EvalConfig, {}, source="x"), tmp_path / "scored" / "config.toml", signed=True)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "x:g0-0",
        "runs/x:g1-0",
        "runs/x/trajectories/eval_b_000000.jsonl.gz:e0",
        "scored/trajectories/eval_test_000000.jsonl.gz:e0",
    ],
)
def test_an_equal_episode_ends_with_0(runs, capsys, name):
    main(["replay", name])
    first, last = capsys.readouterr().out.splitlines()
    assert first.endswith(": Calculator-v0, 2 turns")
    assert last == "Everything that the environment returned is as recorded."


def test_a_difference_is_shown_and_ends_with_1(runs, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["replay", "x:g1-0", "--env", "tests.worlds:Parrot"])
    assert ended.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("turn 2, result of calc:")
    assert lines[at + 1 : at + 3] == ["  -5", "  +There is no tool 'calc'; there are echo, add."]
    assert lines[-1].endswith("differences (- recorded, + now).")


def test_machines_are_given_json(runs, capsys):
    main(["replay", "x:g0-0", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert (printed["equal"], printed["differences"], printed["turns"]) == (True, [], 2)
    with pytest.raises(SystemExit):
        main(["replay", "x:g1-0", "--env", "tests.worlds:Parrot", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert not printed["equal"]
    assert {**printed["differences"][0]} == {
        **{"turn": 2, "what": "result of calc", "expected": "5"},
        "actual": "There is no tool 'calc'; there are echo, add.",
    }


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["x"], "EPISODE is RUN:ID such as quickstart:g3-0"),
        (["x:g9-0"], "x has no episode g9-0; the ids stand in its trajectories/"),
        (["y:g0-0"], "holds no run `y`"),
        (["x:e0"], "x has 2 episodes e0; name the file of one, FILE:e0: "),
        (["runs/x/config.toml:g0-0"], "cannot be read"),
        (["x:g0-0", "--env", "Calculatr-v0"], "Did you mean"),
        (["x:g0-0", "--env-kwargs", "{"], "--env-kwargs takes a JSON object"),
        (["x:g0-0", "--env-kwargs", '{"colour": 1}'], "no argument `colour`"),
        (["x:g0-0", "--env", "RockPaperScissors-v0"], "play it in the environment that it was recorded in"),
    ],
)
def test_bad_input_is_one_sentence(runs, capsys, arguments, sentence):
    with pytest.raises(SystemExit) as ended:
        main(["replay", *arguments])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert sentence in line


def test_a_file_without_a_run_needs_the_name_of_its_environment(runs, capsys):
    (runs / "scored" / "config.toml").unlink()
    name = "scored/trajectories/eval_test_000000.jsonl.gz:e0"
    with pytest.raises(SystemExit):
        main(["replay", name])
    assert "name the environment of the episode with --env" in capsys.readouterr().err
    main(["replay", name, "--env", "Calculator-v0"])
    assert "as recorded" in capsys.readouterr().out


def test_the_core_alone_replays(runs):
    done = run_light(runs, "replay", "x:g0-0")
    assert (done.returncode, done.stderr) == (0, ""), done
