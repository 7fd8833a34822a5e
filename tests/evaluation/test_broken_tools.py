"""What a tool earns: the same episodes with the tool broken, in the same worlds and with the same draws."""

from __future__ import annotations

import asyncio
import io
import json
import re
import time
from collections import defaultdict

import pytest
from rich.console import Console

import agentrl
from agentrl import (
    JointStep,
    Limits,
    Message,
    MultiAgentEnv,
    Task,
    ToolCall,
    ToolEnv,
    ToolRejected,
    call,
    play,
    say,
)
from agentrl.cli import main
from agentrl.envs.agents import ScriptedAgent
from agentrl.errors import ConfigError
from agentrl.evaluation.benchmark.run import run_benchmark
from agentrl.evaluation.benchmark.suite import Suite, SuiteFile, envs_of, with_flags
from agentrl.evaluation.broken_tools import HOW, BrokenTool
from agentrl.records import read_journal
from agentrl.tools import tool
from agentrl.types.seams import ToolSchema
from agentrl.view.console import RunConsole
from tests.engine.chat.chat_server import USAGE, ChatServer, assistant, expert_of


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


async def test_a_slow_tool_takes_as_long_as_the_limits_let_it():
    """Of the turn's two calls one is stopped by the limit of a call, one by that of the turn."""

    class Brief(Dictionary):
        limits = Limits(tool_timeout_s=0.3, step_timeout_s=0.4, episode_timeout_s=0.6)

    env = BrokenTool("look_up", "slow").breaking(Brief)()
    two = Message(
        "assistant", tool_calls=tuple(ToolCall("look_up", {"word": word}, id=word) for word in ("a", "b"))
    )
    began = time.perf_counter()
    episode = await play(env, ScriptedAgent([two, two, say("yes")]), Dictionary().tasks("test")[0])
    took = time.perf_counter() - began
    heard = [message.text for turn in episode.turns[1:] for message in turn.observation]
    assert heard == [
        "look_up was stopped: it took longer than 0.3 s.",
        "look_up was stopped: the calls of this turn took longer than 0.4 s.",
        "look_up was stopped: the calls of this episode took longer than 0.6 s.",
        "This call was not executed: the calls of this episode took longer than 0.6 s.",
    ]
    assert took >= 0.6, "it is a real delay"
    assert (episode.counts["tool_timeouts"], episode.tools["look_up"].timeouts) == (3, 3)
    assert episode.failure is None, "and no failure of the world"


async def test_a_slow_tool_of_the_world_is_answered_and_nobody_waits_for_its_place():
    @tool(overrun="world", max_concurrency=1)
    async def fetch() -> str:
        """Fetch."""
        return "fetched"

    class Fetching(Dictionary):
        tools = (fetch,)
        limits = Limits(tool_timeout_s=0.4)

    make_env, task = BrokenTool("fetch", "slow").breaking(Fetching), Fetching().tasks("test")[0]
    began = time.perf_counter()
    episodes = await asyncio.gather(
        *(play(make_env(), ScriptedAgent([call("fetch"), say("yes")]), task) for _ in range(8))
    )
    assert time.perf_counter() - began < 8 * 0.4
    assert [episode.failure for episode in episodes] == [None] * 8
    assert {episode.turns[1].observation[0].text for episode in episodes} == {
        "fetch was stopped: it took longer than 0.4 s."
    }


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


ASK = ToolSchema("ask", "Ask the archive.", {"type": "object", "properties": {"at": {"type": "string"}}})
NOTE = ToolSchema("note", "Write down.", {"type": "object", "properties": {"at": {"type": "string"}}})


class Archive(MultiAgentEnv):
    """Two agents with the tool `ask`, one of whom has `note`, too; both act at once until both have answered.

    It answers calls itself, and `seen` has those that reach it.
    """

    id = "Archive-v0"
    possible_agents = ("reader", "writer")
    limits = Limits(max_turns=6, tool_timeout_s=0.2)

    def __init__(self):
        super().__init__()
        self.seen, self.paid = [], {}

    def tools_of(self, agent):
        return (ASK, NOTE) if agent == "writer" else (ASK,)

    def tasks(self, split):
        return [Task.ask(f"{split}-{n}", f"Where {n}?") for n in range(4)]

    async def reset(self, task, *, seed):
        self.acting = self.possible_agents
        return dict.fromkeys(self.acting, task.prompt), {}

    async def step(self, actions):
        assert set(actions) == set(self.acting), "all who were asked, at once"
        self.seen += [(agent, c.name) for agent, action in actions.items() for c in action.tool_calls]
        answers = {
            agent: tuple(
                Message(
                    "tool", f"{c.name} {c.arguments['at']} says one two three", tool_call_id=c.id, name=c.name
                )
                for c in action.tool_calls
            )
            for agent, action in actions.items()
            if action.tool_calls
        }
        for agent, action in actions.items():
            self.paid[agent] = float("says" in action.text)
        if answers:
            self.acting = tuple(answers)
            return JointStep.going(answers)
        return (None, self.paid, True, False, {})

    def expert(self, task, agent, prompt):
        told = yield Message(
            "assistant",
            tool_calls=tuple(
                ToolCall(n, {"at": agent}, id=n) for n in (("ask", "note") if agent == "writer" else ("ask",))
            ),
        )
        yield say(told)


