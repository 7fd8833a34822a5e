"""`agentrl replay`: the recorded tool calls of an episode, played again."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import rich_click as click

from agentrl.assembly.rollout import build_play
from agentrl.cli.commands import Command
from agentrl.cli.flags import read_json_object
from agentrl.cli.runs import run_folder
from agentrl.envs.replay import Difference, replay_episode
from agentrl.errors import ConfigError
from agentrl.evaluation.recorded import recorded_env
from agentrl.records import Entry, find_entries
from agentrl.records.history import JOURNAL
from agentrl.records.journal import SUFFIX
from agentrl.runtime.interrupts import run_until_signal
from agentrl.types import JSON, Episode
from agentrl.view.transcript import visible

DIFFERS = 1


@click.command("replay", cls=Command)
@click.argument("episode")
@click.option("--env", "env_id", metavar="ID", help="Environment to play in; left out, that of the run.")
@click.option(
    "--env-kwargs", metavar="JSON", help="Arguments of its constructor; left out, those of the run."
)
@click.option("--output-dir", default="runs", show_default=True, help="Folder of the runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for machines.")
def replay_command(
    episode: str, env_id: str | None, env_kwargs: str | None, output_dir: str, as_json: bool
) -> None:
    """Play the recorded actions of EPISODE again, and print what the environment returns differently.

    EPISODE is RUN:ID, such as quickstart:g3-0: a run's name or folder and an episode's id; or FILE:ID, with
    a file of its journal (trajectories/*.jsonl.gz). No model is loaded. Task, seed and limits are the
    recorded ones. Observations, results of tools, rewards and the ending are compared.

    Exit code 0 if all are equal, 1 if one differs: a tool that is not deterministic, or has changed.
    """
    path, entry = _entry_of(episode, output_dir)
    kwargs = None if env_kwargs is None else read_json_object("--env-kwargs", env_kwargs)
    differences = run_until_signal(_differences(path.parent.parent, entry, env_id, kwargs))
    if as_json:
        click.echo(json.dumps(_as_json(path, entry.episode, differences)))
    else:
        for line in _report(path, entry.episode, differences):
            click.echo(visible(line))
    if differences:
        sys.exit(DIFFERS)


def _entry_of(name: str, output_dir: str) -> tuple[Path, Entry]:
    """The file and the entry of an episode.

    Raises:
        ConfigError: there is no such run, file or episode, or several evaluations have one of that id.
    """
    place, colon, id = name.rpartition(":")
    if not colon:
        raise ConfigError(f"EPISODE is RUN:ID such as quickstart:g3-0, or FILE:ID, got {name!r}.")
    if Path(place).is_file():
        paths = [Path(place)]
    else:
        journal = run_folder(place, output_dir) / JOURNAL
        # Ids of training are unique in a run, those of evaluations in their file.
        paths = [*sorted(journal.glob(f"step_*{SUFFIX}")), *sorted(journal.glob(f"eval_*{SUFFIX}"))]
    try:
        matches = [(path, entry) for path in paths for entry in find_entries(path, id)]
    except (OSError, ValueError) as error:
        raise ConfigError(f"the journal of {place} cannot be read: {error}; restore that file.") from None
    if not matches:
        raise ConfigError(f"{place} has no episode {id}; the ids stand in its {JOURNAL}/*{SUFFIX}.")
    if len(matches) > 1:
        names = ", ".join(str(path) for path, _ in matches)
        raise ConfigError(
            f"{place} has {len(matches)} episodes {id}; name the file of one, FILE:{id}: {names}."
        )
    return matches[0]


async def _differences(
    folder: Path, entry: Entry, env_id: str | None, env_kwargs: Mapping[str, JSON] | None
) -> list[Difference]:
    remedy = "name the environment of the episode with --env"
    make_env, choice = recorded_env(folder, entry.episode.env_id, env_id, env_kwargs, remedy=remedy)
    play_episode = await build_play(choice, make_env, None)
    return await replay_episode(make_env(), entry.episode, entry.verdicts, play_episode)


def _as_json(path: Path, episode: Episode, differences: Sequence[Difference]) -> dict[str, JSON]:
    return {
        "file": str(path),
        "episode": episode.id,
        "env": episode.env_id,
        "turns": len(episode.turns),
        "equal": not differences,
        "differences": [difference._asdict() for difference in differences],
    }


def _report(path: Path, episode: Episode, differences: Sequence[Difference]) -> Iterator[str]:
    turns = len(episode.turns)
    yield f"{episode.id} of {path}: {episode.env_id}, {turns} turn{'s' if turns != 1 else ''}"
    for difference in differences:
        where = "" if difference.turn is None else f"turn {difference.turn}, "
        yield f"{where}{difference.what}:"
        recorded, now = (text.splitlines() for text in (difference.expected, difference.actual))
        # The first two lines name files, and @@ a range of lines.
        diff = list(difflib.unified_diff(recorded, now, n=2, lineterm=""))[2:]
        yield from (f"  {line}" for line in diff if not line.startswith("@@"))
    number = len(differences)
    yield (
        f"{number} difference{'s' if number != 1 else ''} (- recorded, + now)."
        if number
        else ("Everything that the environment returned is as recorded.")
    )
