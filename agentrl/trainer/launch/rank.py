"""One rank's process: python -m agentrl.trainer.launch.rank FD LOCAL_RANK MODULE. FD: its end of the pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from agentrl.errors import TrainerError
from agentrl.processes.child import SendFailure, follow_driver
from agentrl.records.gpu_memory import held_text, is_out_of_memory
from agentrl.trainer.launch.calls import serve

_REMEDY = "lower max_tokens_per_gpu or the servers' mem_fraction_static, or set recompute_granularity = full."


def run_rank(pipe: Connection, local_rank: int, preloaded: str) -> None:
    """Serve the driver's calls until it closes the pipe; an error is sent to the driver, and raised.

    local_rank: this rank's number among those of its machine. preloaded: the module with its worker.
    """
    follow_driver(pipe)
    with suppress(EOFError, ConnectionError), SendFailure(pipe), naming_holders():
        serve(pipe, local_rank, preloaded)


@contextmanager
def naming_holders() -> Iterator[None]:
    """Raise an error of a full GPU as a sentence that says who holds its memory, while this rank still does.

    Raises:
        TrainerError: the block ran out of a GPU's memory.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        # The CPU's allocator has another sentence.
        if not is_out_of_memory(text) or "CUDA" not in text:
            raise
        raise TrainerError(f"its GPU is full ({held_text() or text.splitlines()[0]}); {_REMEDY}") from error


if __name__ == "__main__":
    run_rank(Connection(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3])
