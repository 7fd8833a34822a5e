import os
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.records.diagnoses import Diagnosis
from agentrl.types import Author, Ending, ToolStats
from agentrl.view.report import ReportEpisode, render_report, write_report
from agentrl.view.scores import ScoreRow, ToolRow
from agentrl.view.transcript import visible
from tests.view.synthetic import PRODUCTIONS, RECORDS, VERDICT, WORDS, Page, crowded, episode, report

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


def test_the_table_has_a_column_per_stage_and_a_dash_where_nothing_was_measured():
    page = Page(render_report(report()))
    assert cells_after(page, "scores")[:13] == [
        *("", "after warm start", "after RL"),
        *("sampled", "0.250", "0.900"),
        *("greedy", "–", "0.975"),
        "greedy, by hops",
        *("2", "–", "1.000"),
    ]
    bars = [a["style"] for a in page.attributes if a.get("style", "").startswith("width")]
    assert bars == ["width:25.0%", "width:90.0%", "width:97.5%", "width:100.0%"]


def test_a_diagnosis_is_shown_with_its_step_and_its_remedy_and_none_takes_no_room():
    made = Diagnosis("no-signal", 3, "in all 96 groups <b>the same</b>.", "easier tasks.")
    page = Page(render_report(report(diagnoses=[made], records=[])))
    (article,) = page.with_class("diagnosis")
    for text in ("no-signal", "at step 3", "in all 96 groups <b>the same</b>.", "Try: easier tasks."):
        assert text in page.texts[article]
    assert "b" not in page.tags
    assert "What goes wrong" not in render_report(report())


def test_named_sets_of_prompts_have_a_heading_each():
    rows = [
        ScoreRow("after RL", {"greedy": share}, set=name) for name, share in (("aime", 0.25), ("gpqa", 0.5))
    ]
    cells = cells_after(Page(render_report(report(rows=rows))), "scores")
    assert cells[:8] == ["", "after RL", "aime", "greedy", "0.250", "gpqa", "greedy", "0.500"]


def test_scores_above_one_have_no_bars():
    rows = [ScoreRow("after RL", {"return": 21.5})]
    page = Page(render_report(report(rows=rows)))
    assert page.with_class("bar") == []
    assert "21.500" in page.texts[page.with_class("scores")[0]]


def test_the_table_of_tools_has_the_calls_of_each_stage_and_what_went_wrong():
    stats = ToolStats(200, malformed=1, truncated=3, rejected={"type": 4, "required": 10}, seconds=0.398)
    rows = [ToolRow("find", "before", 50, ToolStats()), ToolRow("find", "after RL", 50, stats)]
    cells = cells_after(Page(render_report(report(tools=rows))), "tools")
    wrong = ("1 (0.5%)", "14 (7.0%)required\N{NO-BREAK SPACE}10, type\N{NO-BREAK SPACE}4", "3 (1.5%)")
    assert cells[:22] == [
        *("", "calls per episode", "calls", "malformed", "rejected", "cut", "ms per call"),
        "find",
        *("before", "0.000", "0", "0", "0", "0", "–"),
        *("after RL", "4.000", "200", *wrong, "2.000"),
    ]


def test_settings_of_its_own_and_limits_stand_above_all_settings():
    config = {"run": {"seed": 0, "name": "a"}, "env": {"env_kwargs": {"ä": True}}, "rollout": {"n": 8}}
    defaults = {"run": {"seed": 0, "name": None}, "env": {"env_kwargs": {}}, "rollout": {"n": 8}}
    html = render_report(report(config=config, defaults=defaults, limits={"max_turns": 4}))
    own, everything = html[html.index('id="config"') :].split("<details>")
    assert re.findall(r"<caption>(.*?)</caption>", own) == ["run", "env", "limits of an episode"]
    assert re.findall(r"<td>(.*?)</td>", own) == ["a", "{&#34;ä&#34;: true}", "4"]
    assert re.findall(r"<caption>(.*?)</caption>", everything) == ["run", "env", "rollout"]


def test_warnings_stand_above_all_else():
    html = render_report(report(warnings=["No group has a signal; try <easier> tasks."]))
    assert "No group has a signal; try &lt;easier&gt; tasks." in html
    assert html.index('id="warnings"') < html.index('id="results"')
    assert 'id="warnings"' not in render_report(report())


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
        rows=[ScoreRow(text, {text: 0.5}, {text: {text: 0.5}}, text)],
        warnings=[text],
        tools=[ToolRow(text, text, 1, ToolStats(1, rejected={text: 1}))],
        limits={text: text},
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
def test_a_real_browser_parses_the_page_as_it_was_written(page, tmp_path):
    path = write_report(report(decode_token=lambda id: EVIL[id % len(EVIL)]), tmp_path / "report.html")
    page.goto(path.as_uri())
    assert Page(page.content()).tags == Page(path.read_text(encoding="utf-8")).tags
    assert page.requests == [path.as_uri()]


CUT_OFF = """() => [...document.querySelectorAll("th, td, caption, li, dd, h1, h2, h3, p, figcaption")]
    .filter(node => node.offsetParent && node.scrollWidth > node.clientWidth + 1)
    .map(node => node.textContent)"""
OVERLAPS = """() => [...document.querySelectorAll("figure")].filter(figure => {
    const [names, chart] = [figure.querySelector(".legend"), figure.querySelector(":scope > svg")];
    return names && names.getBoundingClientRect().bottom > chart.getBoundingClientRect().top + 1;
}).map(figure => figure.textContent)"""


def styles_of_curves(figure, style):
    """A computed style of each curve of a chart."""
    curves = figure.locator("svg:not(.key) .curve")
    return curves.evaluate_all(f"nodes => nodes.map(node => getComputedStyle(node).{style})")


@pytest.mark.full
@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (800, "dark"), (1280, "light")])
def test_many_parts_are_all_legible_in_a_real_browser(page, tmp_path, width, scheme):
    path = write_report(crowded(), tmp_path / "report.html")
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.goto(path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CUT_OFF) == []
    assert page.evaluate(OVERLAPS) == []
    for name in PRODUCTIONS:
        assert page.get_by_role("rowheader", name=name, exact=True).is_visible()
    figure = page.locator("figure", has_text="Held-out success by production, greedy")
    assert figure.locator(".legend li").all_inner_texts() == PRODUCTIONS
    for style in ("stroke", "strokeDasharray"):
        assert len({*styles_of_curves(figure, style)}) == len(PRODUCTIONS)


@pytest.mark.full
def test_a_name_of_the_legend_fades_the_other_curves(page, tmp_path):
    page.goto(write_report(crowded(), tmp_path / "report.html").as_uri())
    figure = page.locator("figure", has_text="Held-out success by production, greedy")
    figure.locator(".legend li").nth(2).hover()
    assert [opacity == "1" for opacity in styles_of_curves(figure, "opacity")] == [n == 2 for n in range(6)]


@pytest.mark.full
def test_the_first_column_stays_where_a_wide_table_is_scrolled(page, tmp_path):
    page.set_viewport_size({"width": 360, "height": 900})
    page.goto(write_report(crowded(), tmp_path / "report.html").as_uri())
    region = page.get_by_role("region", name="Tools", exact=True)
    name = region.get_by_role("rowheader", name="before").first
    before = name.bounding_box()["x"]
    region.evaluate("node => node.scrollLeft = 200")
    assert region.evaluate("node => node.scrollLeft") > 100
    assert name.bounding_box()["x"] == before
