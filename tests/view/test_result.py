"""Results as a notebook shows them."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from agentrl.evaluation.report import EvalSetting, summarize
from agentrl.records import MetricLog
from agentrl.run.results import SftResult, TrainResult
from agentrl.run.stages import StageTime
from agentrl.view.result import ShownResult

SCRIPT = "<script>alert(1)</script>"


class Page(HTMLParser):
    """The texts of a page's cells and headings, and its tags; unclosed tags are an error."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.open, self.texts = [], [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip() and self.open[-1] != "style":
            self.texts.append(data.strip())


def logged(folder, rows):
    with MetricLog(folder, use_tensorboard=False) as log:
        for step, row in enumerate(rows, start=1):
            log.log(step, row)


def report(mean):
    return summarize([], [], EvalSetting("Maze-v0", "test", 1.0, None), seconds=1.0).__class__(
        **{
            **summarize([], [], EvalSetting("Maze-v0", "test", 1.0, None), seconds=1.0).as_json(),
            "mean": mean,
        }
    )


def test_a_run_shows_its_scores_by_milestone_and_its_curves(tmp_path):
    logged(tmp_path, [{"eval/greedy": 0.1 * step, "rollout/raw_reward": 0.2 * step} for step in range(3)])
    reports = {
        "before": {"sampled": report(0.125), "greedy": report(0.25)},
        "after RL": {"sampled": report(0.5), "greedy": report(0.75)},
    }
    result = TrainResult(tmp_path, "Maze-v0", reports, (StageTime("RL", 3, 61.0, 9.0),))
    page = Page(result._repr_html_())
    assert [row["step"] for row in result.metrics] == [1, 2, 3]
    place = page.texts.index("greedy, mean")
    assert page.texts[place + 1 : place + 3] == ["0.250 (0.000 to 0.000)", "0.750 (0.000 to 0.000)"]
    assert {"before", "after RL", "Maze-v0", "1 min 01 s", str(tmp_path / "report.html")} <= set(page.texts)
    assert "Success on held-out tasks" in page.texts
    curves = [attrs for tag, attrs in page.tags if tag == "path" and attrs["class"].startswith("curve")]
    assert len(curves) == 2
    assert all(re.match(r"M[\d.]+ [\d.]+ L", curve["d"]) for curve in curves)


def test_a_run_that_measured_nothing_shows_what_there_is(tmp_path):
    page = Page(TrainResult(tmp_path, "Maze-v0", {}, ())._repr_html_())
    assert "Maze-v0" in page.texts
    assert not [tag for tag, _ in page.tags if tag in ("table", "svg")]


def test_sft_shows_its_losses(tmp_path):
    logged(tmp_path, [{"train/loss": 2.0 / step, "eval/loss": 3.0 / step} for step in (1, 2)])
    page = Page(SftResult(tmp_path, 2, {0: 3.0, 2: 1.5}, 40, {"too long": 2})._repr_html_())
    assert {"held-out loss, step 2", "1.500", "left out, too long", "Loss"} <= set(page.texts)


def test_an_evaluation_shows_its_rows():
    page = Page(report(0.5)._repr_html_())
    place = page.texts.index("mean")
    assert page.texts[place + 1] == "0.500 (0.000 to 0.000)"
    assert "Maze-v0 (test), temperature 1" in page.texts


def test_texts_are_escaped_and_nothing_is_fetched(tmp_path):
    shown = ShownResult(SCRIPT, {SCRIPT: SCRIPT}, (SCRIPT,), [(SCRIPT, (SCRIPT,))]).html()
    page = Page(shown)
    assert SCRIPT in page.texts
    assert {tag for tag, _ in page.tags} <= {
        "div",
        "style",
        "h3",
        "table",
        "thead",
        "tbody",
        "tr",
        "td",
        "th",
    }
    assert "http" not in shown
    assert "url(" not in shown


def test_facts_are_no_list_which_notebooks_set_in_columns_that_overlap():
    page = Page(ShownResult("x", {"folder": "runs/a-long-name"}).html())
    assert not {"dl", "dt", "dd"} & {tag for tag, _ in page.tags}
    assert {"folder", "runs/a-long-name"} <= set(page.texts)


def test_the_style_reaches_nothing_outside():
    style = re.search(r"<style>(.*?)</style>", ShownResult("x").html(), re.DOTALL)[1]
    depth, outside = 0, ""
    for character in style:
        depth += {"{": 1, "}": -1}.get(character, 0)
        outside += character if depth == 0 else ""
    assert depth == 0
    selectors = {selector.strip() for selector in outside.split("}") if selector.strip()}
    assert all(selector.startswith(".agentrl") for selector in selectors)
    assert ":root" not in style
    assert "--s0: #0b5cad" in style
    assert Path(__file__).exists()