async def archive(*broken):
    """An episode of the experts, and what reached the world."""
    made = []

    def make():
        made.append(Archive())
        return made[-1]

    env, task = BrokenTool.read(*broken).breaking(make)(), Archive().tasks("test")[0]
    agents = {
        name: ScriptedAgent(lambda prompt, n=name: env.expert(task, n, prompt))
        for name in env.possible_agents
    }
    episode = await play(env, agents, task)
    assert episode.failure is None, episode.failure
    heard = {name: [] for name in env.possible_agents}
    for trajectory in episode.trajectories:
        observed = (message for turn in trajectory.turns for message in turn.observation)
        heard[trajectory.agent] += [message.text for message in observed if message.role == "tool"]
    return episode, made[-1].seen, heard


@pytest.mark.parametrize(
    ("how", "answer"),
    [
        ("none", "There is no tool 'ask'; there are "),
        ("empty", ""),
        ("error", "ask is not available now."),
        ("slow", "ask was stopped: it took longer than 0.2 s."),
    ],
)
async def test_a_broken_tool_of_several_agents_never_reaches_the_world(how, answer):
    _, seen, heard = await archive(f"ask={how}")
    assert seen == [("writer", "note")]
    assert heard["reader"][0].startswith(answer)
    assert heard["writer"] == [
        heard["reader"][0].replace("are none", "are note"),
        "note writer says one two three",
    ]


@pytest.mark.parametrize("how", ["random", "wrong"])
async def test_of_several_agents_each_hears_another_answer(how):
    _, seen, heard = await archive(f"ask={how}")
    assert sorted(seen) == [("reader", "ask"), ("writer", "ask"), ("writer", "note")]
    assert heard["writer"][1] == "note writer says one two three", "the other tool is as it is"
    assert heard["writer"][0] != "ask writer says one two three"
    if how == "random":
        assert sorted(heard["reader"][0].split()) == sorted(["ask", "one", "reader", "says", "three", "two"])
    else:
        assert heard["writer"][0] == "ask reader says one two three"


