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
    ToolStats,
    Trajectory,
    Turn,
    TurnTokens,
    Verdict,
    say,
)
from agentrl.view.report import ReportData, ReportEpisode
from agentrl.view.scores import ScoreRow, ToolRow

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
    ScoreRow("after RL", {"sampled": 0.9, "greedy": 0.975}, {"greedy, by hops": {"2": 1.0}}),
)
PRODUCTIONS = [
    f"production of {part}" for part in ("chains", "gears", "hinges", "springs", "valves", "wheels")
]
"""Kinds of tasks whose names begin alike."""
TOOLS = ("find_part", "count_parts", "order_parts_of_supplier")
REJECTED = {"type": 4, "required": 9, "additionalProperties": 1}
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


STAGES = ("before", "after warm start", "after RL")
SHARES = {name: n / 10 for n, name in enumerate(PRODUCTIONS, start=2)}
SETTINGS = {
    "run": {"name": "a-run", "seed": 3},
    "env": {"env": "factory:Factory", "env_kwargs": {"parts": ["gears", "chains"], "depth": 3}},
    "rollout": {"num_rollout": 20, "rollout_batch_size": 32, "n_samples_per_prompt": 8},
    "data": {"prompt_data": "a/rather/long/path/to/the/prompts/of/this/run/train-00000-of-00032.parquet"},
}


def crowded(**changes):
    """A report of a run with six kinds of tasks, three stages, three tools and long settings."""
    fields = {
        "title": "a-run",
        "rows": [
            ScoreRow(
                stage,
                {"sampled": level / 4, "sampled pass@8": level / 3, "greedy": level / 3},
                {"greedy, by production": {name: level * share / 3 for name, share in SHARES.items()}},
            )
            for level, stage in enumerate(STAGES)
        ],
        "records": [crowded_record(step) for step in range(0, 21, 2)],
        "tools": [
            ToolRow(
                name, stage, 64, ToolStats(90 + n, malformed=3, timeouts=n, rejected=REJECTED, seconds=0.4)
            )
            for name in TOOLS
            for n, stage in enumerate(STAGES)
        ],
        "config": SETTINGS,
        "defaults": {"rollout": {"n_samples_per_prompt": 8}},
        "limits": {"max_turns": 8, "max_tokens": 2048, "tool_timeout_s": "no limit"},
        "warnings": ["No group has a signal."],
    }
    return report(**{**fields, **changes})


def crowded_record(step):
    """The metrics of a step: scores of six kinds of tasks in two modes, statistics of three tools."""
    record = {"step": step, "time_s": 60.0 * step}
    for mode in ("sampled", "greedy"):
        record[f"eval/{mode}"] = (step + 1) / 22
        record |= {
            f"eval/{mode}/production={name}": share * (step + 1) / 22 for name, share in SHARES.items()
        }
    for n, name in enumerate(TOOLS, start=1):
        record[f"rollout/tool/{name}/calls/mean"] = step / n
        record[f"rollout/tool/{name}/latency_ms"] = 3.0 * n
        record[f"rollout/tool/{name}/rejected/type/mean"] = 2 / (step + n)
    return record


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
