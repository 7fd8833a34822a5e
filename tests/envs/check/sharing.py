"""Worlds whose tool holds a real child process: for one episode, or for all; closed, or leaked."""

from __future__ import annotations

from contextlib import asynccontextmanager
from subprocess import DEVNULL, Popen

from agentrl import Task, ToolEnv, call, exact_match, say, tool
from agentrl.tools import Shared, Tool, Toolkit

FORGOTTEN: list[Popen[bytes]] = []


@asynccontextmanager
async def waiting(forget: bool):
    """A child that waits."""
    child = Popen(["sleep", "600"], stdin=DEVNULL)
    try:
        yield child
    finally:
        if forget:
            FORGOTTEN.append(child)
        else:
            end(child)


def end(child: Popen[bytes]) -> None:
    child.kill()
    child.wait()


class Shout(Toolkit):
    """shared: one child for all episodes. forget: the child is never closed."""

    def __init__(self, *, shared: bool, forget: bool) -> None:
        self.forget = forget
        self.shared = Shared(self.open, "the child") if shared else None

    def open(self):
        return waiting(self.forget)

    @asynccontextmanager
    async def episode(self):
        if self.shared is not None:
            yield (self.tool(await self.shared.get()),)
            return
        async with self.open() as child:
            yield (self.tool(child),)

    def tool(self, child: Popen[bytes]) -> Tool:
        @tool(inline=True)
        def shout(word: str) -> str:
            """Say it louder."""
            assert child.poll() is None, "the child lives as long as the tool"
            return word.upper()

        return Tool.of(shout)


class Shouting(ToolEnv):
    """What is a word in capitals?"""

    def tasks(self, split):
        words = ("red", "green", "blue", "grey") if split == "train" else ("pink", "brown", "violet", "gold")
        question = f"Say colour {{}} of {split} louder."
        return [Task.ask(word, question.format(k), word.upper()) for k, word in enumerate(words)]

    def reward(self, task, answer):
        return exact_match(answer, task.answer) if answer.isupper() else 0.0

    def expert(self, task):
        yield say((yield call("shout", word=task.id)))


class Kept(Shouting):
    tools = (Shout(shared=False, forget=False),)


class KeptShared(Shouting):
    tools = (Shout(shared=True, forget=False),)


class Forgotten(Shouting):
    tools = (Shout(shared=False, forget=True),)


class ForgottenShared(Shouting):
    tools = (Shout(shared=True, forget=True),)
