"""A run of episodes of a client, and what its journal has to hold."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import agentrl
from agentrl.records import Entry
from agentrl.rendering.fresh_tokenizer import CALL_MARKERS
from agentrl.types import Ending
from tests.envs.gateway.boxes import Boxes
from tests.envs.gateway.sampled import Sampled, journal_of, trained_in


def played(client: str, model: Path, folder: Path, *, num_samples: int, **settings) -> Path:
    """The folder of a run that plays each task of a client some times, and trains nothing."""
    home = folder / "home"
    home.mkdir()
    result = agentrl.train(
        env="tests.envs.gateway.boxes:Boxes",
        env_kwargs={"client": client, "folder": str(home)},
        hf_checkpoint=str(model),
        debug_rollout_only=True,
        rollout_batch_size=len(Boxes(str(home), client).tasks("train")),
        n_samples_per_prompt=num_samples,
        num_rollout=1,
        rollout_max_response_len=160,
        output_dir=str(folder),
        name="played",
        quiet=True,
        seed=3,
        **settings,
    )
    return result.folder


def check(run: Path, sampled: Sampled) -> list[Entry]:
    """The entries of a run's journal, whose trained tokens are those that its engine has sampled."""
    entries = journal_of(run)
    said = {path.stem: path.read_text()[-2000:] for path in (run.parent / "home").glob("*.log")}
    assert not [entry.episode.failure for entry in entries if entry.episode.ending is Ending.FAILED], said
    assert sampled.total() > 0
    assert trained_in(entries) == sampled
    assert not [text for text in said.values() if "refused:" in text]
    return entries


class Way(NamedTuple):
    """What the episodes of one way have come to.

    begun: why trajectories begin, but for first ones. changed: what the client has changed in messages, and
    which of its settings were overruled. shares: of episodes, with a call, with two in one turn, and with the
    right answer.
    """

    number: int
    begun: Mapping[str, int]
    changed: Mapping[str, int]
    shares: tuple[float, float, float]


def by_way(entries: Sequence[Entry]) -> Mapping[tuple[str, str], Way]:
    """The episodes of each client and way."""
    found = defaultdict(list)
    for entry in entries:
        facts = entry.episode.task.metadata
        found[facts["client"], facts["way"]].append(entry)
    return {way: _way(of_way) for way, of_way in found.items()}


def _way(entries):
    begun, changed, num_calls = Counter(), Counter(), []
    for entry in entries:
        begun.update(str(t.reason) for t in entry.episode.trajectories if t.reason is not None)
        counts = entry.episode.counts.items()
        changed.update(
            {name: number for name, number in counts if name.startswith(("changed_", "overruled_"))}
        )
        # The turns of such an episode are texts, as they were sampled.
        num_calls.append(max(turn.action.text.count(CALL_MARKERS[0]) for turn in entry.episode.turns))
    shares = (fmean(n > 0 for n in num_calls), fmean(n > 1 for n in num_calls))
    return Way(len(entries), begun, changed, (*shares, fmean(e.verdict.total for e in entries)))
