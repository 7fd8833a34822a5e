"""Search: indexes over passages, and tools that search them here or over HTTP."""

from agentrl.tools.search.bm25 import Bm25Index, words
from agentrl.tools.search.corpus import Corpus, Passage
from agentrl.tools.search.dense import DenseIndex, Encoder
from agentrl.tools.search.hybrid import HybridIndex
from agentrl.tools.search.index import Hit, Ranked, SearchIndex
from agentrl.tools.search.tool import NO_HITS, RemoteSearchTool, SearchTool, as_documents

__all__ = [
    "NO_HITS",
    "Bm25Index",
    "Corpus",
    "DenseIndex",
    "Encoder",
    "Hit",
    "HybridIndex",
    "Passage",
    "Ranked",
    "RemoteSearchTool",
    "SearchIndex",
    "SearchTool",
    "as_documents",
    "words",
]
