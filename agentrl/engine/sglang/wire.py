"""`POST /generate` and the control endpoints of SGLang, from the client's side.

    POST /generate        {"rid": "..", "input_ids": [1, 10], "sampling_params": {..}, "return_logprob": true,
                           "extra_key": ".."}: requests share cached prefixes only where this salt is equal
    200                   {"output_ids": [59], "text": "..", "meta_info": {
                           "finish_reason": {"type": "length"}, "weight_version": "default",
                           "cached_tokens": 1, "output_token_logprobs": [[-3.89, 59, null]]}}
    with "stream": true   data: {"output_ids": [59], .., "meta_info": {"finish_reason": null, ..}}, an event
                           with all tokens so far; the last one is the reply, `data: [DONE]` the end
    POST /abort_request   {"rid": ".."}: that request returns at once, with its tokens so far
    GET  /server_info     the maximum request length    GET /model_info   the weights' version
    GET  /v1/loads        the queue, and how full the cache is

Where a request asks for the ids that top_k and top_p kept, the body also has "return_kept_ids", which
`agentrl serve` answers with meta_info.output_kept_ids, [[59, 254], ..], and logprobs renormalised over them;
and "top_logprobs_num", which SGLang answers with meta_info.output_top_logprobs, [[[-3.9, 59, null], ..], ..].
Experts are asked for with "return_routed_experts" and "routed_experts_start_len", see `routed`; of servers
that the run starts with "session_params": {"routed_experts_start_len": 1}, which a router passes on.

As observed on SGLang 0.5.15. Its logprobs are after temperature, before top-p and top-k; at temperature 0
they are those of temperature 1. (With SGLANG_RETURN_ORIGINAL_LOGPROB set they are before temperature: do not
set it on a server whose logprobs are trained on.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, TypeAdapter, ValidationError

from agentrl.engine.config import reports_prefix
from agentrl.errors import EngineError, EngineUnavailableError, RequestTooLargeError
from agentrl.http.requests import LONG_BYTES, json_of
from agentrl.types import ROUTED_EXPERTS, RequestTimes
from agentrl.types.seams import Sampling

ROUTING_KEY = "x-smg-routing-key"
"""The header by which sglang-router routes a session to one server."""

UNSET_VERSION = "default"
"""The weight_version of a server where none was set: version 0."""

_SEEDS = 2**63
_META_BYTES, _BYTES_OF_TOKEN, _BYTES_OF_LIKELY = 1 << 20, 256, 64
# Four, in base64.
_BYTES_OF_EXPERT = 6
_META_VALUES, _VALUES_OF_TOKEN, _VALUES_OF_LIKELY = 10_000, 16, 8
_ALL = 1 << 40
_MAX_MESSAGE_CHARS = 300


# Parsing a longer one for its tokens alone would hold the event loop.
_MAX_TOLD_BYTES = 1 << 20
_END, _FIELD, _DONE = b"\n\n", b"data:", b"[DONE]"

_Entry = tuple[float | None, int, str | None]


class WireModel(BaseModel):
    """Base of a server's replies: types are strict, unknown fields are ignored.

    A list has FailFast: else pydantic would list the errors of all entries, of half a million for seconds.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class FinishReason(WireModel):
    """Why a request ended. matched: the stop string or token. message: why it was aborted."""

    type: Literal["length", "stop", "abort"]
    matched: str | int | None = None
    message: str | None = None