async def test_the_tool_of_one_agent_is_broken_alone():
    episode, seen, heard = await archive("reader:ask=empty")
    assert sorted(seen) == [("writer", "ask"), ("writer", "note")]
    assert heard == {
        "reader": [""],
        "writer": ["ask writer says one two three", "note writer says one two three"],
    }
    assert [type(turn.action) for turn in episode.turns] == [Message] * len(episode.turns)
    offered = BrokenTool.read("writer:ask=none").breaking(Archive)()
    assert {name: [tool.name for tool in offered.tools_of(name)] for name in offered.possible_agents} == {
        "reader": ["ask"],
        "writer": ["note"],
    }
    assert {tool.name for tool in offered.tool_schemas} == {"ask", "note"}
    for text, sentence in {
        "reader:note=none": "reader has no tool `note`, only ask",
        "nobody:ask=none": "Archive-v0 has no agent `nobody`, only reader, writer",
        "aks=none": r"Archive-v0 has no tool `aks`, only ask, note\. Did you mean",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            BrokenTool.read(text).breaking(Archive)


def test_what_no_limit_would_end_is_one_sentence():
    class Endless(Dictionary):
        limits = Limits(tool_timeout_s=None, step_timeout_s=None, episode_timeout_s=None)

    with pytest.raises(ConfigError, match="a slow one would never end; set tool_timeout_s"):
        BrokenTool("look_up", "slow").breaking(Endless)
    with pytest.raises(ConfigError, match="FrozenLake-v0 has no tools beside its own actions"):
        BrokenTool("act", "empty").breaking(lambda: agentrl.make("FrozenLake-v0"))


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
        # By the server's own count; before the first episode it was asked once, as a check.
        num_requests = server.counts["requests"] - 1
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
    rows = dict(report.rows())
    assert int(rows["requests, broken tools included"]) == num_requests > 8 * 4
    assert int(rows["prompt tokens, broken tools included"]) == num_requests * USAGE["prompt_tokens"]
    assert (
        int(rows["prompt tokens"]) == int(rows["chat, requests"]) * USAGE["prompt_tokens"] < num_requests * 20
    )
    written = json.loads((folder / "report.json").read_text())
    assert written["spent"]["completion_tokens"] == num_requests * USAGE["completion_tokens"]
    assert written["sets"]["help=empty"]["difference"]["low"] == -0.5
    episodes = defaultdict(list)
    for path in (folder / "trajectories").iterdir():
        for entry in read_journal(path):
            episodes[entry.episode.id].append(entry.episode.seed)
    assert len(episodes) == 8
    assert all(len(seeds) == 4 and len({*seeds}) == 1 for seeds in episodes.values())


async def test_a_benchmark_has_a_row_for_each_and_a_table_of_what_the_tool_earns(tmp_path):
    suite = SuiteFile(env=envs_of("tests.evaluation.test_broken_tools:Needy"))
    tables = with_flags(
        suite,
        models=("expert", "null"),
        prices=None,
        override={"n": 4, "n_samples_per_eval_prompt": 2, "break_tool": ["help=none", "help=random"]},
    )
    folder = tmp_path / "benchmark"
    benchmark = await asyncio.to_thread(run_benchmark, Suite.of(tables), folder, RunConsole(quiet=True))
    own = "tests.evaluation.test_broken_tools:Needy"
    differences = {
        (row["env"].removeprefix(own), row["policy"]): row["difference"]["value"]
        for row in benchmark.rows
        if row["again"] == own
    }
    assert differences == {
        ("/help=none", "expert"): -0.5,
        ("/help=random", "expert"): 0.0,
        ("/help=none", "null"): 0.0,
        ("/help=random", "null"): 0.0,
    }
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(benchmark.tools_table())
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["help=none", "0.250", "[0.250,", "0.250]", "-0.500", "[-0.500,", "-0.010]"] in lines
    assert ["help=random", "0.750", "[0.750,", "0.750]", "0.000", "[0.000,", "0.000]"] in lines
    page = (folder / "benchmark.html").read_text()
    _, _, table = page.partition("What tools earn")
    assert re.search(
        r"help=none</th><td>0.250 \[0.250, 0.250\] \(.\)</td><td>-0.500 \[-0.500, -0.010\] \(w\)</td>", table
    ), table
    again = await asyncio.to_thread(run_benchmark, Suite.of(tables), folder, RunConsole(quiet=True))
    assert again == benchmark
    plain = with_flags(suite, models=("expert",), prices=None, override={"n": 4})
    whole = await asyncio.to_thread(run_benchmark, Suite.of(plain), tmp_path / "p", RunConsole(quiet=True))
    assert whole.tools_table() is None
    assert "What tools earn" not in (tmp_path / "p/benchmark.html").read_text()


async def test_a_benchmark_plays_an_environment_without_the_tool_as_it_is(tmp_path):
    needy, toolless = "tests.evaluation.test_broken_tools:Needy", "tests.evaluation.benchmark.worlds:Guess"
    suite = SuiteFile(env=envs_of(f"{toolless},{needy}"))
    override = {"n": 4, "break_tool": ["help=none"]}
    tables = with_flags(suite, models=("expert",), prices=None, override=override)
    benchmark = await asyncio.to_thread(run_benchmark, Suite.of(tables), tmp_path, RunConsole(quiet=True))
    rows = {row["env"]: row for row in benchmark.rows}
    played = {name for name, row in rows.items() if row["state"] == "done"}
    assert played == {toolless, needy, f"{needy}/help=none"}
    assert all(rows[name]["scored"] == 4 for name in played)
    name = f"{toolless}/help=none"
    assert rows[name]["state"] == "error"
    assert "tool" in rows[name]["error"]
    assert any(note.startswith(f"{name}, expert: ") for note in benchmark.notes())
    again = await asyncio.to_thread(run_benchmark, Suite.of(tables), tmp_path, RunConsole(quiet=True))
    assert again == benchmark


def test_a_tool_that_no_environment_of_a_benchmark_has_is_refused_before_any_is_played(tmp_path):
    needy, toolless = "tests.evaluation.test_broken_tools:Needy", "tests.evaluation.benchmark.worlds:Guess"
    suite = SuiteFile(env=envs_of(f"{toolless},{needy}"))
    override = {"n": 4, "break_tool": ["help=none", "halp=empty"]}
    tables = with_flags(suite, models=("expert",), prices=None, override=override)
    with pytest.raises(ConfigError, match=r"with halp=empty; .* Did you mean `help`"):
        run_benchmark(Suite.of(tables), tmp_path, RunConsole(quiet=True))
    assert not list(tmp_path.glob("cells/*/journal*"))


class Told(Archive):
    """Of the two only the reader is scored by what it says; the writer is a script, and always earns 1."""

    scripted_agents = ("writer",)
    limits = Limits(max_turns=6)

    async def step(self, actions):
        step = JointStep(*await super().step(actions))
        paid = step.reward and {**step.reward, "writer": 1.0 - step.reward["reader"]}
        return step._replace(reward=paid)


async def test_the_score_and_the_difference_are_of_those_that_the_policy_plays(tmp_path):
    """The script earns 1 where the tool is broken: it is in neither."""

    def reader(request):
        *_, last = request["messages"]
        if last["role"] == "tool":
            return assistant(last["content"] or "nothing", [])
        return assistant(None, [("ask", '{"at": "reader"}')])

    env_id = "tests.evaluation.test_broken_tools:Told"
    async with ChatServer(reader, key=None).serving() as server:
        settings = {"openai_url": server.url, "openai_model": "m", "n": 4, "break_tool": ["ask=empty"]}
        report = await asyncio.to_thread(agentrl.evaluate, env_id, quiet=True, **settings)
    assert (report.mean, report.sets["ask=empty"].mean) == (1.0, 0.0)
    assert report.sets["ask=empty"].difference.value == -1.0


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
