"""A real browser for the tests of the pages; without one there are none."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.view.browser import browsers, launched

# A machine under load is slow, and no test waits for what does not come.
TIMEOUT_MS = 120_000


@pytest.fixture(scope="module", params=browsers())
def browser(request):
    with launched(request.param) as opened:
        yield opened


@pytest.fixture
def page(browser):
    """A page that notes every error, dialog and request."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(TIMEOUT_MS)
    expect.set_options(timeout=TIMEOUT_MS)
    opened = context.new_page()
    opened.problems, opened.requests = [], []
    opened.on("console", lambda m: opened.problems.append(m.text) if m.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: opened.problems.append(str(error)))
    opened.on("dialog", lambda dialog: (opened.problems.append(dialog.message), dialog.dismiss()))
    opened.on("request", lambda request: opened.requests.append(request.url))
    yield opened
    assert opened.problems == []
    context.close()
