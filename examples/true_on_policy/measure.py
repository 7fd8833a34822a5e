"""How far the trainer's logprobs are from those that the engine sampled with: no update is made.

python examples/true_on_policy/measure.py examples/true_on_policy/run.toml
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Mapping

import numpy as np

import agentrl

CASES: Mapping[str, Mapping[str, bool | int | str]] = {
    "inline": {"inline": True},
    "processes": {},
    "deterministic inference": {"enable_deterministic_inference": True},
    "deterministic, one slot": {"enable_deterministic_inference": True, "max_slots": 1},
    "one slot": {"max_slots": 1},
    "one sequence in a row": {"max_tokens_per_gpu": 1},
    "deterministic, one sequence in a row": {
        "enable_deterministic_inference": True,
        "max_tokens_per_gpu": 1,
    },
    "engine in bfloat16": {"engine_dtype": "bfloat16"},
}


async def differences(run_file: str, settings: Mapping[str, bool | int | str]) -> np.ndarray:
    """|trainer's logprob - engine's| of every sampled token of one batch (nats)."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = {"output_dir": folder, "name": "measured", "quiet": True}
        async with agentrl.open_run(run_file, **fixed, **settings) as run:
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
