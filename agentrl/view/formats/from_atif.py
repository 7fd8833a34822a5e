"""Documents of ATIF as entries of a journal: what `atif` wrote, and what other tools did.

A turn is an agent step with the messages before it. Its sampled tokens need `prompt_token_ids`,
`completion_token_ids` and `logprobs`; the tokens of the prompt that no step before has are the world's. Where
a prompt does not begin with the tokens before it, a trajectory ends and another one begins, as in an episode.

A document of another tool is an episode that was not scored, unless `final_metrics.extra.reward` is a number.
It is untrusted: every field is checked, and no file that it names is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.errors import RecordError
from agentrl.records import Entry, Outcome
from agentrl.records.journal import entry_of
from agentrl.types import JSON, Ending, Finish, Message, Restart, Task, ToolCall, Verdict
from agentrl.view.formats.atif_messages import OWN, read_content
from agentrl.view.formats.provenance import message_of

_VERSION: Final = re.compile(r"ATIF-v1\.\d{1,3}")
_MOST_DOCUMENTS: Final = 10_000
_SHOWN: Final = 8
"""Parts of the path to a wrong field, the last ones."""
_Id = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
_Logprob = Annotated[float, Field(allow_inf_nan=False)]
_Extra = dict[str, JSON] | None


class _Part(BaseModel):
    """What a document holds; fields that are not named here are not read."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class _Call(_Part):
    tool_call_id: str
    function_name: str
    arguments: dict[str, JSON]
    extra: _Extra = None


class _Result(_Part):
    source_call_id: str | None = None
    content: str | list[dict[str, JSON]] | None = None
    extra: _Extra = None


class _Observation(_Part):
    results: list[_Result] = Field(default_factory=list)


class _Metrics(_Part):
    cached_tokens: int | None = None
    prompt_token_ids: list[_Id] | None = None
    completion_token_ids: list[_Id] | None = None
    logprobs: list[_Logprob] | None = None


class _Step(_Part):
    source: Literal["system", "user", "agent"]
    message: str | list[dict[str, JSON]]
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    observation: _Observation | None = None
    metrics: _Metrics | None = None
    llm_call_count: int | None = None
    is_copied_context: bool | None = None
    extra: _Extra = None


class _Agent(_Part):
    name: str = "unknown"


class _FinalMetrics(_Part):
    extra: _Extra = None


class _Document(_Part):
    schema_version: str
    trajectory_id: str | None = None
    session_id: str | None = None
    agent: _Agent = _Agent()
    steps: list[_Step]
    final_metrics: _FinalMetrics | None = None
    subagent_trajectories: list[_Document] | None = None
    extra: _Extra = None


@dataclass(slots=True)
class Imported:
    """An entry. file: of the journal that it was exported from; "" = it was not. num_bare: turns whose
    tokens are left out, since they have no logprobs, or no prompt (count)."""

    entry: Entry
    file: str = ""
    num_bare: int = 0


class Trial(NamedTuple):
    """What a trial of Harbor says beside its trajectory: its reward, and the name of its task."""

    reward: float | None = None
    task: str | None = None


def imported_of(document: JSON, id: str, where: str, trial: Trial | None = None) -> Imported:
    """The entry of a document. id: of its episode, where it has none of agentrl. where: for the sentence.

    Raises:
        RecordError: it is no document of ATIF 1, or no episode.
    """
    try:
        read = _Document.model_validate(document)
        if not _VERSION.fullmatch(read.schema_version):
            raise ValueError(f"schema_version is {read.schema_version[:40]!r}, not ATIF-v1.0 or later")
        own = _own(read.extra)
        if "entry" in own:
            return _exported(read, own, where)
        return _foreign(read, id, where, trial or Trial(_reward(read)))
    except RecordError:
        raise
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"][-_SHOWN:]))
        raise RecordError(f"{where} is no trajectory of ATIF: {place}: {problem['msg']}") from None
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise RecordError(f"{where} is no trajectory of ATIF: {error}") from None


