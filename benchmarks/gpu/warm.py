"""The small model that whole runs begin with: HopSearch after a short warm start, on the CPU."""

from __future__ import annotations

from benchmarks.gpu.job import Bench

_RUN_FILE = "examples/hop_search/run.toml"


async def run(bench: Bench) -> None:
    """Make the model, and tell where it is."""
    import agentrl

    path = bench.folder / "warm" / "checkpoint"
    bench.turn()
    if not path.exists():
        result = await agentrl.train_async(
            _RUN_FILE,
            quiet=True,
            output_dir=str(bench.folder),
            name="warm",
            num_rollout=0,
            warm_start_steps=2 if bench.spec.tiny else 100,
            num_demonstrations=200 if bench.spec.tiny else 4000,
            eval_interval=100,
            eval_episodes=1,
            use_tensorboard=False,
        )
        path = result.folder / "checkpoint"
    bench.tell(warm=str(path))
