"""Runs of a tiny model in a tiny world: a second or two each."""

from __future__ import annotations

import json

import agentrl
from agentrl.records import members

SHAPE = {
    "num_layers": 1,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 2,
    "num_query_groups": 1,
    "kv_channels": 32,
    "vocab_size": 300,
}
TINY = {
    **SHAPE,
    "max_slots": 64,
    "rollout_batch_size": 8,
    "n_samples_per_prompt": 8,
    "lr": 2e-3,
    "lr_warmup_iters": 0,
    "eval_episodes": 64,
    "eval_interval": 5,
}
WARM = {"warm_start_steps": 40, "warm_start_batch_size": 32, "warm_start_lr": 1e-2, "num_demonstrations": 256}
EPISODES_PER_STEP = 64
# The command line. A process started in the background inherits that SIGINT is ignored; this one hears it.
HEARING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from agentrl.cli import main
main(sys.argv[1:])
"""


def options_of(world, output_dir, name, **settings):
    """The settings of a run in one of `tests.flow.worlds`."""
    # A model that is opened has a shape of its own.
    tiny = {k: v for k, v in TINY.items() if k not in SHAPE or "hf_checkpoint" not in settings}
    fixed = {"inline": True, "output_dir": str(output_dir), "name": name}
    return {**tiny, **fixed, "env": f"tests.flow.worlds:{world}", **settings}


def train(world, output_dir, name, **settings):
    """A run in one of `tests.flow.worlds`."""
    return agentrl.train(**{"quiet": True, **options_of(world, output_dir, name, **settings)})


def metrics_of(folder):
    """The rows of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def journal_of(folder, pattern="*"):
    """The entries of all journal files whose name fits, in their order."""
    files = sorted((folder / "trajectories").glob(f"{pattern}.jsonl.gz"))
    return [entry for file in files for entry in members.read(file)]


def tokens_of(entry):
    """All tokens of one journalled episode, as [world, policy, world, policy, ...]."""
    turns = [turn for trajectory in entry["episode"]["trajectories"] for turn in trajectory["turns"]]
    return [
        part
        for turn in turns
        for part in (turn["tokens"]["world_ids"], turn["tokens"]["completion"]["token_ids"])
    ]
