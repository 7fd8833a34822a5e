"""Reply bodies of the server."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from agentrl.engine.served.requests import CompletionRequest, TextCodec
from agentrl.engine.sglang.routed import encoded
from agentrl.types import (
    JSON,
    KEPT_IDS,
    ROUTED_EXPERTS,
    Completion,
    ExpertLayers,
    Finish,
    FloatArray,
    RequestTimes,
)

_ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class Answer(NamedTuple):
    """What the engine has for a request. scores: logprobs of the prompt's tokens after `score_from`."""

    completion: Completion
    scores: FloatArray | None = None


def reply(
    request: CompletionRequest,
    answer: Answer,
    codec: TextCodec,
    *,
    version: int,
    seconds: float,
    ended: bool = True,
) -> dict[str, JSON]:
    """The reply to one request. version: the current one. ended: False where more tokens will follow."""
    completion = answer.completion
    ids: list[int] = completion.token_ids.tolist()
    meta: dict[str, JSON] = {
        "id": request.rid,
        "finish_reason": _finish(request, completion) if ended else None,
        "prompt_tokens": len(request.prompt_ids),
        "completion_tokens": len(ids),
        "cached_tokens": completion.cached_tokens,
        "weight_version": str(version),
        "num_retractions": 0,
        "dp_rank": None,
        "e2e_latency": seconds,
    }
    if ended:
        meta |= _times(completion.seconds)
    if request.logprobs:
        pairs = zip(completion.logprobs.tolist(), ids, strict=True)
        meta["input_token_logprobs"] = _input_logprobs(request, answer)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        meta["output_token_logprobs_length"] = len(ids)
    if (kept := completion.extras.get(KEPT_IDS)) is not None:
        meta["output_kept_ids"] = [kept_ids.tolist() for kept_ids in kept.lists()]
    if (layers := request.sampling.return_routed_experts) is not None and ended:
        meta["routed_experts"] = _routed(completion, layers)
    versions: list[int] = completion.versions.tolist()
    if set(versions) - {version}:
        meta["output_token_versions"] = [str(token_version) for token_version in versions]
    return {"text": _text(request, completion, codec), "output_ids": list(ids), "meta_info": meta}


def _input_logprobs(request: CompletionRequest, answer: Answer) -> list[JSON]:
    """As SGLang has them: from `score_from` on, whose own logprob is null."""
    if request.score_from is None or answer.scores is None:
        return []
    values: list[float | None] = [None, *answer.scores.tolist()]
    ids = request.prompt_ids[request.score_from :]
    return [[logprob, token, None] for logprob, token in zip(values, ids, strict=True)]


def _routed(completion: Completion, layers: ExpertLayers) -> JSON:
    """As SGLang has them; None where the request ended before it had a slot."""
    parts = [part.get(ROUTED_EXPERTS) for part in (completion.prompt_extras, completion.extras)]
    arrays = [part.values.astype(np.int16, copy=False) for part in parts if part is not None]
    if not arrays:
        return None
    # The token that was sampled last has not been an input.
    return encoded(np.concatenate(arrays)[:-1], layers.numbers, layers.num_layers)


def _times(seconds: RequestTimes) -> dict[str, JSON]:
    """As SGLang has them with --enable-metrics, for a request that has just ended."""
    queue, prefill, decode = seconds.queue, seconds.prefill, seconds.decode
    if queue is None or prefill is None or decode is None:
        return {}
    end = time.time()
    return {
        "queue_time": queue,
        "forward_entry_time": end - decode - prefill,
        "prefill_finished_time": end - decode,
        "request_finished_ts": end,
    }


def refusal(sentence: str) -> dict[str, JSON]:
    """The reply to a refused request."""
    return {"error": {"message": sentence}}


def openai_error(sentence: str, status: int, code: str | None = None) -> dict[str, JSON]:
    """The reply to a refused or failed request, in OpenAI's form."""
    kind = _ERRORS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": sentence, "type": kind, "code": code}}


def _finish(request: CompletionRequest, completion: Completion) -> JSON:
    match completion.finish:
        case Finish.LENGTH:
            return {"type": "length", "length": request.sampling.max_new_tokens}
        case Finish.STOP:
            return {"type": "stop", "matched": completion.matched}
        case Finish.ABORT:
            return {"type": "abort", "message": "Aborted"}


def _text(request: CompletionRequest, completion: Completion, codec: TextCodec) -> str:
    ids = completion.token_ids.tolist()
    stopped = completion.finish is Finish.STOP and not request.keep_stop
    if stopped and isinstance(completion.matched, int):
        ids = ids[:-1]
    text = codec.decode(ids, not request.keep_special)
    if stopped and isinstance(completion.matched, str):
        text = text.split(completion.matched, 1)[0]
    return text
