"""The hierarchy of the package's errors.

    AgentRLError
      UserError                 a message with the remedy; the command line prints it and exits with 2
        ConfigError             a key, value or combination in the run file or the flags
        DataError               a file of prompts, or a row of it, that cannot be read
        RecordError             a file of a run's folder that is not as agentrl wrote it; a ValueError, too
        UnknownEnvError         no environment of that name
        UnknownToolError        no tool of that name
        ToolDefinitionError     a tool that cannot be described to a model
        ModelLoadError          a model directory that is missing or broken
        MissingExtraError       a package that this installation lacks
        RunExistsError          the run folder already holds a run
        RunBusyError            another process writes into the folder
        DiskError               a file cannot be written: the disk is full or read-only
        WorldBrokenError        the environment fails so often that a run cannot go on
        EnvCodeError            code of an environment outside of its episodes failed; a StageError, too
        TokenLawError           a trajectory breaks a token law, so nothing of its batch is trained on
        DivergedError           an update has made weights that are not finite numbers; they are not published
        TeacherError            a served teacher cannot be reached, or does not score what it is sent
        NoSignalError           a run has ended, because nothing that it played gave a gradient
      StageError                one episode failed at a named stage; data for the journal, never a crash
        ToolError               a tool failed without fault of the model
        EndpointError           a chat endpoint returned no turn
        GradingError            a grader failed without fault of the model
      EngineError               the inference engine refused or failed
        RequestTooLargeError    the request can never fit in the engine's cache
        EngineUnavailableError  a server cannot be reached, closed the connection, or timed out
        EngineDiedError         the embedded engine's process has died; a UserError, too
      RemoteError              a process on a machine of the cluster raised an exception, or has gone
      TrainerError              a process of the trainer failed or died
    ToolRejected                raised by a tool: its message is the result of the call; scored

`UserError`s are for users. `StageError`s are raised by `stage()`, at the boundary between the episode loop
and the code of environments, tools and rewards. `ToolRejected` is for the model.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class AgentRLError(Exception):
    """Base of every error this package raises on purpose. Pickle keeps its type, message and attributes."""

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuilt, (type(self), self.args), self.__dict__


def _rebuilt(kind: type[AgentRLError], arguments: tuple[object, ...]) -> AgentRLError:
    """An error without a call of its constructor, whose parameters are not always its `args`."""
    error = kind.__new__(kind)
    error.args = arguments
    return error


class UserError(AgentRLError):
    """An error that the user can correct. The message is one sentence with the remedy."""


class ConfigError(UserError):
    """A key, a value or a combination in the run file or the flags is wrong."""


class DataError(UserError):
    """A file of prompts, or a row of it, cannot be read. The sentence says where it stands."""


class RecordError(UserError, ValueError):
    """A file of a run's folder is not as agentrl writes it, or a link. The command line adds the remedy."""


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


class RunBusyError(UserError):
    """Another process writes into the folder of a run, an evaluation or a benchmark."""


class DiskError(UserError):
    """A file cannot be written: its disk is full, over its quota or read-only, or it is not to be written."""


class WorldBrokenError(UserError):
    """The environment failed too often for the run to go on."""


class TokenLawError(UserError):
    """A trajectory breaks a token law, by an engine's or a renderer's fault. law: its name."""

    def __init__(self, sentence: str, law: str) -> None:
        super().__init__(sentence)
        self.law = law


class DivergedError(UserError):
    """An update has made weights that are not finite numbers. They are not published."""


class TeacherError(UserError):
    """A served teacher cannot be reached, refuses, or does not score the tokens that it is sent."""


class NoSignalError(UserError):
    """A run has ended, because no group of many iterations in a row gave a gradient."""


class StageError(AgentRLError):
    """One episode failed at a stage.

    stage: `reset`, `tool`, `step`, `reward`, `act` or `episode`. detail: one sentence.
    kind: "timeout", "error" (an exception), "invalid" (it breaks the contract), or those of a ToolError.
    """

    def __init__(self, stage: str, kind: str, detail: str) -> None:
        super().__init__(f"{stage} {kind}: {detail}")
        self.stage, self.kind, self.detail = stage, kind, detail


class ToolError(StageError):
    """A tool failed without fault of the model: the episode is replaced, not scored.

    kind: "unavailable" (it cannot be reached or started, or exceeds its own timeout), "crashed" (it died
    during the call), "protocol" (its response is invalid), "refused" (it is not allowed).
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__("tool", kind, detail)


class EnvCodeError(StageError, UserError):
    """Code of an environment failed outside of its episodes: `__init__`, `tasks`. kind: no timeout."""

    def __init__(self, stage: str, kind: str, sentence: str) -> None:
        super().__init__(stage, kind, sentence)
        self.args = (sentence,)


class EndpointError(StageError):
    """A chat endpoint returned no turn, without fault of the model.

    status: of its response; None = there was none.
    kind: "unavailable" (no connection, or too busy), "timeout" (no response in time), "crashed" (it closed
    the connection, or status 500), "refused" (the key, or a redirect), "protocol" (any other response).
    """

    def __init__(self, kind: str, detail: str, status: int | None = None) -> None:
        super().__init__("act", kind, detail)
        self.status = status


class GradingError(StageError):
    """A grader failed without fault of the model: the episode is replaced, not scored.

    kind: as of a ToolError; or "invalid", the task holds nothing to grade by.
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


class RemoteError(AgentRLError):
    """A process on a machine of the cluster raised an exception (its type and message), or has gone.

    at_s: when it raised, in seconds since 1970. is_gone: the process has ended; the message says how.
    """

    def __init__(self, message: str, at_s: float = 0.0, is_gone: bool = False) -> None:
        super().__init__(message)
        self.at_s, self.is_gone = at_s, is_gone


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


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return " Did you mean `x`?" for the candidate nearest to `name`, or an empty string.

    The case, and the version at the end of an environment's id, do not count: `-v0` is the end of most ids.
    """
    by_stem = {_stem(candidate): candidate for candidate in candidates}
    nearest = difflib.get_close_matches(_stem(name), list(by_stem), n=1, cutoff=0.5)
    return "".join(f" Did you mean `{by_stem[match]}`?" for match in nearest)


def _stem(name: str) -> str:
    return re.sub(r"-v\d+$", "", name.lower())
