"""How far the trainer's logprobs are from those that the engine sampled with: no update is made.

python examples/true_on_policy/measure.py examples/true_on_policy/run.toml
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Mapping
from typing import TypedDict

import numpy as np
import numpy.typing as npt

import agentrl


class Changes(TypedDict, total=False):
    """Settings that a case changes."""

    inline: bool
    enable_deterministic_inference: bool
    max_slots: int
    max_tokens_per_gpu: int


CASES: Mapping[str, Changes] = {
    "inline": {"inline": True},
    "processes": {},
    "one slot": {"max_slots": 1},
    "one sequence in a row": {"max_tokens_per_gpu": 1},
    "deterministic inference": {"enable_deterministic_inference": True},
    "deterministic, one slot": {"enable_deterministic_inference": True, "max_slots": 1},
    "deterministic, one sequence in a row": {"enable_deterministic_inference": True, "max_tokens_per_gpu": 1},
}


async def differences(run_file: str, changes: Changes) -> npt.NDArray[np.float32]:
    """|trainer's logprob - engine's| of every sampled token of one batch (nats)."""
    with tempfile.TemporaryDirectory() as folder:
        async with agentrl.open_run(
            run_file, quiet=True, output_dir=folder, name="measured", **changes
        ) as run:
            batch = await run.credit(await run.play())
            return np.concatenate(
                [
                    np.abs(proximal - sample.logprobs)[sample.loss_mask]
                    for step in batch.steps
                    for sample, proximal in zip(step.batch.samples, step.batch.scores.proximal, strict=True)
                ]
            )


async def main(options: argparse.Namespace) -> None:
    """Measure each case."""
    print(f"{'':38}{'tokens':>8}{'equal':>8}{'mean':>10}{'largest':>10}")
    for name in options.case or CASES:
        found_N = await differences(options.run, CASES[name])
        equal = (found_N == 0).mean()
        print(f"{name:38}{len(found_N):8}{equal:8.1%}{found_N.mean():10.1e}{found_N.max():10.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="How far the trainer's logprobs are from the engine's.")
    parser.add_argument("run", help="a run file")
    parser.add_argument("--case", action="append", choices=[*CASES], help="one of the cases; left out, all")
    asyncio.run(main(parser.parse_args()))
