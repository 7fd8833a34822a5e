"""What a tool earns: the same episodes with the tool broken, in the same worlds and with the same draws."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict

import pytest

import agentrl
from agentrl import Task, ToolEnv, ToolRejected, call, play, say
from agentrl.cli import main
from agentrl.envs.agents import ScriptedAgent
from agentrl.errors import ConfigError
from agentrl.evaluation.benchmark.run import run_benchmark
from agentrl.evaluation.benchmark.suite import Suite, SuiteFile, envs_of, with_flags
from agentrl.evaluation.broken_tools import HOW, BrokenTool
from agentrl.records import read_journal
from agentrl.view.console import RunConsole
from tests.engine.chat.chat_server import ChatServer, expert_of


async def look_up(word: str) -> str:
    """Look up a word.

    Args:
        word: the word.
    """
    if word == "nothing":
        raise ToolRejected("There is no such word.", "unknown")
    if word == "alone":
        return word
    return f"{word} means one two three four"


WORDS = sorted(["a", "means", "one", "two", "three", "four"])


class Dictionary(ToolEnv):
    """A look-up, and an answer."""

    id = "Dictionary-v0"
    tools = (look_up,)

    def tasks(self, split):
        return [Task.ask(f"{split}-{n}", f"What does w{n} mean?", answer="yes") for n in range(4)]

    def reward(self, task, answer):
        return float(answer == task.answer)


async def answers(how: str, *words: str) -> list[str]:
    """What the tool answers to a call of each word, in one episode."""
    make_env = BrokenTool("look_up", how).breaking(Dictionary)
    agent = ScriptedAgent([*(call("look_up", word=word) for word in words), say("yes")])
    episode = await play(make_env(), agent, Dictionary().tasks("test")[0])
    return [turn.observation[-1].text for turn in episode.turns[1:]]


async def test_each_way_gives_its_answers():
    assert await answers("empty", "a") == [""]
    assert "not available" in (await answers("error", "a"))[0]
    assert "took too long" in (await answers("slow", "a"))[0]
    assert "There is no tool" in (await answers("none", "a"))[0]
    (shuffled,) = await answers("random", "a")
    assert (
        sorted(shuffled.split()) == sorted(["a", "means", "one", "two", "three", "four"]) != shuffled.split()
    )
    assert (await answers("random", "a")) == [shuffled]
    first, second, third = await answers("wrong", "a", "b", "b")
    assert sorted(first.split()) == WORDS, "no other call yet"
    assert first != "a means one two three four"
    assert [second, third] == ["a means one two three four"] * 2
    assert await answers("wrong", "alone") == [""], "a single word in any order is the right answer"
    # What the model is told of its own mistakes stays.
    assert await answers("wrong", "nothing") == ["There is no such word."]


async def test_wrong_answers_come_from_earlier_episodes_too():
    make_env = BrokenTool("look_up", "wrong").breaking(Dictionary)
    heard = []
    for word in ("a", "b"):
        agent = ScriptedAgent([call("look_up", word=word), say("yes")])
        heard.append(
            (await play(make_env(), agent, Dictionary().tasks("test")[0])).turns[1].observation[-1].text
        )
    assert heard[1] == "a means one two three four"


def test_an_environment_without_the_tool_and_words_that_name_no_way_are_one_sentence():
    with pytest.raises(ConfigError, match=r"Dictionary-v0 has no tool `look`, only look_up\. Did you mean"):
        BrokenTool("look", "empty").breaking(Dictionary)
    for text, sentence in {
        "look_up": "write TOOL=HOW",
        "look_up=gone": "a tool is broken by none, empty",
        "=none": "write TOOL=HOW",
    }.items():
        with pytest.raises(ValueError, match=sentence):
            BrokenTool.read(text)
    assert all(BrokenTool.read(f"x={how}").name == f"x={how}" for how in HOW)


class Needy(ToolEnv):
    """Pays where the tool has helped; half as much where it said something else than that."""

    id = "Needy-v0"

    def __init__(self):
        self.tools = (self.help,)
        self.has_helped = False
        super().__init__()

    async def help(self) -> str:
        """Help."""
        self.has_helped = True
        return "helped"

    def tasks(self, split):
        return [Task.ask(f"{split}-{n}", f"Go {n}.", answer="done") for n in range(4)]

    def reward(self, task, answer):
        return 0.25 + 0.5 * self.has_helped

    def expert(self, task):
        yield call("help")
        yield say("done")


async def test_an_evaluation_compares_the_same_episodes(tmp_path):
    env_id, folder = "tests.evaluation.test_broken_tools:Needy", tmp_path / "eval"
    settings = {
        "n": 4,
        "n_samples_per_eval_prompt": 2,
        "break_tool": ["help=none", "help=empty", "help=random"],
    }
    async with ChatServer(expert_of(Needy(), "test"), key=None).serving() as server:
        settings |= {"openai_url": server.url, "openai_model": "m", "output_dir": str(folder)}
        report = await asyncio.to_thread(agentrl.evaluate, env_id, quiet=True, **settings)
        again = await asyncio.to_thread(agentrl.evaluate, env_id, quiet=True, resume=True, **settings)
    assert again == report
    # The broken ones have no part in the report itself.
    assert (report.n, report.mean) == (8, 0.75)
    assert {name: each.mean for name, each in report.sets.items()} == {
        "help=none": 0.25,
        "help=empty": 0.25,
        "help=random": 0.75,
    }
    assert report.sets["help=none"].difference.value == -0.5
    assert report.sets["help=random"].difference.value == 0.0
    assert dict(report.rows())["difference, help=none"].startswith("-0.500 (")
    written = json.loads((folder / "report.json").read_text())
    assert written["sets"]["help=empty"]["difference"]["low"] == -0.5
    episodes = defaultdict(list)
    for path in (folder / "trajectories").iterdir():
        for entry in read_journal(path):
            episodes[entry.episode.id].append(entry.episode.seed)
    assert len(episodes) == 8
    assert all(len(seeds) == 4 and len({*seeds}) == 1 for seeds in episodes.values())


async def test_a_benchmark_has_a_row_for_each(tmp_path):
    suite = SuiteFile(env=envs_of("tests.evaluation.test_broken_tools:Needy"))
    suite = Suite.of(
        with_flags(suite, models=("expert",), prices=None, override={"n": 4, "break_tool": ["help=none"]})
    )
    benchmark = await asyncio.to_thread(run_benchmark, suite, tmp_path / "benchmark", RunConsole(quiet=True))
    assert [row["mean"]["value"] for row in benchmark.rows] == [0.75, 0.25]


def test_a_way_that_does_not_exist_is_one_sentence_of_the_flags(capsys):
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "eval",
                "Calculator-v0",
                "--openai-url",
                "http://127.0.0.1:1",
                "--openai-model",
                "m",
                "--break-tool",
                "calculator=gone",
            ]
        )
    assert ended.value.code == 2
    assert "a tool is broken by none, empty" in capsys.readouterr().err
