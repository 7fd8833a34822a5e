"""`agentrl export` and `agentrl import`: episodes in the formats of other tools."""

from __future__ import annotations

import json
from pathlib import Path

import rich_click as click

from agentrl.assembly.config import RunConfig
from agentrl.assembly.token_texts import named_model
from agentrl.cli.commands import Command
from agentrl.config import parse, parse_toml
from agentrl.errors import ConfigError
from agentrl.runtime.ownership import read_file
from agentrl.types import JSON
from agentrl.view.console import RunConsole
from agentrl.view.episodes.journals import find_journals
from agentrl.view.formats.exporting import chosen, export, left_out_text
from agentrl.view.formats.reading import files_of, import_files
from agentrl.view.formats.table import CONFIG, FORMATS
from agentrl.view.transcript import visible


@click.command("export", cls=Command)
@click.argument("run")
@click.option("--format", "name", type=click.Choice([*FORMATS]), required=True, help="Format to write.")
@click.option("--out", metavar="PATH", required=True, help="New file or folder.")
@click.option("--files", default="*", show_default=True, help="Files of the journal: step_*, eval_*, ...")
@click.option("--output-dir", default="runs", show_default=True, help="Folder of the runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for machines.")
def export_command(run: str, name: str, out: str, files: str, output_dir: str, as_json: bool) -> None:
    """Write the episodes of RUN in the format of another tool, and say what it does not hold.

    RUN is the name or the folder of a run, an evaluation or a benchmark, or one file of a journal. The run
    may be in progress.

    \b
    atif      Harbor's trajectories (ATIF-v1.8), with token ids and logprobs:
              a file of lines where PATH ends with .jsonl or .jsonl.gz,
              else a folder with a document for each episode
    messages  conversations for fine-tuning, a line each
    inspect   a folder of logs for `inspect view`, one for each file of the journal
    otel      OpenTelemetry's GenAI spans, OTLP as lines of JSON

    `agentrl import` reads atif and messages again.
    """
    path = next((path for path in (Path(output_dir) / run, Path(run)) if path.exists()), None)
    if path is None:
        raise ConfigError(f"there is no folder {run}, and no run of that name in {output_dir}; name one.")
    journals = chosen(find_journals(path), files)
    console, format = RunConsole(quiet=as_json), FORMATS[name]
    with console.stage(f"writing {name}", len(journals)) as bar:
        exported = export(journals, format, Path(out), bar, named_model)
    left_out: dict[str, JSON] = dict(exported.left_out)
    if as_json:
        facts: dict[str, JSON] = {"format": name, "out": out, "episodes": exported.num_episodes}
        click.echo(json.dumps({**facts, "left_out": left_out, "loses": format.loses}))
        return
    console.line(f"{exported.num_episodes:,} episodes: {out}")
    for sentence in (left_out_text(exported.left_out), format.loses):
        if sentence:
            console.line(sentence)


@click.command("import", cls=Command)
@click.argument("path")
@click.option("--out", metavar="DIR", required=True, help="New folder, of a run with these episodes.")
@click.option(
    "--config",
    metavar="FILE",
    help="config.toml or run file of what played the episodes; left out, the config.toml in PATH.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for machines.")
def import_command(path: str, out: str, config: str | None, as_json: bool) -> None:
    """Read trajectories of other tools into the journal of a new run's folder.

    PATH is a file of lines (.jsonl, .jsonl.gz), a document (.json), or a folder with such files: Harbor's
    trajectories (ATIF-v1.0 to 1.8), or conversations (rows with `messages`).

    The folder is one for `agentrl view`, `rescore` and `sft --sft-data DIR`. What `agentrl export --format
    atif` wrote is the same journal again, so `agentrl train --replay DIR` computes the same gradients; it
    takes the run's config.toml, and so does `sft` for the name of the model.

    Token ids count where a step has prompt_token_ids, completion_token_ids and logprobs.
    """
    source = Path(path)
    files = files_of(source)
    settings = _config(source, config)
    console = RunConsole(quiet=as_json)
    with console.stage(f"reading {path}", len(files)) as bar:
        imported = import_files(files, Path(out), settings, bar)
    notes = dict(imported.notes)
    if as_json:
        facts: dict[str, JSON] = {
            "out": out,
            "episodes": imported.num_episodes,
            "files": [*sorted(imported.files)],
        }
        formats: dict[str, JSON] = dict(imported.formats)
        left_out: dict[str, JSON] = dict(notes)
        click.echo(json.dumps({**facts, "formats": formats, "left_out": left_out}))
        return
    console.line(f"{imported.num_episodes:,} episodes: {out}")
    if notes:
        console.line(visible(left_out_text(notes)))


def _config(source: Path, named: str | None) -> bytes | None:
    """The run file of the episodes.

    Raises:
        ConfigError: it cannot be read, or is none.
    """
    path = source / CONFIG if named is None else Path(named)
    if named is None and not path.exists():
        return None
    try:
        data = read_file(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); name a run file.") from None
    if named is not None:
        parse(RunConfig, parse_toml(data, path), source=str(path))
    return data
