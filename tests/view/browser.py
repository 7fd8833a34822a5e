"""A real browser: Chromium as the system installed it, driven by playwright.

`python -m tests.view.browser PAGE ADDRESS PICTURE` takes the pictures of docs/view-episodes.md: a page on the
disk, what stands behind its #, and the file to write.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def browsers() -> list[str]:
    """The paths of the browsers of this machine."""
    return [path for name in _NAMES if (path := shutil.which(name)) is not None]


@contextmanager
def launched(path: str) -> Iterator[Browser]:
    """A headless browser; it ends with the block."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, headless=True, args=list(_FLAGS))
        try:
            yield browser
        finally:
            browser.close()


def take_picture(page: Path, address: str, picture: Path) -> None:
    """Write a picture of a page of `agentrl view` that was opened with `address` behind its #."""
    with launched(browsers()[0]) as browser:
        opened = browser.new_page(viewport={"width": 1280, "height": 860}, device_scale_factor=1.5)
        opened.goto(f"{page.resolve().as_uri()}#{address}")
        opened.wait_for_selector("html[data-state=ready]", state="attached")
        opened.screenshot(path=picture)


if __name__ == "__main__":
    take_picture(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