class MetaInfo(WireModel):
    """The metadata of a reply's tokens. An entry of output_token_logprobs is (logprob, id, text).

    output_token_versions: the version of each token, where they differ. SGLang does not report them,
    `agentrl serve` does. output_kept_ids: from `agentrl serve`, see above. output_top_logprobs: from SGLang,
    the likeliest tokens in each one's place, in order; null stands for a logprob of -inf. routed_experts: see
    `routed`. spec_...: tokens that a draft model proposed, those of them that were taken, and passes that
    verified some (counts), where SGLang decodes speculatively.

    e2e_latency, queue_time: in seconds. forward_entry_time, prefill_finished_time, request_finished_ts: when
    the prompt began to be computed, when its first token was there, and the end (seconds since the epoch).
    SGLang reports the last four where it is started with --enable-metrics.
    """

    finish_reason: FinishReason
    weight_version: str
    cached_tokens: Annotated[int, Field(ge=0)] = 0
    output_token_logprobs: Annotated[list[tuple[float, int, str | None]], FailFast()] = Field(
        default_factory=list
    )
    output_token_versions: Annotated[list[str] | None, FailFast()] = None
    output_kept_ids: Annotated[list[Annotated[list[int], FailFast()]] | None, FailFast()] = None
    output_top_logprobs: Annotated[list[Annotated[list[_Entry] | None, FailFast()]] | None, FailFast()] = None
    routed_experts: str | None = None
    spec_num_proposed_drafts: Annotated[int, Field(ge=0)] = 0
    spec_num_correct_drafts: Annotated[int, Field(ge=0)] = 0
    spec_verify_ct: Annotated[int, Field(ge=0)] = 0
    e2e_latency: float | None = None
    queue_time: float | None = None
    forward_entry_time: float | None = None
    prefill_finished_time: float | None = None
    request_finished_ts: float | None = None

    @property
    def times(self) -> RequestTimes:
        """What the server took; without what cannot be, such as a difference of two machines' clocks."""
        begun, first, end = self.forward_entry_time, self.prefill_finished_time, self.request_finished_ts
        return RequestTimes(
            _duration(self.e2e_latency),
            # SGLang says 0 where it does not know.
            None if begun is None else _duration(self.queue_time),
            _duration(first, begun),
            _duration(end, first),
        )


def _duration(end: float | None, begin: float | None = 0.0) -> float | None:
    if end is None or begin is None or not 0.0 <= end - begin < math.inf:
        return None
    return end - begin


class GenerateReply(WireModel):
    """The reply to one request."""

    text: str = ""
    output_ids: Annotated[list[int], FailFast()] = Field(default_factory=list)
    meta_info: MetaInfo


class _PartialMeta(WireModel):
    finish_reason: dict[str, object] | None = None


class PartialReply(WireModel):
    """What an event of a stream says of the tokens so far; an error has none."""

    output_ids: Annotated[list[int], FailFast()] = Field(default_factory=list)
    meta_info: _PartialMeta = _PartialMeta()


class StreamedReply:
    """The chunks of a body -> the reply, which is its last event. tell: is called with the tokens so far.

    max_bytes: of an event.
    """

    def __init__(self, tell: Callable[[Sequence[int]], None], max_bytes: int) -> None:
        self._tell, self._max_bytes = tell, max_bytes
        self._received = bytearray()
        self._last: bytes | None = None
        self._has_ended = False

    def feed(self, data: bytes) -> None:
        """Add bytes, and tell the tokens of the last event that is complete, unless it is the whole reply.

        Raises:
            ValueError: an event is too long, or is none.
        """
        self._received += data
        end = self._received.rfind(_END)
        if len(self._received) - max(end, 0) > self._max_bytes:
            raise ValueError(f"an event of the reply is longer than {self._max_bytes:,} bytes")
        if end < 0:
            return
        events = bytes(self._received[:end]).split(_END)
        del self._received[: end + len(_END)]
        if not all(event.startswith(_FIELD) for event in events):
            raise ValueError("what came between two events of the reply is none")
        texts = [event.removeprefix(_FIELD).strip() for event in events]
        self._has_ended = self._has_ended or _DONE in texts
        texts = [text for text in texts if text != _DONE]
        if texts:
            self._last = texts[-1]
            if len(self._last) <= _MAX_TOLD_BYTES:
                self._tell_those_of(self._last)

    def _tell_those_of(self, event: bytes) -> None:
        try:
            partial = PartialReply.model_validate_json(event)
        except ValidationError:
            raise ValueError("an event of the reply does not follow the SGLang protocol") from None
        if partial.meta_info.finish_reason is None:
            self._tell(partial.output_ids)

    def whole(self, body: bytes) -> bytes:
        """The reply. body: what came in no chunks, as from a server that does not stream.

        Raises:
            EngineUnavailableError: the stream broke off.
            ValueError: see `feed`.
        """
        if body.startswith(_FIELD):
            self.feed(body)
        if self._last is None:
            return body
        if not self._has_ended:
            raise EngineUnavailableError("the server broke off a stream before the end of its reply.")
        return self._last


