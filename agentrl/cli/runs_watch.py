"""`agentrl runs watch`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import rich_click as click

from agentrl.errors import ConfigError
from agentrl.records import read_metrics
from agentrl.records.diagnoses import read_diagnoses
from agentrl.records.history import METRICS
from agentrl.records.status import STATUS, read_status
from agentrl.runtime.files import write_text
from agentrl.runtime.ownership import check_own
from agentrl.view.live import LivePage
from agentrl.view.status import status_lines

PAGE = "live.html"


def watch(
    folder: Path,
    page: Path,
    *,
    every_s: int,
    state_of: Callable[[Path], str],
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Write a page of a run again and again, until the run is no longer running.

    state_of: of the run. pause: waits for so many seconds between two pages.

    Raises:
        ConfigError: the page cannot be written; or see `check_own`, where it belongs into the folder.
    """
    if page.parent == folder:
        check_own(folder)
    while True:
        state = state_of(folder)
        is_running = state == "running"
        lines = [*status_lines(read_status(folder), state)] if (folder / STATUS).exists() else [state]
        records = read_metrics(folder / METRICS) if (folder / METRICS).exists() else []
        shown = LivePage(folder.name, lines, records, read_diagnoses(folder), every_s if is_running else 0)
        try:
            write_text(page, shown.html(), errors="replace")
        except OSError as error:
            raise ConfigError(f"{page} cannot be written ({error.strerror}); choose another --out.") from None
        if not is_running:
            click.echo(f"{folder} is {state}: {page} is its last page.")
            return
        pause(every_s)
