"""`agentrl simulate`: how fast a run would be, with more GPUs or another staleness."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import rich_click as click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.cli.commands import Command
from agentrl.cli.flags import config_flags, flag_values
from agentrl.errors import ConfigError
from agentrl.rollout.config import RolloutConfig
from agentrl_simulate.request import SCHEDULING, SimulationFlags, requested, save_model
from agentrl_simulate.sweep import Sweep, SweepRow, best_of

_UNUSED = tuple(name for name in RolloutConfig.model_fields if name not in SCHEDULING)
_SPELLINGS = tuple(RolloutConfig.spellings)


@config_flags(SimulationFlags, without=(*_UNUSED, *_SPELLINGS))
@click.command("simulate", cls=Command, context_settings={"show_default": False})
@click.argument("run", required=False, type=click.Path())
@click.option(
    "--from",
    "folders",
    multiple=True,
    metavar="FOLDER",
    help="Folder of a finished run: its episodes are played, and the speeds of engine and trainer are "
    "measured in it; may be given several times.",
)
@click.option("--model", metavar="FILE", help="TOML file with the table [simulate], in place of --from.")
@click.option(
    "--save-model",
    "saved",
    metavar="FILE",
    help="Write the table [simulate] with all of its numbers into a file, to change it and give it again.",
)
@click.option(
    "--gpus", type=click.IntRange(min=2), help="Compare splits of so many GPUs between playing and training."
)
@click.option(
    "--max-staleness",
    metavar="COUNTS",
    help="Values of max_staleness that are compared, such as 0,1,2,4; left out, that of RUN.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for machines.")
def simulate_command(
    run: str | None,
    folders: tuple[str, ...],
    model: str | None,
    saved: str | None,
    as_json: bool,
    **flags: str | bool | int | None,
) -> None:
    """Simulate the run of RUN, a TOML file: steps/s, staleness, and how long each side waits.

    The producer, the staleness policy and the order of an iteration are those of `agentrl train`, in virtual
    time: hours take seconds, and nothing is started. Episodes, engines and trainer are models, whose numbers
    are measured in finished runs (--from) or given (--model, and flags). Without either they are those of the
    defaults below, which are nobody's machine; but those of a Megatron trainer are predicted from the model
    and layout of RUN, and the output says by what.

    \b
    agentrl simulate run.toml --from runs/first                          the run as it is, as a check
    agentrl simulate run.toml --from runs/first --max-staleness 0,1,2,4  what staleness gains
    agentrl simulate run.toml --from runs/first --gpus 1024              how many GPUs should play
    agentrl simulate run.toml --turns 1 --turn-len 4000                  before there is a run

    What is assumed of more GPUs: engines of engine_gpus GPUs are all as fast as the measured one, and share
    the episodes evenly. A trainer on twice as many GPUs is 2 x trainer_scaling times as fast;
    optimizer_step_s, publish_s and between_s stay as they are. Evaluations and checkpoints are left out.

    Where engine and trainer share processors, measure a synchronous and an asynchronous run (two --from): how
    much they slow each other down follows from both.
    """
    gpus, staleness = flags.pop("gpus"), flags.pop("max_staleness")
    texts = {name: value for name, value in flags.items() if isinstance(value, str | bool)}
    settings = flag_values(texts, SimulationFlags)
    compared = None if staleness is None else _counts(str(staleness))
    if compared is not None:
        settings["max_staleness"] = max(compared)
    if gpus is not None and (ignored := sorted(set(settings) & {"rollout_gpus", "train_gpus", "colocate"})):
        raise ConfigError(
            f"{ignored[0]} has no effect with --gpus, which compares all splits; drop one of them."
        )
    sweep = requested(run, settings, folders, model)
    if saved is not None:
        save_model(sweep.section, Path(saved))
    values = compared or [sweep.rollout.max_staleness]
    rows = sweep.over_splits(gpus, values) if isinstance(gpus, int) else sweep.over_staleness(values)
    _show(sweep, rows, as_json=as_json)


def _show(sweep: Sweep, rows: Sequence[SweepRow], *, as_json: bool) -> None:
    best = best_of(rows)
    if as_json:
        result = {
            "rows": [row.as_json() for row in rows],
            "best": None if best is None else best.as_json(),
            "model": sweep.section.model_dump(mode="json"),
            "predicted": {**sweep.sources},
        }
        click.echo(json.dumps(result))
        return
    console = Console(highlight=False)
    console.print(_table(rows, best))
    for row in rows:
        if row.problem:
            text = f"{row.sizes}, max_staleness {row.max_staleness}: {row.problem}"
            console.print(Text(text), soft_wrap=True)
    console.print(Text(_NOTE), soft_wrap=True)
    for line in _predictions(sweep):
        console.print(Text(line), soft_wrap=True)


def _predictions(sweep: Sweep) -> Iterator[str]:
    """A line for each source of predicted values."""
    by_source: dict[str, list[str]] = {}
    for name, source in sweep.sources.items():
        by_source.setdefault(source, []).append(f"{name} = {getattr(sweep.section, name):,.4g}")
    yield from (f"{source}: {', '.join(values)}." for source, values in by_source.items())
    if by_source:
        yield (
            "All else, how long episodes are above all, is given by flags, or the default, which is nobody's "
            "machine."
        )


_NOTE = (
    "GPUs: those that play + those that train. allowed: max_staleness. stale, oldest: mean and maximum of "
    "the trained tokens (versions). engines, trainer: share of the time at work. wait: of the trainer for "
    "groups, in an iteration (seconds). tok/s: sampled. *: the fastest."
)


def _counts(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"--max-staleness takes counts such as 0,1,2,4, got {text!r}.")
    return sorted({int(word) for word in words})


def _table(rows: Sequence[SweepRow], best: SweepRow | None) -> Table:
    # With two spaces between, splits of 100,000 GPUs fit 80 columns.
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    names = ("GPUs", "allowed", "steps/s", "stale", "oldest", "engines", "trainer", "wait", "tok/s")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        is_best = row is best and len(rows) > 1
        name = f"* {row.sizes}" if is_best else str(row.sizes)
        table.add_row(name, str(row.max_staleness), *_cells(row), style="bold" if is_best else "")
    return table


def _cells(row: SweepRow) -> Iterator[str]:
    if row.run is None:
        yield "ended"
        return
    figures = row.run.figures
    yield f"{figures['steps_per_s']:.3g}"
    yield f"{figures['staleness_mean']:.2f}"
    yield f"{figures['staleness_max']:.0f}"
    yield f"{figures['engine_busy']:.0%}"
    yield f"{figures['trainer_busy']:.0%}"
    yield f"{figures['wait_s']:.3g}"
    yield f"{figures['sampled_tok_per_s']:,.0f}"
