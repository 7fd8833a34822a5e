"""`agentrl view`: every episode of a run, an evaluation or a benchmark, as pages."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import rich_click as click

from agentrl.cli.commands import Command
from agentrl.errors import ConfigError
from agentrl.runtime.ownership import check_own
from agentrl.view.console import RunConsole
from agentrl.view.scores import size_text


@click.command("view", cls=Command)
@click.argument("folder")
@click.option(
    "--out", metavar="DIR", help="Folder to write; left out, `view` in FOLDER. Pages in it are replaced."
)
@click.option(
    "--tokenizer", metavar="DIR", help="Model directory with the tokenizer; left out, that of each run."
)
@click.option("--output-dir", default="runs", show_default=True, help="Folder of the runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for machines.")
def view_command(folder: str, out: str | None, tokenizer: str | None, output_dir: str, as_json: bool) -> None:
    """Write pages of all episodes in FOLDER, to search, filter and read them in a browser.

    FOLDER is the name or the folder of a run, the folder of an evaluation or of a benchmark, or any folder
    that has such ones below it; or one file of a journal (trajectories/*.jsonl.gz). The run may be in
    progress. The pages open from the disk: no server, no network.

    They show every token with its author, loss mask, logprob, policy version and advantage; tool calls with
    their results; rewards by part; siblings of a group side by side; and the curves of each run, whose points
    lead to the episodes behind them. What is chosen stands in the page's address, so every view is a link.
    """
    from agentrl.assembly.token_texts import token_texts
    from agentrl.evaluation.benchmark.report import link_episodes
    from agentrl.view.episodes import write_site
    from agentrl.view.episodes.journals import PAGES, find_journals

    path = next((path for path in (Path(output_dir) / folder, Path(folder)) if path.exists()), None)
    if path is None:
        raise ConfigError(f"there is no folder {folder}, and no run of that name in {output_dir}; name one.")
    home = path if path.is_dir() else path.parent
    if out is None:
        check_own(home, inside=False, remedy="name a folder of yours with --out")
    console, title = RunConsole(quiet=as_json), path.resolve().name
    with console.stage(f"reading {path}", len(find_journals(path))) as bar:
        site = write_site(
            path,
            home / PAGES if out is None else Path(out),
            title=title,
            decoder_of=partial(token_texts, tokenizer=tokenizer),
            progress=lambda _: bar.advance(),
        )
    if out is None:
        link_episodes(home)
    if as_json:
        click.echo(json.dumps({**site._asdict(), "page": str(site.page)}))
    else:
        console.line(f"{site.num_episodes:,} episodes, {size_text(site.num_bytes)}. Open in a browser:")
        console.line(site.page.resolve().as_uri())
