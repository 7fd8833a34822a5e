"""Worlds that leak one resource each when they are cancelled."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress

from tests.envs.check.broken import LEAKED, Good, caught_by

FOREVER_S = 3600.0


class Waiting(Good):
    """Holds a resource while it waits; each subclass releases it only without a cancellation."""

    def hold(self):
        raise NotImplementedError

    def let_go(self, held):
        raise NotImplementedError

    async def reset(self, task, *, seed):
        held = self.hold()
        await asyncio.sleep(0)
        self.let_go(held)
        return await super().reset(task, seed=seed)


@caught_by("leaves-thread")
class LeavesThread(Waiting):
    def hold(self):
        self.stop = threading.Event()
        LEAKED.append(self.stop)
        thread = threading.Thread(target=self.stop.wait, daemon=True)
        thread.start()
        return thread

    def let_go(self, held):
        self.stop.set()
        held.join()


@caught_by("leaves-process")
class LeavesProcess(Waiting):
    def hold(self):
        held = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], stdin=subprocess.DEVNULL
        )
        LEAKED.append(held)
        return held

    def let_go(self, held):
        held.kill()
        held.wait()


@caught_by("leaves-file")
class LeavesOpenFile(Waiting):
    def hold(self):
        held = os.open(__file__, os.O_RDONLY)
        LEAKED.append(held)
        return held

    def let_go(self, held):
        LEAKED.remove(held)
        os.close(held)


@caught_by("leaves-file")
class LeavesTemporaryFile(Waiting):
    def hold(self):
        handle, path = tempfile.mkstemp()
        os.close(handle)
        return path

    def let_go(self, held):
        os.unlink(held)


@caught_by("leaves-socket")
class LeavesSocket(Waiting):
    def hold(self):
        held = socket.socket()
        LEAKED.append(held)
        return held

    def let_go(self, held):
        held.close()


@caught_by("leaves-task")
class LeavesTask(Waiting):
    def hold(self):
        held = asyncio.create_task(asyncio.sleep(FOREVER_S))
        LEAKED.append(held)
        return held

    def let_go(self, held):
        held.cancel()


@caught_by("leaves-file")
class LeavesInAChild(Good):
    """The cancelled await is not the episode's own, but that of a task that it awaits."""

    async def reset(self, task, *, seed):
        async with asyncio.timeout(5):
            await asyncio.wait_for(self.work(), 5)
        return await super().reset(task, seed=seed)

    async def work(self):
        for _ in range(5):
            await asyncio.sleep(0)
        held = os.open(__file__, os.O_RDONLY)
        LEAKED.append(held)
        await asyncio.sleep(0)
        LEAKED.remove(held)
        os.close(held)


@caught_by("ignores-cancelling")
class Stubborn(Good):
    async def reset(self, task, *, seed):
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        return await super().reset(task, seed=seed)


def let_all_go():
    """Release the leaked resources, so that the tests themselves leak nothing."""
    for held in LEAKED:
        match held:
            case threading.Event():
                held.set()
            case subprocess.Popen():
                held.kill()
                held.wait()
            case asyncio.Task() | bytearray():
                continue  # gone with its loop, and with the list
            case int():
                os.close(held)
            case _:
                held.close()
    LEAKED.clear()