def _exported(document: _Document, own: Mapping[str, JSON], where: str) -> Imported:
    """What `atif` wrote."""
    parts = [document] if "trajectory" in own else []
    parts += document.subagent_trajectories or []
    trajectories: list[object] = []
    num_bare = 0
    for part in parts:
        turns = _Turns(is_own=True)
        turns.read(part.steps)
        num_bare += turns.num_bare
        if len(turns.trajectories) > 1:
            raise ValueError("a prompt does not begin with the tokens of the steps before it")
        rest = _own(part.extra).get("trajectory")
        found = turns.trajectories[0] if turns.trajectories else []
        trajectories.append({**_object(rest), "turns": found})
    entry = _object(own["entry"])
    episode = {**_object(entry.get("episode")), "trajectories": trajectories}
    return Imported(entry_of({**entry, "episode": episode}, where), str(own.get("file", "")), num_bare)


def _foreign(document: _Document, id: str, where: str, trial: Trial) -> Imported:
    """What another tool wrote: one agent, whose subagents are trajectories of its own, beside the first."""
    trajectories: list[object] = []
    step, num_bare = 0, 0
    for part in _documents(document):
        turns = _Turns(step=step)
        turns.read(part.steps)
        step, num_bare = turns.step, num_bare + turns.num_bare
        for place, found in enumerate(turns.trajectories):
            reason = Restart.REWRITTEN if place else Restart.SUB_AGENT
            parent = len(trajectories) - 1 if place else 0
            link = {"parent": parent, "reason": reason} if trajectories else {}
            trajectories.append({"turns": found, **link})
    prompt = _prompt_of(document.steps)
    name = trial.task or document.trajectory_id or document.session_id or id
    episode = {
        "id": id,
        "env_id": document.agent.name,
        "task": Task(name, prompt),
        "seed": 0,
        "limits": {},
        "trajectories": trajectories,
        "step_rewards": [None] * step,
        "ending": Ending.COMPLETED,
    }
    verdicts = [] if trial.reward is None else [Verdict(id, "imported", trial.reward)]
    row = {"episode": episode, "verdicts": verdicts, "outcome": Outcome.EVALUATED}
    return Imported(entry_of(row, where), num_bare=num_bare)


def _documents(document: _Document) -> Iterator[_Document]:
    """A document and all that are embedded in it, at any depth."""
    waiting = [document]
    for _ in range(_MOST_DOCUMENTS):
        if not waiting:
            return
        first = waiting.pop(0)
        yield first
        waiting += first.subagent_trajectories or []
    raise ValueError(f"it embeds more than {_MOST_DOCUMENTS:,} trajectories")


def _reward(document: _Document) -> float | None:
    extra = document.final_metrics.extra if document.final_metrics is not None else None
    return number_of((extra or {}).get("reward"))


