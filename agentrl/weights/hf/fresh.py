"""An untrained model: the driver writes its config, the process that computes initializes its weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from agentrl.errors import ModelLoadError
from agentrl.runtime.files import SystemErrors
from agentrl.weights.hf.directory import atomic_directory
from agentrl.weights.hf.source import ModelSource, open_config
from agentrl.weights.model_types import AutoModelForCausalLM
from agentrl.weights.quiet import quiet_transformers


def write_untrained(directory: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a model directory that lacks its weights: see `draw_weights`.

    Raises:
        OSError: the disk did not take it.
    """
    with atomic_directory(directory) as partial, SystemErrors(directory):
        config.save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def draw_weights(directory: Path, seed: int) -> None:
    """Initialize weights at random for a directory's config, and write them there.

    The weights depend on the config and the seed only. torch's own generator does not change.
    """
    config = open_config(directory)
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, trust_remote_code=False).save_pretrained(directory)


def draw_in_subprocess(source: ModelSource) -> None:
    """Initialize the weights of a source in a process of its own, if it has none yet. The call blocks.

    Raises:
        ModelLoadError: they cannot be initialized, or written.
    """
    if source.seed is None:
        return
    command = [sys.executable, "-m", "agentrl.weights.hf.fresh", str(source.directory), str(source.seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise ModelLoadError(f"the weights of {source.directory} cannot be drawn: {reason}")


if __name__ == "__main__":
    draw_weights(Path(sys.argv[1]), int(sys.argv[2]))
