import os
import re
import shutil
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.types import Author, Ending
from agentrl.view.report import ReportEpisode, render_report, write_report
from agentrl.view.scores import ScoreRow
from agentrl.view.transcript import visible
from tests.view.synthetic import RECORDS, VERDICT, WORDS, Page, episode, report

BROWSERS = [
    path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))
]
EVIL = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='x",
    "</span></style>",
    "{{ 7 * 7 }}",
    "&lt;",
]


def pieces(page):
    """(block's author, text, title) of every token in the transcripts."""
    tokens_shown = []
    author = None
    transcript = page.with_class("transcript")[0]
    blocks, tokens = set(page.with_class("block")), set(page.with_class("t"))
    for index in range(transcript, len(page.tags)):
        if index in blocks:
            author = page.attributes[index]["class"].split()[1]
        if index in tokens:
            tokens_shown.append((author, page.texts[index], page.attributes[index].get("title")))
    return tokens_shown


def cells_after(page, name):
    """The cells of the first table of that class."""
    table = page.with_class(name)[0]
    tables = [i for i, tag in enumerate(page.tags) if tag == "table" and i > table]
    inside = range(table, tables[0] if tables else len(page.tags))
    return [page.texts[i] for i in inside if page.tags[i] in {"td", "th"}]


def test_each_token_shows_its_author_logprob_and_version():
    tokens = pieces(Page(render_report(report())))
    assert [author for author, _, _ in tokens] == ["world"] * 3 + ["policy"] * 3 + ["world", "policy"]
    assert [text for _, text, _ in tokens] == WORDS
    assert tokens[0][2] == "world · mask 0 · id 0"
    assert tokens[3][2] == "policy · mask 1 · logprob 0.000 (p = 1.00) · version 3 · id 3"
    assert tokens[4][2] == "policy · mask 1 · logprob -1.000 (p = 0.37) · version 3 · id 4"


def test_unlikely_tokens_are_tinted_more():
    page = Page(render_report(report()))
    styles = [page.attributes[i].get("style") for i in page.with_class("t")][-8:]
    assert styles[:3] == [None] * 3
    assert styles[3:6] == [None, "--surprise:0.33", "--surprise:0.67"]


def test_the_table_of_tokens_holds_every_token_in_order():
    page = Page(render_report(report()))
    cells = cells_after(page, "tokens")
    rows = [cells[k : k + 6] for k in range(6, len(cells), 6)]
    assert cells[:6] == ["#", "author", "text", "id", "logprob", "version"]
    assert [row[2] for row in rows] == WORDS
    assert rows[2] == ["2", "world", " born?", "2", "–", "–"]
    assert rows[4] == ["4", "policy", "Torba", "4", "-1.000", "3"]
    assert "All 8 tokens as a table" in page.texts[page.tags.index("details")]


def test_an_episode_without_tokens_shows_its_messages():
    entry = ReportEpisode("a demonstration", episode(tokens=False), VERDICT, Author.DEMO)
    tokens = pieces(Page(render_report(report(episodes=[entry]))))
    assert [(author, text) for author, text, _ in tokens] == [
        ("world", "Where was Torba born?"),
        ("demo", "<search>Torba</search>"),
        ("world", "in Kelmar"),
        ("demo", "Kelmar"),
    ]


def test_the_header_of_an_episode_shows_its_ending_and_reward():
    html = render_report(report())
    assert "test/1 · completed · reward 1 · 2 turns · expected <q>Kelmar</q> · exact match 1.000" in html
    broken = ReportEpisode("after RL", episode(ending=Ending.FAILED))
    html = render_report(report(episodes=[broken]))
    assert "failed · not scored" in html
    assert "tool timeout: took longer than 3 s" in html


def test_the_table_has_a_row_per_stage_and_a_dash_where_nothing_was_measured():
    page = Page(render_report(report()))
    assert cells_after(page, "scores")[:12] == [
        *("", "sampled", "greedy", "greedy, hops=2"),
        *("after warm start", "0.250", "–", "–"),
        *("after RL", "0.900", "0.975", "1.000"),
    ]
    bars = [a["style"] for a in page.attributes if a.get("style", "").startswith("width")]
    assert bars == ["width:25.0%", "width:90.0%", "width:97.5%", "width:100.0%"]


