"""The loop of `agentrl train`, in your own hands: play, credit, update, publish.

python examples/open_loop/loop.py examples/calculator/run.toml --name open
python examples/open_loop/loop.py examples/calculator/run.toml --name ahead --max-staleness 1
"""

from __future__ import annotations

import argparse
import asyncio

import agentrl


async def main(options: argparse.Namespace) -> None:
    """Train; with staleness, groups are played while others are trained, and their tokens corrected."""
    ahead = {"max_staleness": options.max_staleness, "correction": "tis"} if options.max_staleness else {}
    async with agentrl.open_run(options.run, name=options.name, **ahead) as run:
        print("held out, before:", (await run.evaluate())["eval/sampled"])
        while not run.is_over:
            groups = await run.play()  # episodes, with their rewards: drop some, or score them anew
            batch = await run.credit(groups)  # advantages, and the weight of each token in the loss
            metrics = await run.update(batch)  # optimizer steps
            version = await run.publish()  # the next groups are sampled with these weights
            reward = run.metrics["rollout/raw_reward"]
            print(f"{run.step:3}  reward {reward:.3f}  loss {metrics.get('train/loss', 0):.3f}  -> {version}")
            if run.step % 10 == 0:
                await run.save()
        print("held out, after:", (await run.evaluate())["eval/sampled"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The loop of `agentrl train`, in your own hands.")
    parser.add_argument("run", help="a run file")
    parser.add_argument("--name", help="of the folder below runs")
    parser.add_argument("--max-staleness", type=int, default=0, help="versions; above 0: asynchronous")
    asyncio.run(main(parser.parse_args()))
