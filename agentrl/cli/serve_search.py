"""`agentrl serve-search`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TypeVar

import rich_click as click
from rich.console import Console
from rich.progress import track

from agentrl.cli.commands import Command
from agentrl.cli.flags import config_flags, flag_values
from agentrl.config import Section, by_section, parse
from agentrl.tools.search.config import ServeSearch

_T = TypeVar("_T")


class _Flags(Section):
    search: ServeSearch = ServeSearch()


@config_flags(_Flags)
@click.command("serve-search", cls=Command)
@click.argument("corpus", metavar="CORPUS.jsonl|INDEX_FOLDER")
@click.option("--json", "as_json", is_flag=True, help="Print the address as one JSON line.")
def serve_search_command(corpus: str, as_json: bool, **flags: str | bool | None) -> None:
    """Serve passages over HTTP in the `/retrieve` protocol of Search-R1.

    A corpus holds one passage a line: {"id": "7", "contents": "Title\\nIts text."}. Give the address to
    `agentrl.tools.RemoteSearchTool`, or POST {"queries": ["who wrote Faust"], "topk": 3} to /retrieve.
    Ctrl-C ends it.
    """
    from agentrl.assembly.search import serve_search

    def ready(url: str, passages: int) -> None:
        line = f"{passages:,} passages at {url}/retrieve; Ctrl-C ends it."
        click.echo(json.dumps({"url": url, "passages": passages}) if as_json else line)

    settings = parse(_Flags, by_section(_Flags, flag_values(flags, _Flags)), source="the flags").search
    serve_search(corpus, settings, ready=ready, watch=_with_progress_bar)


def _with_progress_bar(steps: Iterable[_T], what: str, total: int | None) -> Iterable[_T]:
    # On stderr: a program may read the address on stdout.
    console = Console(stderr=True)
    return track(steps, what, total=total, console=console, transient=True, disable=not console.is_terminal)