def test_scores_above_one_have_no_bars():
    rows = [ScoreRow("after RL", {"return": 21.5})]
    page = Page(render_report(report(rows=rows)))
    assert page.with_class("bar") == []
    assert "21.500" in page.texts[page.with_class("scores")[0]]


@pytest.mark.parametrize("evil", EVIL)
def test_nothing_a_model_or_a_world_writes_becomes_markup(evil):
    tame, wild = (Page(render_report(with_one_text(text))) for text in ("tame", evil))
    assert wild.tags == tame.tags
    assert [set(a) for a in wild.attributes] == [set(a) for a in tame.attributes]
    assert wild.texts[wild.tags.index("h1")] == evil
    assert all(text == evil for _, text, _ in pieces(wild)[:8])


def with_one_text(text):
    """A report in which every text from outside is the same."""
    return report(
        title=text,
        rows=[ScoreRow(text, {text: 0.5})],
        records=[{**RECORDS[0], f"eval/{text.replace('/', '')}": 0.5}],
        episodes=[
            ReportEpisode(text, episode(question=text, answer=text), VERDICT),
            ReportEpisode(text, episode(tokens=False, question=text, answer=text), VERDICT),
        ],
        decode_token=lambda id: text,
        facts={text: text},
        config={text: {text: text}},
    )


@given(st.text(st.characters(), min_size=1))
def test_any_token_text_is_shown_with_visible_control_characters(text):
    # A parser treats a lone carriage return as a line break, so none may remain.
    tokens = pieces(Page(render_report(report(decode_token=lambda id: text))))
    assert {text_shown for _, text_shown, _ in tokens} == {visible(text)}


def test_the_page_has_no_script_and_no_external_resource():
    html = render_report(report())
    page = Page(html)
    assert "script" not in page.tags
    assert not {"link", "img", "iframe", "object", "base"} & set(page.tags)
    names = {name for attributes in page.attributes for name in attributes}
    assert not {name for name in names if name.startswith("on")} | ({"src", "href", "srcset"} & names)
    assert not re.search(r"url\(|@import|https?:", html)
    assert "default-src 'none'" in html


def test_the_page_leads_to_the_pages_of_all_episodes():
    page = Page(render_report(report(folder="runs/<x>")))
    assert [a["href"] for a in page.attributes if "href" in a] == ["view/index.html"]
    assert "agentrl view runs/<x>" in page.texts


def test_the_page_is_written_atomically_over_an_old_one(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    records = [{"step": 0, "eval/\ud800": 0.5}]
    assert write_report(report(title="x\ud800y", records=records), path) == path
    assert "<h1>x‹U+D800›y</h1>" in path.read_text(encoding="utf-8")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_an_empty_run_has_a_page():
    page = Page(render_report(report(rows=[], records=[], episodes=[], facts={}, config={})))
    assert page.texts[page.tags.index("h1")] == "a run"
    assert "h2" not in page.tags


def test_every_section_chart_and_table_has_a_name():
    page = Page(render_report(report()))
    ids = [a["id"] for a in page.attributes if "id" in a]
    assert [a["aria-labelledby"] for a in page.attributes if "aria-labelledby" in a] == ids
    charts = [a for tag, a in zip(page.tags, page.attributes, strict=True) if tag == "svg" and "role" in a]
    assert len(charts) == page.tags.count("figure") == 5
    assert all(a["role"] == "img" and a["aria-label"] for a in charts)


def test_the_view_needs_no_torch(tmp_path):
    program = (
        "import sys, agentrl.view.report, agentrl.view.console, agentrl.view.curves;"
        "print({'torch', 'matplotlib', 'tensorboard'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.full
@pytest.mark.parametrize("browser", BROWSERS)
def test_a_real_browser_shows_the_page(browser, tmp_path):
    path = write_report(report(decode_token=lambda id: EVIL[id % len(EVIL)]), tmp_path / "report.html")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    home = f"--user-data-dir={tmp_path / 'profile'}"
    picture = tmp_path / "page.png"
    command = [browser, *flags, home, "--window-size=1200,1600"]
    subprocess.run(
        [*command, f"--screenshot={picture}", path.as_uri()], check=True, capture_output=True, timeout=120
    )
    assert picture.stat().st_size > 20_000
    done = subprocess.run(
        [*command, "--dump-dom", path.as_uri()], check=True, capture_output=True, timeout=120
    )
    page = Page(done.stdout.decode())
    assert page.tags == Page(path.read_text(encoding="utf-8")).tags
