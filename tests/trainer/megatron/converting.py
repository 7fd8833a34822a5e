"""Conversions in a process of their own: one that stops in the middle, one that watches its memory.

python -m tests.trainer.megatron.converting stops SOURCE TARGET
python -m tests.trainer.megatron.converting measures SOURCE TARGET SOURCE TARGET ...
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from agentrl.trainer.megatron.files.convert import Wish, convert


@contextmanager
def silent(_total):
    yield lambda: None


def anonymous_bytes() -> int:
    """Memory of this process that is no file's: what safetensors maps of a file does not count."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
    return 1024 * int(line.split()[1])


def stop_in_the_middle(source: str, target: str) -> None:
    @contextmanager
    def stage(total):
        done = []

        def advance():
            done.append(1)
            if len(done) == total // 2:
                print("in the middle", flush=True)
                time.sleep(60)

        yield advance

    convert(Path(source), Path(target), Wish(), stage)


def growth(source: str, target: str) -> int:
    """By how much the process grew at most: looked at after every layer, and as often as can be."""
    before = anonymous_bytes()
    seen, over = [0], threading.Event()

    def look():
        seen.append(anonymous_bytes() - before)

    def keep_looking():
        while not over.wait(0.001):
            look()

    @contextmanager
    def stage(_total):
        yield look

    looking = threading.Thread(target=keep_looking)
    looking.start()
    try:
        convert(Path(source), Path(target), Wish(), stage)
    finally:
        over.set()
        looking.join()
    return max(seen)


if __name__ == "__main__":
    what, *paths = sys.argv[1:]
    if what == "stops":
        stop_in_the_middle(*paths)
    for source, target in zip(paths[::2], paths[1::2], strict=True):
        print(growth(source, target), flush=True)
