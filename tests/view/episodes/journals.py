"""Journals for the tests of the pages: episodes of known tokens, and hostile ones."""

from __future__ import annotations

import base64
import json
import re
import zlib

import numpy as np

from agentrl.evaluation.benchmark.report import Benchmark
from agentrl.records import Entry, Outcome, members
from agentrl.records.journal import SUFFIX, to_line
from agentrl.records.writer import file_name
from agentrl.types import (
    Completion,
    Ending,
    Episode,
    Failure,
    Finish,
    Limits,
    Message,
    Task,
    ToolCall,
    ToolStats,
    Trajectory,
    Turn,
    TurnTokens,
    Verdict,
)

WORDS = ["<pad>", " where", " was", " Torba", " born", "?", " in", " Kelmar", " Pado", " <b>"]
HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=alert(1)>",
    "javascript:alert(1)",
    "{{ 7 * 7 }} ${alert(1)} `+alert(1)+`",
    "]]><!--",
    "a\u2028b\u2029c",
    "\ud800 lone \udfff",
    "nul \0 bell \a escape \x1b[2J",
    "\u202egnp.exe \u2066x\u2069",
    '"); agentrl.receive("manifest-000000", "x"); ("',
    "__proto__",
)


def tokens(world, policy, *, version=3, logprobs=None):
    size = len(policy)
    values = np.array(logprobs or [-0.5 * k for k in range(size)], np.float32)
    completion = Completion(np.array(policy, np.int32), values, np.full(size, version, np.int32), Finish.STOP)
    return TurnTokens(np.array(world, np.int32), completion)


def searched(id="g0-0", *, answer=7, reward=1.0, version=3, **changes):
    """An episode of two turns: a call of the tool `search`, its result, an answer of one token."""
    call = ToolCall("search", {"query": "Torba"}, "<search>Torba</search>", "call_0")
    turns = (
        Turn(
            (Message("user", "Where was Torba born?"),),
            Message("assistant", "", tool_calls=(call,)),
            tokens([1, 2, 3, 4, 5], [3, 4], version=version),
        ),
        Turn(
            (Message("tool", "Torba was born in Kelmar", name="search", tool_call_id="call_0"),),
            Message("assistant", WORDS[answer].strip()),
            tokens([6, 7], [answer], version=version),
            1,
        ),
    )
    fields = {
        "id": id,
        "env_id": "Echo-v0",
        "task": Task.ask("rl/1", "Where was Torba born?", "Kelmar"),
        "seed": 7,
        "limits": Limits(),
        "trajectories": (Trajectory(turns),),
        "step_rewards": (None, reward),
        "ending": Ending.COMPLETED,
        "counts": {"tool_calls": 1},
        "tools": {"search": ToolStats(1, seconds=0.002)},
        "seconds": 0.25,
    }
    return Episode(**{**fields, **changes})


def entry(episode, reward=1.0, outcome=Outcome.TRAINED, **changes):
    """The entry of an episode, scored unless it failed."""
    verdicts = () if reward is None else (Verdict(episode.id, "env", reward, {"env": reward, "style": 0.5}),)
    return Entry(episode, verdicts, outcome, **changes)


def failed(id="g0-1-retry1", detail="took longer than 3 s"):
    """The entry of an episode that failed before its first turn."""
    failure = Failure("tool", "timeout", detail)
    episode = searched(
        id, trajectories=(), step_rewards=(), counts={}, tools={}, ending=Ending.FAILED, failure=failure
    )
    return entry(episode, None, Outcome.DROPPED, reason="tool_timeout")


def hostile(text, id="g9-0"):
    """An episode in which every text of a model or a world is the same."""
    call = ToolCall(text, {text: text}, text, text)
    wrong = ToolCall(text, None, text, text, text)
    prompt = (Message("system", text), Message("user", text))
    result = Message("tool", text, name=text, tool_call_id=text)
    turns = (
        Turn(prompt, Message("assistant", text, text, (call, wrong)), None),
        Turn((result,), Message("assistant", text), None, 1),
    )
    task = Task(text, (Message("user", text),), text, {text: text})
    return searched(
        id,
        env_id=text,
        task=task,
        trajectories=(Trajectory(turns, agent=text),),
        agents=(text,),
        tools={text: ToolStats(1, rejected={text: 1})},
        step_rewards=(),
    )


def write(run, steps=(), evaluations=()):
    """A journal: entries by step, and by (name, step)."""
    folder = run / "trajectories"
    folder.mkdir(parents=True, exist_ok=True)
    named = {f"step_{step:06d}": entries for step, entries in dict(steps).items()}
    named |= {
        f"eval_{file_name(name)}_{step:06d}": entries for (name, step), entries in dict(evaluations).items()
    }
    for name, entries in named.items():
        members.append(folder / f"{name}{SUFFIX}", map(to_line, entries), at=0)
    return run


def write_benchmark(folder, entries_by_policy):
    """The folder of a benchmark with a cell of each policy, and its table."""
    folder.mkdir(parents=True)
    rows = []
    for policy, entries in entries_by_policy.items():
        write(folder / "cells" / f"A-v0--{policy}", evaluations={("test", 0): entries})
        row = {"env": "A-v0", "policy": policy, "folder": f"cells/A-v0--{policy}", "mean": None}
        rows.append({**row, "state": "done", "scored": 0, "planned": len(entries)})
    Benchmark(folder, tuple(rows)).write()
    return folder


SCRIPT = re.compile(r'agentrl\.receive\("([a-z]+-\d{6})","([A-Za-z0-9+/=]*)"\);\n')


def payloads(site):
    """The contents of every script of the pages, by name. A script holds nothing but its base64."""
    contents = {}
    for path in sorted((site.page.parent / "data").iterdir()):
        match = SCRIPT.fullmatch(path.read_text(encoding="ascii"))
        assert match, path
        assert match[1] == path.stem
        contents[path.stem] = zlib.decompress(base64.b64decode(match[2]))
    return contents


def manifest(site):
    return json.loads(payloads(site)["manifest-000000"])


def rows(site):
    """The rows of the index, with the values of codes in their place."""
    contents, facts = payloads(site), manifest(site)
    listed = []
    for name in sorted(name for name in contents if name.startswith("index-")):
        part = json.loads(contents[name])
        assert part["first"] == len(listed)
        columns = part["columns"]
        for place in range(len(columns["id"])):
            row = {column: values[place] for column, values in columns.items()}
            row |= {column: values[row[column]] for column, values in facts["coded"].items()}
            file, task = facts["files"][row["file"]]["key"], row["task"]
            names = {"task": part["tasks"][task], "prompt": part["prompts"][task]}
            listed.append({**row, **names, "file": file})
    return listed


def shown_entries(site):
    """The entries that the page reads, as Python values."""
    contents = payloads(site)
    names = sorted(name for name in contents if name.startswith("episodes-"))
    return [json.loads(line) for name in names for line in contents[name].split(b"\n")]


def opened(page, site, address=""):
    """A browser's page with all of the index read."""
    page.goto(f"{site.page.as_uri()}{address}")
    page.wait_for_selector("html[data-state=ready]", state="attached")
    return page
