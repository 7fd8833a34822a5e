"""Synthetic runs for the tests of the view: an alphabet of made-up tokens, one episode, some records."""

from html.parser import HTMLParser

import numpy as np

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
    Trajectory,
    Turn,
    TurnTokens,
    Verdict,
    say,
)
from agentrl.view.report import ReportData, ReportEpisode
from agentrl.view.scores import ScoreRow

WORDS = ["Where was ", "Torba", " born?", "<search>", "Torba", "</search>", "in Kelmar", "Kelmar"]


def decode(id):
    return WORDS[id]


def turn_tokens(world, policy, version=3):
    size = len(policy)
    logprobs = -np.arange(size, dtype=np.float32)
    completion = Completion(
        np.array(policy, np.int32), logprobs, np.full(size, version, np.int32), Finish.STOP
    )
    return TurnTokens(np.array(world, np.int32), completion)


def episode(*, tokens=True, ending=Ending.COMPLETED, question="Where was Torba born?", answer="Kelmar"):
    search = ToolCall("search", {"query": "Torba"}, "<search>Torba</search>")
    turns = (
        Turn(
            (Message("user", question),),
            Message("assistant", tool_calls=(search,)),
            turn_tokens([0, 1, 2], [3, 4, 5]) if tokens else None,
        ),
        Turn((Message("tool", "in Kelmar"),), say(answer), turn_tokens([6], [7]) if tokens else None, 1),
    )
    failure = Failure("tool", "timeout", "took longer than 3 s") if ending is Ending.FAILED else None
    task = Task.ask("test/1", question, "Kelmar")
    return Episode("e0", "Echo-v0", task, 7, Limits(), (Trajectory(turns),), (None, 1.0), ending, failure)


VERDICT = Verdict("e0", "exact", 1.0, {"exact match": 1.0})
ROWS = (
    ScoreRow("after warm start", {"sampled": 0.25, "greedy": None}),
    ScoreRow("after RL", {"sampled": 0.9, "greedy": 0.975, "greedy, hops=2": 1.0}),
)
RECORDS = [
    {"step": 0, "time_s": 1.0, "eval/sampled": 0.0, "eval/greedy": 0.5},
    {"step": 0, "time_s": 2.0, "eval/sampled": 0.25, "eval/greedy/hops=2": 0.0, "eval/greedy/failures": 0.0},
    {"step": 1, "time_s": 3.0, "rollout/raw_reward": 0.25, "train/grad_norm": 12.5, "perf/rollout_time": 0.6},
    {"step": 2, "time_s": 4.0, "rollout/raw_reward": 0.75, "train/grad_norm": None, "train/unknown": 3.0},
    {"step": 2, "time_s": 4.5, "eval/sampled": 0.9, "eval/greedy": 0.975, "eval/greedy/hops=2": 1.0},
]


def report(**changes):
    fields = {
        "title": "a run",
        "rows": ROWS,
        "records": RECORDS,
        "episodes": [ReportEpisode("after RL", episode(), VERDICT)],
        "decode_token": decode,
        "facts": {"environment": "Echo-v0"},
        "config": {"run": {"seed": 0}},
    }
    return ReportData(**{**fields, **changes})


class Page(HTMLParser):
    """A parsed page: its tags in order, and the text, title and classes of each."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.texts, self._open = [], [], [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append(dict(attrs))
        self.texts.append("")
        self._open.append((tag, len(self.tags) - 1))

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_data(self, data):
        for _, index in self._open:
            self.texts[index] += data

    def with_class(self, name):
        return [i for i, a in enumerate(self.attributes) if name in (a.get("class") or "").split()]
