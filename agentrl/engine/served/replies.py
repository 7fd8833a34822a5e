"""What the server tells of a completion, as SGLang would."""

from __future__ import annotations

from agentrl.engine.served.requests import CompletionRequest, Words
from agentrl.types import JSON, Completion, Finish


def reply(
    asked: CompletionRequest,
    completion: Completion,
    words: Words,
    *,
    version: int,
    seconds: float,
    ended: bool = True,
) -> dict[str, JSON]:
    """The reply to one request. version: that serves now. ended: False where more tokens will follow."""
    ids: list[int] = completion.token_ids.tolist()
    meta: dict[str, JSON] = {
        "id": asked.rid,
        "finish_reason": _finish(asked, completion) if ended else None,
        "prompt_tokens": len(asked.prompt_ids),
        "completion_tokens": len(ids),
        "cached_tokens": completion.cached_tokens,
        "weight_version": str(version),
        "num_retractions": 0,
        "dp_rank": None,
        "e2e_latency": seconds,
    }
    if asked.logprobs:
        pairs = zip(completion.logprobs.tolist(), ids, strict=True)
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        meta["output_token_logprobs_length"] = len(ids)
    versions: list[int] = completion.versions.tolist()
    if set(versions) - {version}:
        meta["output_token_versions"] = [str(one) for one in versions]
    return {"text": _text(asked, completion, words), "output_ids": list(ids), "meta_info": meta}


def refusal(sentence: str) -> dict[str, JSON]:
    """What the server says where it does not do what it was asked for."""
    return {"error": {"message": sentence}}


def _finish(asked: CompletionRequest, completion: Completion) -> JSON:
    match completion.finish:
        case Finish.LENGTH:
            return {"type": "length", "length": asked.sampling.max_new_tokens}
        case Finish.STOP:
            return {"type": "stop", "matched": completion.matched}
        case Finish.ABORT:
            return {"type": "abort", "message": "Aborted"}


def _text(asked: CompletionRequest, completion: Completion, words: Words) -> str:
    ids = completion.token_ids.tolist()
    stopped = completion.finish is Finish.STOP and not asked.keep_stop
    if stopped and isinstance(completion.matched, int):
        ids = ids[:-1]
    text = words.decode(ids, not asked.keep_special)
    if stopped and isinstance(completion.matched, str):
        text = text.split(completion.matched, 1)[0]
    return text