class ServerInfo(WireModel):
    """The limits in /server_info. Only SGLang itself reports max_req_input_len."""

    context_length: Annotated[int, Field(ge=1)] | None = None
    max_req_input_len: int | None = None
    max_total_num_tokens: int | None = None
    page_size: Annotated[int, Field(ge=1)] = 1


class RankLoad(WireModel):
    """The load of one data-parallel replica: requests in its queue, and the share of its cache in use."""

    num_waiting_reqs: Annotated[int, Field(ge=0)]
    token_usage: Annotated[float, Field(ge=0)]


class ServerLoads(WireModel):
    """The reply of /v1/loads."""

    loads: Annotated[list[RankLoad], FailFast()]


class ModelInfo(WireModel):
    """The reply of /model_info."""

    weight_version: str = UNSET_VERSION


class RouterWorker(WireModel):
    """A server behind a router."""

    url: str


class RouterWorkers(WireModel):
    """The servers behind a router: the reply of /workers."""

    workers: Annotated[list[RouterWorker], FailFast()]


class Capacity(NamedTuple):
    """Maximum numbers of tokens: of prompt and completion together, and of the prompt."""

    total: int
    prompt: int

    def check(self, prompt_len: int, max_new_tokens: int) -> None:
        """Check a request against the capacity.

        Raises:
            RequestTooLargeError: it exceeds the capacity; the message has all three numbers.
        """
        if prompt_len > self.prompt or prompt_len + max_new_tokens > self.total:
            raise RequestTooLargeError(
                f"a prompt of {prompt_len} tokens and max_new_tokens = {max_new_tokens} exceed what the "
                f"server holds ({self.total} tokens in all, {self.prompt} of them prompt); start it with a "
                "longer context or ask for fewer tokens."
            )


class ReplyBounds(NamedTuple):
    """The bounds of a reply: bytes of its body, values of its JSON."""

    max_bytes: int
    max_values: int


def bounds_of(sampling: Sampling, num_prompt: int = 0) -> ReplyBounds:
    """Those of the reply to a request: in proportion to the tokens, and the likeliest ones, that it asks for.

    Where top_p alone says how many ids are kept, a token may have as many as the vocabulary. num_prompt:
    tokens of the prompt, whose experts may be asked for, too (count).
    """
    if sampling.keeps_ids and not reports_prefix(sampling.top_k):
        return ReplyBounds(_ALL, _ALL)
    tokens, likely = sampling.max_new_tokens, sampling.top_k if sampling.keeps_ids else 0
    layers, routed = sampling.return_routed_experts, num_prompt + tokens - sampling.routed_experts_start_len
    bytes_routed = 0 if layers is None else routed * layers.num_layers * layers.k * _BYTES_OF_EXPERT
    return ReplyBounds(
        _META_BYTES + tokens * (_BYTES_OF_TOKEN + likely * _BYTES_OF_LIKELY) + bytes_routed,
        _META_VALUES + tokens * (_VALUES_OF_TOKEN + likely * _VALUES_OF_LIKELY),
    )


UNBOUNDED_CAPACITY = Capacity(1 << 62, 1 << 62)

T = TypeVar("T", bound=WireModel)

# Four times as fast as json.dumps where there are hundreds of tokens.
_REQUEST: TypeAdapter[dict[str, object]] = TypeAdapter(dict[str, object])


