"""What the report gets of a run: scores by set and kind, and the calls of each tool at each stage."""

from __future__ import annotations

from types import SimpleNamespace

from agentrl.evaluation.episodes import Evaluation
from agentrl.evaluation.report import EvalSetting, summarize
from agentrl.run import summary
from agentrl.run.parts import Milestone
from agentrl.types import Task, ToolStats, Verdict
from agentrl.view.scores import ScoreRow
from tests.view.episodes.journals import entry, searched, write


def evaluation(reward, *, calls):
    """Two episodes of one evaluation, each of a kind of its own."""
    episodes, verdicts = [], []
    for kind in ("a", "b=c"):
        task = Task.ask(kind, "Where was Torba born?", "Kelmar", kind=kind)
        episode = searched(f"{kind}-{reward}", task=task, tools={"search": ToolStats(calls)})
        episodes.append(episode)
        verdicts.append(Verdict(episode.id, "test", reward if kind == "a" else 0.0))
    report = summarize(episodes, verdicts, EvalSetting("X-v0", "test", 0.0, "kind"), seconds=1.0)
    return Evaluation("kind", report, tuple(episodes), tuple(verdicts))


def run_of(folder, *milestones):
    return SimpleNamespace(
        progress=SimpleNamespace(milestones=list(milestones)),
        records=SimpleNamespace(folder=SimpleNamespace(path=folder)),
    )


def milestone(name, evaluations, *, in_table=True):
    return Milestone(name, 0, in_table, evaluations, {})


def test_a_row_has_the_scores_of_a_set_and_the_greedy_ones_by_kind(tmp_path):
    evaluations = {
        f"{name}/{mode}": evaluation(reward, calls=1)
        for name in ("aime", "gpqa")
        for mode, reward in (("sampled", 0.5), ("greedy", 1.0))
    }
    rows = summary._rows(run_of(tmp_path, milestone("after RL", evaluations)))
    parts = {"greedy, by kind": {"a": 1.0, "b=c": 0.0}}
    scores = {"sampled": 0.25, "greedy": 0.5}
    assert rows == [ScoreRow("after RL", scores, parts, name) for name in ("aime", "gpqa")]


def test_tools_are_counted_over_all_episodes_of_a_stage(tmp_path):
    before = {"sampled": evaluation(0.0, calls=1), "greedy": evaluation(0.5, calls=2)}
    after = {"sampled": evaluation(0.5, calls=3), "greedy": evaluation(1.0, calls=4)}
    stages = (milestone("before", before), milestone("iteration 5", after, in_table=False))
    rows = summary._tools(run_of(tmp_path, *stages, milestone("after RL", after)))
    assert [(row.tool, row.stage, row.episodes, row.stats.calls) for row in rows] == [
        ("search", "before", 4, 6),
        ("search", "after RL", 4, 14),
    ]


def test_without_held_out_episodes_the_stages_are_the_first_and_the_last_step(tmp_path):
    steps = {
        step: [entry(searched(f"g{step}-0", tools={"search": ToolStats(step)}), 1.0)] for step in (1, 2, 10)
    }
    write(tmp_path, steps)
    rows = summary._tools(run_of(tmp_path))
    assert [(row.stage, row.episodes, row.stats.calls) for row in rows] == [
        ("step 1", 1, 1),
        ("step 10", 1, 10),
    ]
    only = tmp_path / "only"
    write(only, {3: steps[1]})
    assert [row.stage for row in summary._tools(run_of(only))] == ["step 3"]
    assert summary._tools(run_of(tmp_path / "none")) == []