def number_of(value: JSON) -> float | None:
    """A number; None = it is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _prompt_of(steps: Sequence[_Step]) -> tuple[Message, ...]:
    """The messages before the first turn."""
    turns = _Turns()
    turns.read([*takewhile(lambda step: not _is_turn(step), steps)])
    return tuple(turns.observed)


@dataclass(slots=True)
class _Turns:
    """Reads the steps of one document into turns, as the fields of `Turn`.

    is_own: the steps are those of `atif`. step: of the next turn. observed: the messages since the last turn.
    heard: all messages so far. context: the tokens of the trajectory.
    """

    is_own: bool = False
    step: int = 0
    num_bare: int = 0
    trajectories: list[list[object]] = field(default_factory=list)
    observed: list[Message] = field(default_factory=list)
    heard: list[Message] = field(default_factory=list)
    context: list[int] = field(default_factory=list)

    def read(self, steps: Sequence[_Step]) -> None:
        """Read all steps of a document.

        Raises:
            ValueError: a step holds no message; the text begins with its number.
        """
        for number, step in enumerate(steps, start=1):
            try:
                self._read(step)
            except ValueError as error:
                raise ValueError(f"step {number}: {error}") from None

    def _read(self, step: _Step) -> None:
        own = _own(step.extra) if self.is_own else {}
        if own.get("is_note"):
            return
        is_written = "message" in own
        message = message_of(own["message"]) if is_written else _message_of(step)
        if _is_turn(step):
            self._act(step, message, own)
        elif message is not None:
            self._hear(message)
        # A result without an agent step before it is the message itself.
        if step.observation is not None and not (is_written and step.source == "system"):
            for result in step.observation.results:
                self._hear(_result_of(result, step.tool_calls or (), is_own=self.is_own))

    def _hear(self, message: Message) -> None:
        self.observed.append(message)
        self.heard.append(message)

    def _act(self, step: _Step, action: Message | None, own: Mapping[str, JSON]) -> None:
        tokens, is_new = self._tokens(step.metrics, _object(own.get("tokens")))
        if is_new or not self.trajectories:
            self.trajectories.append([])
        rest = {name: value for name, value in own.items() if name != "message"}
        place = {} if self.is_own else {"step": self.step}
        # The prompt of a trajectory that begins is complete.
        observation = tuple(self.heard if is_new else self.observed)
        turn = {**rest, **place, "observation": observation, "action": action, "tokens": tokens}
        self.trajectories[-1].append(turn)
        if action is not None:
            self.heard.append(action)
        self.observed, self.step = [], self.step + 1

    def _tokens(
        self, metrics: _Metrics | None, rest: Mapping[str, JSON]
    ) -> tuple[Mapping[str, object] | None, bool]:
        """The fields of `TurnTokens`, None = there are none; and whether the prompt breaks with the context.

        Tokens without logprobs, or without their prompt, are none.
        """
        if metrics is None or (metrics.prompt_token_ids is None and metrics.completion_token_ids is None):
            # Where the rest of some tokens is, somebody has removed them.
            self.num_bare += bool(rest)
            return None, False
        completion = _object(rest.get("completion"))
        prompt, sampled = metrics.prompt_token_ids, metrics.completion_token_ids
        logprobs = completion.get("logprobs") if metrics.logprobs is None else [*metrics.logprobs]
        if prompt is None or sampled is None or logprobs is None:
            self.num_bare += 1
            return None, False
        if not prompt and not self.is_own:
            raise ValueError("prompt_token_ids is empty, and a model reads something before it writes")
        is_new = prompt[: len(self.context)] != self.context
        world = prompt if is_new else prompt[len(self.context) :]
        self.context = prompt + sampled
        given = {} if self.is_own else {"versions": [0] * len(sampled), "finish": Finish.STOP}
        own = {"token_ids": sampled, "logprobs": logprobs, "cached_tokens": metrics.cached_tokens or 0}
        return {**rest, "world_ids": world, "completion": {**completion, **given, **own}}, is_new


def _is_turn(step: _Step) -> bool:
    """Whether the model wrote it now: not a copy of its context, and not a program's dispatch of calls."""
    return step.source == "agent" and not step.is_copied_context and step.llm_call_count != 0


def _message_of(step: _Step) -> Message | None:
    """What was said; None = a system step that only observes."""
    content = read_content(step.message)
    if step.source != "agent":
        return None if content == "" and step.observation is not None else Message(step.source, content)
    return Message("assistant", content, step.reasoning_content, tuple(map(_call_of, step.tool_calls or ())))


def _call_of(call: _Call) -> ToolCall:
    own = _own(call.extra)
    error, raw, id = own.get("error"), own.get("raw", ""), own.get("id", call.tool_call_id)
    if not isinstance(raw, str) or not isinstance(id, str) or not isinstance(error, str | None):
        raise ValueError("the error, the text or the id of a call is no text")
    return ToolCall(call.function_name, call.arguments if error is None else None, raw, id, error)


def _result_of(result: _Result, calls: Sequence[_Call], *, is_own: bool) -> Message:
    own = _own(result.extra) if is_own else {}
    if "message" in own:
        return message_of(own["message"])
    content = read_content(result.content)
    if not is_own and not calls:
        # What an agent without calls reads: the output of its terminal.
        return Message("user", content)
    names = {call.tool_call_id: call.function_name for call in calls}
    id = own.get("tool_call_id", result.source_call_id)
    name = own.get("name") if is_own else names.get(result.source_call_id or "")
    if not isinstance(id, str | None) or not isinstance(name, str | None):
        raise ValueError("the id or the name of a result is no text")
    return Message("tool", content, tool_call_id=id, name=name)


def _own(extra: _Extra) -> dict[str, JSON]:
    return _object((extra or {}).get(OWN))


def _object(value: JSON) -> dict[str, JSON]:
    return value if isinstance(value, dict) else {}