def read(model: type[T], body: bytes, what: str) -> T:
    """Parse a body. what: its name in the error message.

    Raises:
        EngineError: the body does not match the model.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise EngineError(
            f"{what} does not follow the SGLang protocol ({where}: {first['msg'].lower()}); check the "
            "address and the server's version."
        ) from None


def capacity_of(info: ServerInfo) -> Capacity:
    """The capacity of a server.

    SGLang reserves five tokens of a request where it reports max_req_input_len, and allocates one cache page
    more than a request needs; it truncates a longer request without an error.
    """
    total = info.context_length or UNBOUNDED_CAPACITY.total
    prompt = total
    if info.max_req_input_len is not None:
        total = min(total, info.max_req_input_len + 4)
        prompt = min(prompt, info.max_req_input_len - 1)
    if info.max_total_num_tokens is not None:
        total = min(total, info.max_total_num_tokens - 2 * info.page_size)
    return Capacity(total, min(prompt, total))


def version_of(weight_version: str) -> int:
    """The number of a weight_version.

    Raises:
        EngineError: it is no whole number.
    """
    if weight_version == UNSET_VERSION:
        return 0
    if not (weight_version.isascii() and weight_version.isdigit() and len(weight_version) < 10):
        raise EngineError(
            f"the server's weight_version is {weight_version[:40]!r}; start it without --weight-version, or "
            "with a whole number."
        )
    return int(weight_version)


class Requested(NamedTuple):
    """What a request asks for beside its sampling.

    salt: of its cached prefixes; None = those of requests without one. adapter: of the servers; None = none.
    version: of its tokens; None = the server reports it. routed: whether a router may be on the way to a
    server that understands `session_params` of ours. stream: its reply comes as events, see `StreamedReply`.
    """

    salt: str | None = None
    adapter: str | None = None
    version: str | None = None
    routed: bool = False
    stream: bool = False


_NOTHING_ELSE = Requested()


def generate_body(
    rid: str, prompt_ids: Sequence[int], sampling: Sampling, asked: Requested = _NOTHING_ELSE
) -> bytes:
    """The body of a request for one completion. Every parameter with a server default is set."""
    rules: dict[str, object] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        # A stop at the limit is detected in the text, so the text must be complete.
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    if sampling.stop:
        rules["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        rules["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.seed is not None:
        # SGLang stores it as a signed 64-bit integer.
        rules["sampling_seed"] = sampling.seed % _SEEDS
    ids = prompt_ids if isinstance(prompt_ids, list) else [int(i) for i in prompt_ids]
    request: dict[str, object] = {"rid": rid, "input_ids": ids, "sampling_params": rules}
    request["return_logprob"] = True
    if asked.stream:
        request["stream"] = True
    if asked.salt is not None:
        request["extra_key"] = asked.salt
    if asked.adapter is not None:
        request["lora_path"] = asked.adapter
    if sampling.keeps_ids:
        request["return_kept_ids"] = True
        if reports_prefix(sampling.top_k):
            request["top_logprobs_num"] = sampling.top_k
    return _REQUEST.dump_json(request | _asked_experts(sampling, routed=asked.routed))


def _asked_experts(sampling: Sampling, *, routed: bool) -> dict[str, object]:
    if sampling.return_routed_experts is None:
        return {}
    start: dict[str, object] = {f"{ROUTED_EXPERTS}_start_len": sampling.routed_experts_start_len}
    return {"session_params": start} if routed else {f"return_{ROUTED_EXPERTS}": True, **start}


def abort_body(rid: str) -> bytes:
    """The body of an abort. SGLang aborts every request whose rid has this prefix."""
    return json.dumps({"rid": rid}).encode()


def refusal(status: int, body: bytes) -> str:
    """The status and error message of a response, truncated to one sentence."""
    message = " ".join(body[: 4 * _MAX_MESSAGE_CHARS].decode("utf-8", "replace").split())
    try:
        parsed = json_of(body) if len(body) <= LONG_BYTES else None
    except ValueError:
        parsed = None
    if isinstance(parsed, dict):
        error = parsed.get("error")
        text = error.get("message") if isinstance(error, dict) else parsed.get("message")
        message = " ".join(text.split()) if isinstance(text, str) else message
    return f"answered {status}: {message[:_MAX_MESSAGE_CHARS]}"
