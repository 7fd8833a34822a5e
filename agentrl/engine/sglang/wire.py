"""`POST /generate` and the control endpoints as SGLang speaks them, from the client's side.

    POST /generate        {"rid": "..", "input_ids": [1, 10], "sampling_params": {..}, "return_logprob": true}
    200                   {"output_ids": [59], "text": "..", "meta_info": {
                           "finish_reason": {"type": "length"}, "weight_version": "default",
                           "cached_tokens": 1, "output_token_logprobs": [[-3.89, 59, null]]}}
    POST /abort_request   {"rid": ".."}: that request answers at once, with what it has
    GET  /server_info     how long requests may be      GET /model_info   the weights' version

As observed on SGLang 0.5.15. Its logprobs are after temperature, before top-p and top-k; at temperature 0
they are those of temperature 1. (With SGLANG_RETURN_ORIGINAL_LOGPROB set they are before temperature: do not
set it on a server whose logprobs are trained on.)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from agentrl.errors import EngineError, RequestTooLargeError
from agentrl.protocols import Sampling

ROUTING_KEY = "x-smg-routing-key"
"""The header that sglang-router keeps a session on one server by."""

UNSET_VERSION = "default"
"""The weight_version of a server that was never told one: version 0."""

_SEEDS = 2**63
_SHOWN_CHARACTERS = 300


class WireModel(BaseModel):
    """Base of what a server tells: read strictly, and what is not known does not matter."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class FinishReason(WireModel):
    """Why a request ended. matched: the stop string or token. message: why it was aborted."""

    type: Literal["length", "stop", "abort"]
    matched: str | int | None = None
    message: str | None = None


class MetaInfo(WireModel):
    """What a reply says about its tokens. An entry of output_token_logprobs is (logprob, id, text).

    output_token_versions: the version of each token, where they differ. No SGLang tells them, `agentrl
    serve` does.
    """

    finish_reason: FinishReason
    weight_version: str
    cached_tokens: Annotated[int, Field(ge=0)] = 0
    output_token_logprobs: list[tuple[float, int, str | None]] = Field(default_factory=list)
    output_token_versions: list[str] | None = None


class GenerateReply(WireModel):
    """The reply to one request."""

    text: str = ""
    output_ids: list[int] = Field(default_factory=list)
    meta_info: MetaInfo


class ServerInfo(WireModel):
    """How long a request may be, as /server_info tells. Only SGLang itself tells max_req_input_len."""

    context_length: Annotated[int, Field(ge=1)] | None = None
    max_req_input_len: int | None = None
    max_total_num_tokens: int | None = None
    page_size: Annotated[int, Field(ge=1)] = 1


class ModelInfo(WireModel):
    """What /model_info tells."""

    weight_version: str = UNSET_VERSION


class RouterWorker(WireModel):
    """A server behind a router."""

    url: str


class RouterWorkers(WireModel):
    """The servers behind a router, as its /workers tells."""

    workers: list[RouterWorker]


class Capacity(NamedTuple):
    """How many tokens fit: in prompt and completion together, and in a prompt."""

    total: int
    prompt: int

    def check(self, prompt_len: int, max_new_tokens: int) -> None:
        """Refuse what can never fit.

        Raises:
            RequestTooLargeError: naming all three numbers.
        """
        if prompt_len > self.prompt or prompt_len + max_new_tokens > self.total:
            raise RequestTooLargeError(
                f"a prompt of {prompt_len} tokens and max_new_tokens = {max_new_tokens} exceed what the "
                f"server holds ({self.total} tokens in all, {self.prompt} of them prompt); start it with a "
                "longer context or ask for fewer tokens."
            )


UNBOUNDED_CAPACITY = Capacity(1 << 62, 1 << 62)

T = TypeVar("T", bound=WireModel)

# Four times as fast as json.dumps where there are hundreds of tokens.
_REQUEST: TypeAdapter[dict[str, object]] = TypeAdapter(dict[str, object])


def read(kind: type[T], body: bytes, what: str) -> T:
    """What a body tells. what: names it in the sentence.

    Raises:
        EngineError: it is no such reply.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise EngineError(
            f"{what} is no reply of the SGLang protocol ({where}: {first['msg'].lower()}); check the address "
            "and the server's version."
        ) from None


def capacity_of(info: ServerInfo) -> Capacity:
    """What fits into a server.

    SGLang keeps five tokens of a request for itself where it tells max_req_input_len, and asks for a page of
    its cache more than a request needs; a longer request it would cut without a word.
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
        EngineError: it is a word; versions are counted.
    """
    if weight_version == UNSET_VERSION:
        return 0
    if not (weight_version.isascii() and weight_version.isdigit() and len(weight_version) < 10):
        raise EngineError(
            f"the server's weight_version is {weight_version[:40]!r}; start it without --weight-version, or "
            "with a whole number."
        )
    return int(weight_version)


def written(rid: str, prompt_ids: Sequence[int], sampling: Sampling) -> bytes:
    """A request for one completion. Whatever a server may have defaults for is said."""
    rules: dict[str, object] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        # The text shows what stopped a completion at its limit, so nothing of it may be left out.
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    if sampling.stop:
        rules["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        rules["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.seed is not None:
        # SGLang holds it in 64 signed bits.
        rules["sampling_seed"] = sampling.seed % _SEEDS
    ids = prompt_ids if isinstance(prompt_ids, list) else [int(i) for i in prompt_ids]
    request: dict[str, object] = {
        "rid": rid,
        "input_ids": ids,
        "sampling_params": rules,
        "return_logprob": True,
    }
    return _REQUEST.dump_json(request)


def written_abort(rid: str) -> bytes:
    """A request that ends another one. SGLang ends every request whose rid begins with this one."""
    return json.dumps({"rid": rid}).encode()


def refusal(status: int, body: bytes) -> str:
    """What a server said instead of a reply, as far as it fits into a sentence."""
    said = " ".join(body[: 4 * _SHOWN_CHARACTERS].decode("utf-8", "replace").split())
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        told = None
    if isinstance(told, dict):
        inner = told.get("error")
        message = inner.get("message") if isinstance(inner, dict) else told.get("message")
        said = " ".join(message.split()) if isinstance(message, str) else said
    return f"answered {status}: {said[:_SHOWN_CHARACTERS]}"
