"""Random corpora, and reference rankings by the formulas."""

from __future__ import annotations

import json
import math
import random
from collections import Counter

import numpy as np

from agentrl.tools.search import Corpus
from agentrl.tools.search.bm25 import words

VOCABULARY = [f"w{number}" for number in range(60)]
DIMENSION = 16


def texts(seed: int, count: int = 200) -> list[str]:
    """Titles and texts of words, some common and some rare, some of them the same twice."""
    rng = random.Random(seed)
    weights = [1 / (n + 1) for n in range(len(VOCABULARY))]
    passages = [
        f"T{n % 50}\n" + " ".join(rng.choices(VOCABULARY, weights, k=rng.randint(1, 12)))
        for n in range(count - 5)
    ]
    return [*passages, *passages[:5]]


def queries(seed: int, count: int = 50) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices([*VOCABULARY, "unknown"], k=rng.randint(1, 5))) for _ in range(count)]


def jsonl(path, passages: list[str]):
    lines = [json.dumps({"id": f"p{n}", "contents": text}) for n, text in enumerate(passages)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def bm25_scores(passages: list[str], query: str) -> np.ndarray:
    """Okapi BM25 in Lucene's form, in float64, passage by passage: k1 = 1.5, b = 0.75."""
    counts = [Counter(words(text)) for text in passages]
    lengths = [sum(count.values()) for count in counts]
    mean = sum(lengths) / len(lengths)
    scores = np.zeros(len(passages))
    for word in words(query):
        holders = sum(word in count for count in counts)
        idf = math.log(1 + (len(passages) - holders + 0.5) / (holders + 0.5))
        for row, count in enumerate(counts):
            scores[row] += idf * count[word] / (count[word] + 1.5 * (0.25 + 0.75 * lengths[row] / mean))
    return scores


def encoder(several) -> np.ndarray:
    """Unit vectors that depend only on the words: equal texts have equal vectors."""
    vectors = np.zeros((len(several), DIMENSION), np.float32)
    for row, text in enumerate(several):
        for word in words(text) or ["none"]:
            vectors[row] += np.random.default_rng(sum(word.encode())).standard_normal(DIMENSION)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def corpus(seed: int = 1) -> Corpus:
    return Corpus.of(texts(seed))
