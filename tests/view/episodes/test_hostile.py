"""Hostile and oversized text in a real browser: it is shown as it is, and does nothing."""

from __future__ import annotations

import re
from itertools import product

import pytest
from playwright.sync_api import expect

from agentrl.types import Message, Trajectory, Turn, say
from agentrl.view.episodes import write_site
from agentrl.view.transcript import visible
from tests.view.episodes.journals import (
    HOSTILE,
    WORDS,
    entry,
    failed,
    hostile,
    opened,
    searched,
    tokens,
    write,
)

pytestmark = [pytest.mark.full]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_shown_verbatim_and_does_nothing(page, tmp_path, text):
    attack = [entry(hostile(text)), entry(hostile(text, "g9-1")), failed("g9-2", detail=text)]
    run = write(tmp_path, {1: attack, 2: [entry(searched("g8-0"))]})
    attacked = write_site(run, run / "view", title=text, decoder_of=lambda _: lambda id: text)
    opened(page, attacked)
    seen = visible(text)
    assert page.locator("h1").text_content() == seen
    assert page.title() == re.sub(r"[ \t\n\f\r]+", " ", seen).strip()
    for address, view in product(
        ("step_000001/g9-0", "step_000001/g9-2", "step_000002/g8-0"), ("messages", "tokens", "siblings")
    ):
        page.evaluate(
            "([a, v]) => { location.hash = new URLSearchParams({episode: a, view: v}); }", [address, view]
        )
        expect(page.locator("#detail .path")).to_have_text(address)
        expect(page.locator(".tabs [aria-pressed=true]")).to_have_text(view.capitalize())
        if view == "messages" and address.endswith("g9-0"):
            texts = page.locator(".block > div").all_text_contents()
            assert texts.count(seen) >= 5
            assert page.locator("#detail h2").text_content() == seen
        if view == "messages" and address.endswith("g9-2"):
            assert seen in page.locator(".failure").text_content()
        if view == "tokens" and address.endswith("g8-0"):
            assert set(page.locator(".transcript .t").all_text_contents()) == {seen}
    query = text.encode("utf-8", "replace").decode()
    page.evaluate("q => { location.hash = new URLSearchParams({q}); }", query)
    expect(page.locator("#list")).to_have_attribute("aria-busy", "false")
    assert page.evaluate("document.scripts.length") == 1
    assert page.locator("img, iframe, object, form[action]").count() == 0
    folder = attacked.page.parent.as_uri()
    assert all(url.startswith(folder) for url in page.requests)


def test_the_policy_of_the_page_refuses_markup_and_code(page, tmp_path):
    """A mistake in the page's own script could not run recorded text, either."""
    run = write(tmp_path, {1: [entry(searched())]})
    opened(page, write_site(run, run / "view", title="x"))
    refused = page.evaluate(
        """() => {
          const results = [];
          const attempts = [
            () => { document.body.innerHTML = "<b>x</b>"; },
            () => { const s = document.createElement("script"); s.src = "https:" + "//x.invalid/x.js"; },
          ];
          for (const attempt of attempts) {
            try { attempt(); results.push("done"); } catch (error) { results.push(error.name); }
          }
          return results;
        }"""
    )
    assert "done" not in refused
    page.problems.clear()


def test_a_line_of_more_than_a_million_characters_is_bounded_and_can_be_opened(page, tmp_path):
    line = "x" * 1_400_000 + "the end"
    turn = Turn((Message("user", line),), say(line), tokens([1, 2], [3] * 30_000), 0)
    run = write(tmp_path, {1: [entry(searched(trajectories=(Trajectory((turn,)),)))]})
    large = write_site(run, run / "view", title="x", decoder_of=lambda _: WORDS.__getitem__)
    opened(page, large, "#episode=step_000001/g0-0")
    block = page.locator(".block.world > div").first
    expect(block).to_be_visible()
    assert len(block.text_content()) < 5_000
    block.get_by_role("button").click()
    assert 20_000 < len(block.text_content()) < 30_000
    page.keyboard.press("t")
    expect(page.locator(".transcript .t").first).to_be_visible()
    assert page.locator(".transcript .t").count() == 4000
    page.locator(".transcript > .more").click()
    assert page.locator(".transcript .t").count() == 8000
    page.evaluate("location.hash = '#q=the+end'")
    expect(page.locator("#count")).to_contain_text("1 of 1 episode")
    page.evaluate("location.hash = '#episode=step_000001/g0-0&token=29999'")
    expect(page.locator("#token")).to_contain_text("29999 of 30002")
    assert page.locator(".transcript .t").count() < 4100
