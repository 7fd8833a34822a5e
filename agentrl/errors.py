"""The hierarchy of the package's errors.

    AgentRLError
      UserError                 a message with the remedy; the command line prints it and exits with 2
        ConfigError             a key, value or combination in the run file or the flags
        DataError               a file of prompts, or a row of it, that cannot be read
        UnknownEnvError         no environment of that name
        UnknownToolError        no tool of that name
        ToolDefinitionError     a tool that cannot be described to a model
        ModelLoadError          a model directory that is missing or broken
        MissingExtraError       a package that this installation lacks
        RunExistsError          the run folder already holds a run
        WorldBrokenError        the environment fails so often that a run cannot go on
        TokenLawError           a trajectory breaks a token law, so nothing of its batch is trained on
      StageError                one episode failed at a named stage; data for the journal, never a crash
        ToolError               a tool failed without fault of the model
        EndpointError           a chat endpoint returned no turn
        GradingError            a grader failed without fault of the model
      EngineError               the inference engine refused or failed
        RequestTooLargeError    the request can never fit in the engine's cache
        EngineUnavailableError  a server cannot be reached, closed the connection, or timed out
        EngineDiedError         the embedded engine's process has died; a UserError, too
      TrainerError              a process of the trainer failed or died
    ToolRejected                raised by a tool: its message is the result of the call; scored

`UserError`s are for users. `StageError`s are raised by `stage()`, at the boundary between the episode loop
and the code of environments, tools and rewards. `ToolRejected` is for the model.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Coroutine, Iterable, Sequence
from types import TracebackType
from typing import TypeVar

from agentrl.clocks import Clock

T = TypeVar("T")


class AgentRLError(Exception):
    """Base of every error this package raises on purpose."""


class UserError(AgentRLError):
    """An error that the user can correct. The message is one sentence with the remedy."""


class ConfigError(UserError):
    """A key, a value or a combination in the run file or the flags is wrong."""


class DataError(UserError):
    """A file of prompts, or a row of it, cannot be read. The sentence says where it stands."""


class UnknownEnvError(UserError):
    """No environment is registered under that id."""


class UnknownToolError(UserError):
    """No tool is registered under that name."""


class ToolDefinitionError(UserError):
    """A function cannot serve as a tool: a type hint or a docstring is missing."""


class ModelLoadError(UserError):
    """A model directory is missing, incomplete or of an unsupported architecture."""


class MissingExtraError(UserError):
    """A package is not installed; the message names the extra of agentrl that contains it."""


class RunExistsError(UserError):
    """The run folder already holds a run."""


class WorldBrokenError(UserError):
    """The environment failed too often for the run to go on."""


class TokenLawError(UserError):
    """A trajectory breaks a token law, by an engine's or a renderer's fault. law: its name."""

    def __init__(self, sentence: str, law: str) -> None:
        super().__init__(sentence)
        self.law = law


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
    """A tool failed without fault of the model: the episode is replaced, not scored.

    kind: "unavailable" (it cannot be reached or started, or exceeds its own timeout), "crashed" (it died
    during the call), "protocol" (its response is invalid), "refused" (it is not allowed).
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__("tool", kind, detail)


class EndpointError(StageError):
    """A chat endpoint returned no turn, without fault of the model. status: of its response, or None.

    kind: "unavailable" (no connection, or too busy), "timeout" (no response in time), "crashed" (it closed
    the connection, or status 500), "refused" (the key, or a redirect), "protocol" (any other response).
    """

    def __init__(self, kind: str, detail: str, status: int | None = None) -> None:
        super().__init__("act", kind, detail)
        self.status = status


class GradingError(StageError):
    """A grader failed without fault of the model: the episode is replaced, not scored.

    kind: "unavailable", "crashed", "protocol" or "refused", as of a ToolError; "invalid", the task holds
    nothing to grade by.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__("reward", kind, detail)


class EngineError(AgentRLError):
    """The inference engine refused a request or failed while serving it."""


class RequestTooLargeError(EngineError):
    """The request needs more cache than the engine could ever give it."""


class EngineUnavailableError(EngineError):
    """A server cannot be reached, closed the connection or timed out; another server may take the request."""


class EngineDiedError(EngineError, UserError):
    """The process of the embedded engine has died: the run cannot go on."""


class TrainerError(AgentRLError):
    """A process of the trainer failed, and with it all others: the run cannot go on."""


class RenderingError(AgentRLError):
    """A conversation cannot be rendered for a model; the episode fails, the run goes on."""


class ToolRejected(AgentRLError):  # noqa: N818 - to the tool's author it is a reply, not an error
    """Raise it in a tool to refuse a call, with one sentence for the model on what to do differently.

    kind: the key of its count (`tool/NAME/rejected/KIND`); one of a few words, never text of the model.
    """

    def __init__(self, sentence: str, kind: str = "tool") -> None:
        super().__init__(sentence)
        self.kind = kind


def stage(name: str, timeout_s: float | None) -> Stage:
    """Run code of users under a deadline and convert its exceptions to StageErrors of stage `name`.

    The deadline counts the time of the body itself (`agentrl.clocks`), without waits for a slot and pauses of
    the process. A StageError of an inner stage passes through outer ones unchanged. Cancellation from outside
    and UserErrors pass through unchanged, too.

    Raises:
        StageError: the body overran `timeout_s` seconds, or raised.
    """
    return Stage(name, timeout_s)


class Stage:
    """The block of `async with stage(...)`."""

    __slots__ = ("_clock", "_name", "_timeout_s")

    def __init__(self, name: str, timeout_s: float | None) -> None:
        self._name, self._timeout_s = name, timeout_s
        self._clock: Clock | None = None

    @property
    def seconds(self) -> float:
        """Seconds that its clock has counted; 0.0 without a deadline."""
        return 0.0 if self._clock is None else self._clock.seconds

    async def __aenter__(self) -> None:
        if self._timeout_s is None:
            return
        self._clock = Clock(self._timeout_s)
        await self._clock.deadline.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_late = await self._ended(kind, error, trace)
        if isinstance(error, StageError | UserError) or (not is_late and not isinstance(error, Exception)):
            return
        if is_late:
            raise StageError(self._name, "timeout", f"took longer than {self._timeout_s:g} s") from error
        raise StageError(self._name, "error", f"{type(error).__name__}: {error}") from error

    async def _ended(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Whether the deadline ended the body; a TimeoutError of the body's own is none of ours."""
        if self._clock is None:
            return False
        self._clock.end()
        deadline = self._clock.deadline
        try:
            await deadline.__aexit__(kind, error, trace)
        except TimeoutError:
            return True
        return isinstance(error, Exception) and deadline.expired()


async def all_of(coroutines: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Run all at once and return their results in order.

    The first exception cancels the others, waits until they have cleaned up, and is raised without a group.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as group_error:
        raise group_error.exceptions[0] from None
    return [task.result() for task in tasks]


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return " Did you mean `x`?" for the candidate nearest to `name`, or an empty string."""
    matches = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return f" Did you mean `{matches[0]}`?" if matches else ""
