"""`agentrl rescore`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.cli.commands import Command
from agentrl.cli.runs import run_folder
from agentrl.records import read_journal
from agentrl.records.history import JOURNAL
from agentrl.runtime.interrupts import run_until_signal
from agentrl.types import JSON
from agentrl.view.scores import score_text
from agentrl.view.transcript import visible

if TYPE_CHECKING:
    from agentrl.evaluation.rescore import NewRewards, Rescorer, Rescoring, StepRewards

_NUM_LISTED = 10
"""The largest changes that are listed (count)."""


@click.command("rescore", cls=Command)
@click.argument("run")
@click.option(
    "--reward",
    "names",
    multiple=True,
    required=True,
    metavar="NAME",
    help="package.module:name of a function, Reward or GroupReward, or a built-in reward of an answer. "
    "Several are summed.",
)
@click.option(
    "--step-rewards",
    "steps",
    type=click.Choice(["keep", "drop", "again"]),
    default="keep",
    show_default=True,
    help="The environment's own step rewards: keep the recorded ones, drop them, or compute them again.",
)
@click.option("--files", default="*", show_default=True, help="Files of the journal: step_*, eval_*, ...")
@click.option("--output-dir", default="runs", show_default=True, help="Folder of the runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for machines.")
def rescore_command(
    run: str,
    names: tuple[str, ...],
    steps: StepRewards,
    files: str,
    output_dir: str,
    as_json: bool,
) -> None:
    """Score the saved episodes of RUN by other rewards, and compare: no model is loaded, nothing is sampled.

    RUN is a run, the output_dir of `agentrl eval`, or a cell of a benchmark. A function takes an episode, or
    a task and an answer. The new score is the sum of the step rewards and of these rewards:

        agentrl rescore runs/quickstart --reward my_rewards:brevity
        agentrl rescore runs/quickstart --reward f1 --step-rewards drop --files 'eval_*'

    With --step-rewards again the recorded actions are played in the environment, as by `agentrl replay`.

    The verdicts in the journal stay; the new ones go to RUN/rescored/NAME-HASH/, with a hash of the code.
    """
    from agentrl.evaluation.rescore import NewRewards

    folder = _folder(run, output_dir)
    rescoring = run_until_signal(_rescorer(folder, NewRewards.of(names, steps), files).run(files))
    if as_json:
        click.echo(json.dumps(rescoring.as_json(_NUM_LISTED)))
    else:
        _print(rescoring, folder)


def _folder(run: str, output_dir: str) -> Path:
    """The folder of a run, or any other that holds a journal."""
    return Path(run) if (Path(run) / JOURNAL).is_dir() else run_folder(run, output_dir)


def _rescorer(folder: Path, rewards: NewRewards, files: str) -> Rescorer:
    from agentrl.assembly.rollout import build_play
    from agentrl.evaluation.recorded import recorded_env
    from agentrl.evaluation.rescore import Rescorer, files_of

    if rewards.steps != "again":
        return Rescorer(folder, rewards)
    first = next((entry.episode for path in files_of(folder, files) for entry in read_journal(path)), None)
    make_env, choice = recorded_env(folder, "" if first is None else first.env_id, None, None)
    play_episode = run_until_signal(build_play(choice, make_env, None))
    return Rescorer(folder, rewards, make_env, play_episode)


def _print(rescoring: Rescoring, folder: Path) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("episodes of", overflow="fold")
    for name in ("rollouts", "old mean", "new mean", "changed", "failed"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rescoring.rows():
        table.add_row(*(Text(_cell(value)) for value in row.values()))
    console = Console()
    console.print(table)
    for change in rescoring.largest(_NUM_LISTED):
        agent = "" if change.agent == "agent" else f", {change.agent}"
        place = f"{folder / JOURNAL / change.file}:{change.episode}"
        line = f"{change.old:z.3f} -> {change.new:z.3f}  {place}{agent}"
        console.print(Text(visible(line)), soft_wrap=True)
    for reason in [reason for file in rescoring.files for reason in file.failed][:_NUM_LISTED]:
        console.print(Text(visible(f"failed: {reason}"), style="red"), soft_wrap=True)
    console.print(f"New verdicts: {rescoring.folder}", markup=False, highlight=False, soft_wrap=True)


def _cell(value: JSON) -> str:
    if value is None or isinstance(value, float):
        return score_text(value)
    return visible(str(value))
