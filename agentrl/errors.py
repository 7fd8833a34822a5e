"""Every error a user can meet, as one tree.

    AgentRLError
      UserError                 a sentence with the next move; the command line prints it and exits with 2
        ConfigError             a key, value or combination in the run file or the flags
        UnknownEnvError         no environment of that name
        UnknownToolError        no tool of that name
        ToolDefinitionError     a tool that cannot be described to a model
        ModelLoadError          a model directory that is missing or broken
        MissingExtraError       a package that this installation lacks
        RunExistsError          the run folder already holds a run
        WorldBrokenError        the environment fails so often that a run cannot go on
      StageError                one episode failed at a named stage; data for the journal, never a crash
        ToolError               a tool failed by no doing of the model
        EndpointError           somebody else's model failed to answer
      EngineError               the inference engine refused or failed
        RequestTooLargeError    the request can never fit in the engine's cache
        EngineUnavailableError  a server that is not there, broke off, or took too long
        EngineDiedError         the embedded engine's process has gone; a UserError, too
      TrainerError              a process of the trainer failed or died
    ToolRejected                raised by a tool: its sentence goes back to the model and is scored

`UserError`s are for people. `StageError`s are attributed once, by `stage()`, at the
boundary between our loop and somebody else's code. `ToolRejected` is for the model.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


class AgentRLError(Exception):
    """Base of every error this package raises on purpose."""


class UserError(AgentRLError):
    """Something a person can mend. The text is one sentence that says how."""


class ConfigError(UserError):
    """A key, a value or a combination in the run file or the flags is wrong."""


class UnknownEnvError(UserError):
    """No environment is registered under that id."""


class UnknownToolError(UserError):
    """No tool is registered under that name."""


class ToolDefinitionError(UserError):
    """A function cannot serve as a tool: a type hint or a docstring is missing."""


class ModelLoadError(UserError):
    """A model directory is missing, incomplete or of an unsupported architecture."""


class MissingExtraError(UserError):
    """A package is not installed; the sentence names the extra of agentrl that brings it."""


class RunExistsError(UserError):
    """The run folder already holds a run."""


class WorldBrokenError(UserError):
    """The environment failed too often for the run to go on."""


class StageError(AgentRLError):
    """One episode failed at a stage (reset, tool, step, reward, act, episode).

    kind: "timeout", "error" (an exception) or "invalid" (a value that breaks the contract); a
    ToolError has kinds of its own.
    """

    def __init__(self, stage: str, kind: str, detail: str) -> None:
        super().__init__(f"{stage} {kind}: {detail}")
        self.stage = stage
        self.kind = kind
        self.detail = detail


class ToolError(StageError):
    """A tool failed by no doing of the model: the episode is replaced, not scored.

    kind: "unavailable" (it cannot be reached or started, or does not answer in its own time), "crashed"
    (it died in the call), "protocol" (what it answered makes no sense), "refused" (it is not allowed).
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__("tool", kind, detail)


class EndpointError(StageError):
    """A chat endpoint gave no turn: its failure, never the model's. status: what it answered, or None.

    kind: "unavailable" (no connection, or too busy), "timeout" (no answer in time), "crashed" (it broke off,
    or says 500), "refused" (the key, or a redirect), "protocol" (any other answer).
    """

    def __init__(self, kind: str, detail: str, status: int | None = None) -> None:
        super().__init__("act", kind, detail)
        self.status = status


class EngineError(AgentRLError):
    """The inference engine refused a request or failed while serving it."""


class RequestTooLargeError(EngineError):
    """The request needs more cache than the engine could ever give it."""


class EngineUnavailableError(EngineError):
    """A server cannot be reached, broke off or took too long; another may do what it was asked."""


class EngineDiedError(EngineError, UserError):
    """The process of the embedded engine has gone: the run cannot go on."""


class TrainerError(AgentRLError):
    """A process of the trainer failed, and with it all others: the run cannot go on."""


class RenderingError(AgentRLError):
    """A conversation cannot be put into a model's form; an episode's failure, not the user's."""


class ToolRejected(AgentRLError):  # noqa: N818 - to the tool's author it is a reply, not an error
    """Raise it in a tool to tell the model, in one sentence, what to do differently.

    kind: what it is counted as (`tool/NAME/rejected/KIND`); one of a few words, never the model's own.
    """

    def __init__(self, sentence: str, kind: str = "tool") -> None:
        super().__init__(sentence)
        self.kind = kind


@asynccontextmanager
async def stage(name: str, timeout_s: float | None) -> AsyncIterator[None]:
    """Run foreign code under a deadline and attribute whatever escapes to stage `name`.

    The innermost stage wins: a StageError passes through outer ones unchanged. Cancellation
    from outside and UserErrors pass through as they are.

    Raises:
        StageError: the body overran `timeout_s` seconds, or raised.
    """
    # The handle is kept outside: only it can tell our own deadline from a TimeoutError
    # that the body raised by itself.
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            yield
    except (StageError, UserError):
        raise
    except Exception as error:
        if deadline.expired():
            raise StageError(name, "timeout", f"took longer than {timeout_s:g} s") from error
        raise StageError(name, "error", f"{type(error).__name__}: {error}") from error


async def all_of(coroutines: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Run all at once and return their results in order.

    The first exception cancels the others, waits until they have cleaned up, and is raised alone.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in tasks]


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return " Did you mean `x`?" for the nearest known name, or an empty string."""
    near = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.5)
    return f" Did you mean `{near[0]}`?" if near else ""
