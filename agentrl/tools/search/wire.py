"""The `/retrieve` protocol of Search-R1 (arXiv:2503.09516): its requests and replies.

    POST /retrieve   {"queries": ["..."], "topk": 3, "return_scores": true}
    200              {"result": [[{"document": {"id": "7", "contents": "..."}, "score": 1.5}, ...]]}

One list for each query, best first. Without `return_scores` the lists hold the documents themselves.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentrl.http.requests import json_of
from agentrl.tools.search.corpus import Passage
from agentrl.tools.search.index import Hit
from agentrl.types import JSON

PATH = "/retrieve"
DEFAULT_TOPK = 3
_MAX_SCORE = math.nextafter(math.inf, 0)
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class QueryBounds:
    """The bounds of a server. max_queries, max_topk: of one request. max_query_chars: of one query."""

    # More than max_queries of the longest queries of a model fill: no query may fail its batch.
    max_bytes: int = 8 << 20
    max_queries: int = 512
    max_query_chars: int = 8192
    max_topk: int = 100


@dataclass(frozen=True, slots=True)
class RetrieveRequest:
    """The fields of one request."""

    queries: tuple[str, ...]
    topk: int = DEFAULT_TOPK
    return_scores: bool = False


def request_body(request: RetrieveRequest) -> bytes:
    """The body of a request."""
    payload = {"queries": request.queries, "topk": request.topk, "return_scores": request.return_scores}
    return json.dumps(payload, ensure_ascii=False).encode()


def read_request(body: bytes, bounds: QueryBounds, default_topk: int) -> RetrieveRequest:
    """Parse the body of a request. Unknown keys are ignored.

    Raises:
        ValueError: it is not JSON.
        LookupError: it is no request, or exceeds a bound; one sentence says how.
    """
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("the body is not JSON") from None
    if not isinstance(payload, dict):
        raise LookupError("the body must be a JSON object with `queries`")
    queries = payload.get("queries")
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise LookupError("`queries` must be a list of strings")
    if not 1 <= len(queries) <= bounds.max_queries:
        raise LookupError(f"`queries` holds 1 to {bounds.max_queries} queries, got {len(queries)}")
    if max(map(len, queries)) > bounds.max_query_chars:
        raise LookupError(f"a query has at most {bounds.max_query_chars} characters")
    if any(_SURROGATE.search(query) for query in queries):
        raise LookupError("a query holds half of a surrogate pair; send valid Unicode")
    topk = payload.get("topk")
    topk = default_topk if topk is None else topk
    if not isinstance(topk, int) or isinstance(topk, bool) or not 1 <= topk <= bounds.max_topk:
        raise LookupError(f"`topk` must be a whole number from 1 to {bounds.max_topk}")
    scores = payload.get("return_scores", False)
    if not isinstance(scores, bool):
        raise LookupError("`return_scores` must be true or false")
    return RetrieveRequest(tuple(queries), topk, scores)


def results_of(results: Sequence[Sequence[Hit]], *, return_scores: bool) -> Iterator[list[JSON]]:
    """The entries of `result` in a reply, one for each query, with or without scores."""
    for hits in results:
        yield [_hit_json(hit, return_scores) for hit in hits]


def read_reply(body: bytes, queries: int, topk: int) -> list[tuple[Hit, ...]]:
    """Parse a reply to a number of queries, with or without scores; at most `topk` hits for each.

    Raises:
        ValueError: it is no reply to them; one clause says why.
    """
    payload = json_of(body)
    result = payload.get("result") if isinstance(payload, dict) else None
    result = result if isinstance(result, list) else [None]
    lists = [hits for hits in result if isinstance(hits, list)]
    if len(lists) < len(result):
        raise ValueError("the reply has no `result` with a list for each query")
    if len(lists) != queries:
        raise ValueError(f"the reply answers {len(lists)} queries instead of {queries}")
    return [tuple(_read_hit(hit) for hit in hits[:topk]) for hits in lists]


def _hit_json(hit: Hit, return_scores: bool) -> JSON:
    document: JSON = {"id": hit.passage.id, "contents": hit.passage.contents}
    return {"document": document, "score": hit.score} if return_scores else document


def _read_hit(entry: JSON) -> Hit:
    score: float | None = None
    document = entry
    if isinstance(entry, dict) and "document" in entry:
        document, number = entry["document"], entry.get("score")
        score = float(number) if isinstance(number, int | float) and abs(number) <= _MAX_SCORE else None
    contents = document.get("contents") if isinstance(document, dict) else None
    if not isinstance(document, dict) or not isinstance(contents, str):
        raise ValueError("a document of the reply has no `contents`")
    return Hit(Passage(str(document.get("id", "")), _encodable(contents)), score)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
