"""Several real processes that are the ranks of a layout, kept for the tests of a file."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.trainer.megatron.config import MegatronConfig
from tests.trainer.pool import Pool


class Ranks(Pool):
    """`count` processes; each call makes them the ranks of a layout. One that fails ends the others."""

    def run(self, work: Callable[..., object], layout: MegatronConfig, *args: object) -> list:
        """work(layout, rank, *args) inside every rank; what each gave, in the order of the ranks."""
        return self.meet(_in_layout, work, layout, args)


def _in_layout(store, rank, work, layout, args):
    from agentrl.trainer.megatron.parallel import joined

    with joined(layout, rank, store=store, local_rank=rank, timeout_s=60):
        return work(layout, rank, *args)
