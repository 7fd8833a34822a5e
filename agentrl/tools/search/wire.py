"""The `/retrieve` protocol of Search-R1 (arXiv:2503.09516), read and written.

    POST /retrieve   {"queries": ["..."], "topk": 3, "return_scores": true}
    200              {"result": [[{"document": {"id": "7", "contents": "..."}, "score": 1.5}, ...]]}

One list for each query, best first. Without `return_scores` the documents stand in the lists themselves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.tools.search.corpus import Passage
from agentrl.tools.search.index import Hit
from agentrl.types import JSON

PATH = "/retrieve"
DEFAULT_TOPK = 3


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a server takes. max_queries, max_topk: of one request. max_query_chars: of one query."""

    # More than as many queries as a model may write them can fill: a query must not fail its batch.
    max_bytes: int = 8 << 20
    max_queries: int = 512
    max_query_chars: int = 8192
    max_topk: int = 100


@dataclass(frozen=True, slots=True)
class RetrieveRequest:
    """What one request asks for."""

    queries: tuple[str, ...]
    topk: int = DEFAULT_TOPK
    return_scores: bool = False


def written(request: RetrieveRequest) -> bytes:
    """A request as it is sent."""
    told = {"queries": request.queries, "topk": request.topk, "return_scores": request.return_scores}
    return json.dumps(told, ensure_ascii=False).encode()


def read_request(body: bytes, bounds: Bounds, default_topk: int) -> RetrieveRequest:
    """The request that a body is. Keys that the protocol does not know do not matter.

    Raises:
        ValueError: it is not JSON.
        LookupError: it is no request, or breaks a bound; one sentence says how.
    """
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("the body is not JSON") from None
    if not isinstance(told, dict):
        raise LookupError("the body must be a JSON object with `queries`")
    queries = told.get("queries")
    if not isinstance(queries, list) or not all(isinstance(one, str) for one in queries):
        raise LookupError("`queries` must be a list of strings")
    if not 1 <= len(queries) <= bounds.max_queries:
        raise LookupError(f"`queries` holds 1 to {bounds.max_queries} queries, got {len(queries)}")
    if max(map(len, queries)) > bounds.max_query_chars:
        raise LookupError(f"a query has at most {bounds.max_query_chars} characters")
    topk = told.get("topk")
    topk = default_topk if topk is None else topk
    if not isinstance(topk, int) or isinstance(topk, bool) or not 1 <= topk <= bounds.max_topk:
        raise LookupError(f"`topk` must be a whole number from 1 to {bounds.max_topk}")
    scores = told.get("return_scores", False)
    if not isinstance(scores, bool):
        raise LookupError("`return_scores` must be true or false")
    return RetrieveRequest(tuple(queries), topk, scores)


def answered(found: Sequence[Sequence[Hit]], *, return_scores: bool) -> dict[str, JSON]:
    """A reply with and without scores."""
    result: list[JSON] = [[_told(hit, return_scores) for hit in hits] for hits in found]
    return {"result": result}


def read_reply(body: bytes, queries: int, topk: int) -> list[tuple[Hit, ...]]:
    """What a server found for so many queries, with or without scores; at most `topk` for each.

    Raises:
        ValueError: it is no reply to them; one clause says why.
    """
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("the reply is not JSON") from None
    result = told.get("result") if isinstance(told, dict) else None
    if not isinstance(result, list) or not all(isinstance(hits, list) for hits in result):
        raise ValueError("the reply has no `result` with a list for each query")
    if len(result) != queries:
        raise ValueError(f"the reply answers {len(result)} queries instead of {queries}")
    return [tuple(_read(one) for one in hits[:topk]) for hits in result]


def _told(hit: Hit, return_scores: bool) -> JSON:
    document: JSON = {"id": hit.passage.id, "contents": hit.passage.contents}
    return {"document": document, "score": hit.score} if return_scores else document


def _read(told: JSON) -> Hit:
    score: float | None = None
    document = told
    if isinstance(told, dict) and "document" in told:
        document, given = told["document"], told.get("score")
        score = float(given) if isinstance(given, int | float) else None
    contents = document.get("contents") if isinstance(document, dict) else None
    if not isinstance(document, dict) or not isinstance(contents, str):
        raise ValueError("a document of the reply has no `contents`")
    return Hit(Passage(str(document.get("id", "")), _encodable(contents)), score)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
