"""Conversations of `tests.flow.worlds.Bandit`, written as files, and runs of SFT on them."""

from __future__ import annotations

import json
import random

import agentrl
from agentrl.assembly.env import env_factory
from agentrl.assembly.policy import build_renderer, dialect_of
from agentrl.assembly.sections import SftSection
from agentrl.rendering.config import RenderingConfig
from agentrl.run.sft_data import SftReader
from agentrl.weights.hf.source import open_source
from tests.data.files import write_lines
from tests.flow.runs import SHAPE

SMALL = {
    **SHAPE,
    "env": "tests.flow.worlds:Bandit",
    "inline": True,
    "lr": 1e-2,
    "lr_warmup_iters": 0,
    "sft_batch_size": 16,
    "eval_interval": 5,
    "save_interval": 4,
    "quiet": True,
}


def conversation(button, task=0, **switches):
    """A row: press a button, then say what it gave. switches: keys of the last message."""
    result = "gold" if button == "right" else "dust"
    function = {"name": "press", "arguments": json.dumps({"button": button})}
    return {
        "messages": [
            {"role": "user", "content": f"press {task}"},
            {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "c", "content": result},
            {"role": "assistant", "content": result, **switches},
        ]
    }


def conversations(path, number=100, share=0.3, seed=0):
    """A file of conversations, of which this share press the button that pays."""
    chance = random.Random(seed)
    return write_lines(
        path,
        [conversation("right" if chance.random() < share else "left", n % 8) for n in range(number)],
    )


def sft(folder, name="x", **settings):
    """A run of SFT; a model that is opened has a shape of its own."""
    small = {k: v for k, v in SMALL.items() if k not in SHAPE or "hf_checkpoint" not in settings}
    return agentrl.sft(**{**small, "output_dir": str(folder), "name": name, **settings})


def settings_of(folder, **more):
    """A run of ten steps on the conversations in a folder, of which twenty are held out."""
    file = folder / "c.jsonl"
    return {"sft_data": f"{file}@[:-20]", "eval_sft_data": f"{file}@[-20:]", "num_epoch": 2, **more}


def reader_of(folder, **section):
    """What SFT of a Bandit reads with, for the tokenizer in a folder."""
    env, source = env_factory("tests.flow.worlds:Bandit", {})(), open_source(folder)
    renderer = build_renderer(source, dialect_of(env, RenderingConfig()), RenderingConfig())
    return SftReader(SftSection(**section), source, renderer, env.tool_schemas, 64)
