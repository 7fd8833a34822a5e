"""A run of episodes of a client, and what its journal has to hold."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import agentrl
from agentrl.types import Ending
from tests.envs.gateway.boxes import Boxes
from tests.envs.gateway.sampled import Sampled, journalled

NUM_SAMPLES = 2


def played(client: str, model: Path, folder: Path, **settings) -> Path:
    """The folder of a run that plays each task of a client, and trains nothing."""
    home = folder / "home"
    home.mkdir()
    result = agentrl.train(
        env="tests.envs.gateway.boxes:Boxes",
        env_kwargs={"client": client, "folder": str(home)},
        hf_checkpoint=str(model),
        debug_rollout_only=True,
        rollout_batch_size=len(Boxes(str(home), client).tasks("train")),
        n_samples_per_prompt=NUM_SAMPLES,
        num_rollout=1,
        rollout_max_response_len=160,
        output_dir=str(folder),
        name="played",
        quiet=True,
        seed=3,
        **settings,
    )
    return result.folder


def check(client: str, run: Path, sampled: Sampled) -> None:
    """Check the journal of a run against what its engine has sampled, and what the client has made of it."""
    entries, recorded = journalled(run)
    assert sampled.total() > 0
    assert recorded == sampled
    said = [path.read_text()[-2000:] for path in (run.parent / "home").glob("*.log")]
    assert len(entries) == len(Boxes("", client).tasks("train")) * NUM_SAMPLES
    assert not [e.episode.failure for e in entries if e.episode.ending is Ending.FAILED], said
    summary = defaultdict(Counter)
    for entry in entries:
        episode = entry.episode
        of = summary[episode.task.metadata["way"]]
        of["episodes"] += 1
        of["right"] += entry.verdict.total
        of["turns"] += len(episode.turns)
        of["with a call"] += any(turn.action.tool_calls for turn in episode.turns)
        of["with two"] += any(len(turn.action.tool_calls) > 1 for turn in episode.turns)
        of.update(episode.counts)
        of.update(f"begun {t.reason}" for t in episode.trajectories)
    print(json.dumps({client: summary}, indent=1, default=str), said)
