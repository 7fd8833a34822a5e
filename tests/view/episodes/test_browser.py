"""The pages in a real browser, opened from the disk: what they show, and that nothing recorded can act."""

from __future__ import annotations

import re

import numpy as np
import pytest
from playwright.sync_api import expect

from agentrl.cli import main
from agentrl.records import Outcome, lines
from agentrl.types import Ending, Episode, Limits, Message, Task, ToolStats, Trajectory, Turn, say
from agentrl.view.episodes import write_site
from tests.view.episodes.journals import WORDS, entry, failed, opened, searched, write, write_benchmark

pytestmark = [pytest.mark.full]
FACTS = [
    ("g0-0", 1.0, "completed"),
    ("g0-1", 0.0, "completed"),
    ("g1-0", 0.25, "truncated"),
    ("g1-1", 0.75, "completed"),
    ("g2-0", 0.5, "completed"),
    ("g2-1", -1.0, "truncated"),
]


def entries_of_two_steps():
    """Two steps; siblings differ in the last token, and g2-1 has a tool that was never called."""
    made = []
    for id, reward, ending in FACTS:
        answer = 7 if reward > 0 else 8
        tools = {} if id == "g2-1" else {"search": ToolStats(1)}
        episode = searched(id, answer=answer, ending=Ending(ending), tools=tools)
        made.append(entry(episode, reward, advantages={"agent": np.array([reward - 0.5], np.float32)}))
    return {1: made[:4], 2: made[4:]}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages of a run with two steps, an evaluation and curves."""
    run = tmp_path_factory.mktemp("runs") / "run"
    held_out = [entry(searched(f"e{n}"), 1.0, Outcome.EVALUATED) for n in range(3)]
    write(run, entries_of_two_steps(), {("greedy after RL", 2): held_out})
    rows = [{"step": 1, "time_s": 1, "rollout/raw_reward": 0.5}, {"step": 2, "time_s": 2, "eval/greedy": 1.0}]
    lines.append(run / "metrics.jsonl", map(lines.to_line, rows))
    return write_site(run, run / "view", title="a run", decoder_of=lambda _: WORDS.__getitem__)


def listed(page):
    """The ids of the list, once it is complete."""
    expect(page.locator("#list")).to_have_attribute("aria-busy", "false")
    return [text.strip() for text in page.locator("#rows .name small").all_inner_texts()]


def test_the_list_has_every_episode_and_no_request_leaves_the_folder(page, site):
    opened(page, site)
    assert listed(page) == [*(id for id, _, _ in FACTS), "e0", "e1", "e2"]
    expect(page.locator("#count")).to_have_text("9 of 9 episodes, mean reward 0.500")
    folder = site.page.parent.as_uri()
    assert all(url.startswith(folder) for url in page.requests)
    # The page, the manifest, the index; and the first episode with the texts of its tokens.
    assert len(page.requests) == 5


def test_the_page_of_a_benchmark_leads_to_the_episodes_of_each_cell_and_back(page, tmp_path):
    cells = {
        policy: [entry(searched(f"{policy}-{n}"), 1.0, Outcome.EVALUATED) for n in range(2)]
        for policy in "xy"
    }
    folder = write_benchmark(tmp_path / "runs" / "a bench #1", cells)
    moved = folder.rename(tmp_path / "moved")
    main(["view", str(moved)])
    page.goto((moved / "benchmark.html").as_uri())
    page.get_by_role("link", name="y", exact=True).click()
    assert listed(page) == ["y-0", "y-1"]
    page.get_by_role("link", name="Benchmark").click()
    page.get_by_role("link", name="All episodes").click()
    assert listed(page) == ["x-0", "x-1", "y-0", "y-1"]


def test_the_first_episode_is_open_and_the_address_stays(page, site):
    opened(page, site, "#sort=-reward")
    expect(page.locator("#detail h2")).to_have_text("rl/1")
    assert page.locator(".item.open .name small").inner_text().strip() == "g0-0"
    assert page.url.endswith("#sort=-reward")
    page.keyboard.press("t")
    expect(page.locator(".tabs [aria-pressed=true]")).to_have_text("Tokens")
    assert "episode=step_000001%2Fg0-0" in page.url


def test_the_list_shows_prompts_and_the_task_below(page, site):
    opened(page, site)
    row = page.locator(".item").first
    assert row.locator(".name").inner_text().startswith("Where was Torba born?")
    assert "step_000001 · rl/1 · completed" in row.locator(".about").inner_text().replace(
        "step 1", "step_000001"
    )


def test_tasks_are_filtered_by_what_is_short_in_their_metadata(page, tmp_path):
    kinds = [
        {"kind": "free", "n": 1},
        {"kind": "<b>taken", "n": 1},
        {"kind": "free", "n": 1, "__proto__": "x"},
        {},
    ]
    made = [
        entry(searched(f"e{n}", task=Task.ask(f"t{n}", "?", **facts)), 1.0, Outcome.EVALUATED)
        for n, facts in enumerate(kinds)
    ]
    write(tmp_path, {}, {("greedy", 0): made})
    site = write_site(tmp_path, tmp_path / "view", title="x")
    opened(page, site)
    page.locator("#more summary").click()
    # `n` has one value, so there is nothing to choose.
    assert page.locator("#fact option").all_inner_texts() == ["any", "kind = <b>taken", "kind = free"]
    page.select_option("#fact", "kind=free")
    expect(page.locator("#count")).to_contain_text("2 of 4 episodes")
    assert listed(page) == ["e0", "e2"]
    again = opened(page.context.new_page(), site, "#fact=kind%3D%3Cb%3Etaken")
    assert listed(again) == ["e1"]
    assert listed(opened(page.context.new_page(), site, "#fact=kind%3Dnothing")) == []


@pytest.mark.parametrize(
    ("address", "predicate"),
    [
        ("reward=0.5..", lambda id, reward, ending: reward >= 0.5),
        ("reward=..0", lambda id, reward, ending: reward <= 0),
        ("reward=0..0.5&ending=completed", lambda id, reward, ending: id in ("g0-1", "g2-0")),
        ("step=2..", lambda id, reward, ending: id.startswith("g2")),
        ("file=step_000001", lambda id, reward, ending: id < "g2"),
        ("tool=search", lambda id, reward, ending: id != "g2-1"),
        ("q=pado", lambda id, reward, ending: reward <= 0),
        ("q=KELMAR+rl/1", lambda id, reward, ending: False),
        ("q=g1-", lambda id, reward, ending: id.startswith("g1")),
        ("q=born&reward=..0", lambda id, reward, ending: reward <= 0),
        ("file=step_*&sort=-reward", lambda id, reward, ending: True),
        ("file=nothing", lambda id, reward, ending: False),
        ("sort=constructor&ending=__proto__", lambda id, reward, ending: False),
    ],
)  # fmt: skip
def test_filters_leave_what_a_loop_over_the_entries_leaves(page, site, address, predicate):
    opened(page, site, f"#{address}")
    expected = [id for id, reward, ending in FACTS if predicate(id, reward, ending)]
    if "sort=-reward" in address:
        rewards = {id: reward for id, reward, _ in FACTS}
        expected = sorted(expected, key=lambda id: -rewards[id])
    assert [id for id in listed(page) if id.startswith("g")] == expected


def test_typing_filters_the_list_and_the_address_is_a_link(page, site):
    opened(page, site)
    page.fill("#q", "pado")
    expect(page.locator("#count")).to_contain_text("2 of 9 episodes")
    page.locator("#more summary").click()
    page.fill("#reward-low", "-0.5")
    expect(page.locator("#count")).to_contain_text("1 of 9 episodes")
    assert page.url.endswith("#q=pado&reward=-0.5..")
    again = opened(page.context.new_page(), site, "#q=pado&reward=-0.5..")
    assert listed(again) == ["g0-1"]
    assert again.input_value("#reward-low") == "-0.5"
    page.get_by_role("button", name="Show all").click()
    expect(page.locator("#count")).to_contain_text("9 of 9 episodes")


def test_each_token_shows_its_author_mask_logprob_version_and_advantage(page, site):
    opened(page, site, "#view=tokens&episode=step_000001/g0-0")
    shown = page.locator(".transcript .t").all()
    assert [node.text_content() for node in shown] == [WORDS[id] for id in (1, 2, 3, 4, 5, 3, 4, 6, 7, 7)]
    titles = [node.get_attribute("title") for node in shown]
    assert titles[0] == "world · mask 0 · id 1"
    assert titles[5] == "policy · mask 1 · logprob 0 (p = 1.00) · version 3 · advantage 0.500 · id 3"
    assert titles[6] == "policy · mask 1 · logprob -0.500 (p = 0.61) · version 3 · advantage 0.500 · id 4"
    authors = [node.locator("xpath=..").get_attribute("class") for node in shown]
    assert authors == ["block world"] * 5 + ["block policy"] * 2 + ["block world"] * 2 + ["block policy"]


def test_messages_have_calls_results_rewards_and_their_parts(page, site):
    opened(page, site, "#episode=step_000001/g0-0")
    text = page.inner_text("#detail")
    for part in (
        "call of search",
        "query",
        "Torba",
        "result of search",
        "Torba was born in Kelmar",
        "Kelmar",
    ):
        assert part in text
    for part in (
        "reward, env",
        "reward, style",
        "reward of this step: 1",
        "expected",
        "policy version",
        "advantage",
    ):
        assert part in text
    calls = page.locator("table.tokens").inner_text()
    assert re.search(r"search\s+1\s+0", calls)


def test_a_failure_shows_its_cause_and_the_prompt(page, tmp_path):
    run = write(tmp_path, {1: [failed()]})
    opened(page, write_site(run, run / "view", title="x"), "#episode=step_000001/g0-1-retry1")
    text = page.inner_text("#detail")
    assert "tool timeout: took longer than 3 s" in text.replace("\n", " ")
    assert "Where was Torba born?" in text


def test_siblings_stand_side_by_side_with_their_first_difference_marked(page, site):
    opened(page, site, "#view=siblings&episode=step_000001/g0-0")
    columns = page.locator(".sibling")
    expect(columns).to_have_count(2)
    assert columns.locator("mark").all_text_contents() == [" Kelmar", " Pado"]
    assert columns.locator(".hint").nth(1).inner_text() == "the first 9 tokens are shared"
    columns.nth(1).locator("a").click()
    expect(page.locator("h2").first).to_be_visible()
    expect(page.locator(".sibling.open a")).to_have_text("g0-1")


def test_siblings_without_tokens_are_compared_word_by_word(page, tmp_path):
    def spoken(id, *words):
        turn = Turn((Message("user", "Say two words."),), say(" ".join(words)), None)
        task = Task.ask("t", "Say two words.")
        return Episode(id, "E-v0", task, 0, Limits(), (Trajectory((turn,)),), (), Ending.COMPLETED)

    made = [spoken("e0", "red", "fox"), spoken("e1", "red", "hen"), spoken("e2", "red", "fox")]
    run = write(tmp_path, (), {("x", 0): [entry(episode, 1.0, Outcome.EVALUATED) for episode in made]})
    opened(page, write_site(run, run / "view", title="x"), "#view=siblings&episode=eval_x_000000/e0")
    assert page.locator(".sibling mark").all_text_contents() == ["fox", "hen"]
    assert "equal" in page.locator(".sibling").nth(2).inner_text()


def test_a_link_leads_to_a_token(page, site):
    opened(page, site, "#episode=step_000001/g0-1&token=9")
    chosen = page.locator("#token")
    text = " ".join(chosen.inner_text().split())
    assert text == (
        'token 9 of 10 text " Pado" id 8 author policy loss mask 1 logprob 0 probability 1 policy version 3 '
        "advantage -0.500 turn 1"
    )
    assert page.locator(".t.chosen").text_content() == " Pado"
    page.keyboard.press("ArrowLeft")
    expect(chosen).to_contain_text("token 8 of 10".replace("token ", ""))


def test_the_keyboard_reaches_everything(page, site):
    opened(page, site)
    expect(page.locator("#detail .path")).to_have_text("step_000001/g0-0")
    page.keyboard.press("j")
    expect(page.locator("#detail .path")).to_have_text("step_000001/g0-1")
    page.keyboard.press("k")
    page.keyboard.press("]")
    expect(page.locator("#detail .path")).to_have_text("step_000001/g0-1")
    page.keyboard.press("t")
    expect(page.locator(".transcript.by-author .t").first).to_be_visible()
    page.keyboard.press("c")
    expect(page.locator(".transcript.by-logprob")).to_be_visible()
    page.keyboard.press("s")
    expect(page.locator(".sibling")).to_have_count(2)
    page.keyboard.press("m")
    expect(page.locator(".call")).to_be_visible()
    page.keyboard.press("?")
    expect(page.locator("#keys")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    expect(page.locator("#q")).to_be_focused()
    page.keyboard.type("pado")
    expect(page.locator("#count")).to_contain_text("2 of 9 episodes")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    expect(page.locator("#detail .path")).to_have_text("step_000002/g2-1")


def test_the_back_button_returns_to_the_episode_before(page, site):
    opened(page, site)
    page.locator("#rows .item").nth(0).click()
    page.locator("#rows .item").nth(3).click()
    expect(page.locator("#detail .path")).to_have_text("step_000001/g1-1")
    page.go_back()
    expect(page.locator("#detail .path")).to_have_text("step_000001/g0-0")


def test_a_point_of_a_curve_leads_to_its_episodes(page, site):
    opened(page, site)
    page.get_by_role("link", name="Curves").click()
    page.locator("a .reach").first.click()
    page.wait_for_selector("html[data-state=ready]", state="attached")
    assert listed(page) == ["e0", "e1", "e2"]
    assert page.input_value("#file") == "eval_greedy-after-RL_000002"


def test_an_address_that_leads_nowhere_is_one_sentence(page, site):
    opened(page, site, "#episode=step_000009/x")
    expect(page.locator("#detail")).to_have_text("There is no episode step_000009/x here.")


def test_a_lost_script_is_one_sentence(page, tmp_path):
    run = write(tmp_path, {1: [entry(searched())]})
    lost = write_site(run, run / "view", title="x")
    (lost.page.parent / "data" / "episodes-000000.js").unlink()
    opened(page, lost, "#episode=step_000001/g0-0")
    expect(page.locator("#detail")).to_contain_text(
        "data/episodes-000000.js cannot be read; make the pages again"
    )
    assert all("ERR_FILE_NOT_FOUND" in problem for problem in page.problems)
    page.problems.clear()


LUMINANCE = """
() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => {
    const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgb.slice(0, 3).map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = (node) => {
    for (let n = node; n; n = n.parentElement) {
      const color = parse(getComputedStyle(n).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const texts = "#detail dd, #detail dt, #detail .block, #detail .label, #count, .about, .score, h1, mark";
  const nodes = document.querySelectorAll(texts);
  return [...nodes].map((node) => {
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(background(node))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  });
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast_in_both_schemes(page, site, scheme):
    page.emulate_media(color_scheme=scheme)
    for view in ("messages", "siblings"):
        opened(page, site, f"#view={view}&episode=step_000001/g0-0")
        expect(page.locator("#detail .path")).to_be_visible()
        ratios = page.evaluate(LUMINANCE)
        assert len(ratios) > 10
        assert min(ratios) >= 4.5
        page.goto("about:blank")
    paper = {"light": "rgb(255, 255, 255)", "dark": "rgb(16, 20, 24)"}
    opened(page, site)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == paper[scheme]


def test_every_control_has_a_name(page, site):
    opened(page, site, "#view=tokens&episode=step_000001/g0-0")
    page.locator("#more summary").click()
    nameless = page.evaluate(
        """() => {
          const isNamed = (node) => node.labels?.length || node.textContent.trim()
            || node.getAttribute("aria-label") || node.getAttribute("aria-labelledby");
          const controls = document.querySelectorAll("input, select, button, dialog, [role=listbox]");
          return [...controls].filter((node) => !isNamed(node)).map((node) => node.outerHTML);
        }"""
    )
    assert nameless == []
