"""Write the built-in corpus and questions as files: python -m envs_contrib.search_r1 FOLDER.

corpus.jsonl      passages as Search-R1 has them; `agentrl serve-search` and retriever take it
SPLIT.jsonl       id, question, golden_answers; prompt_data takes it
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from agentrl.tools import JSON
from envs_contrib.search_r1.env import SearchR1
from envs_contrib.search_r1.world import as_rows, passages


def main(words: Sequence[str] | None = None) -> None:
    """Write all files into a folder, which is made."""
    parser = argparse.ArgumentParser(prog="python -m envs_contrib.search_r1", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(words)
    folder, seed = Path(chosen.folder), int(chosen.seed)
    folder.mkdir(parents=True, exist_ok=True)
    corpus = ({"id": str(row), "contents": contents} for row, contents in enumerate(passages(seed)))
    print(f"{_write(folder / 'corpus.jsonl', corpus):,} passages in {folder / 'corpus.jsonl'}")
    for split in SearchR1.splits:
        path = folder / f"{split}.jsonl"
        print(f"{_write(path, as_rows(seed, split)):,} questions in {path}")


def _write(path: Path, rows: Iterable[Mapping[str, JSON]]) -> int:
    """Write one object a line; returns their number."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False), file=file)
            count += 1
    return count


if __name__ == "__main__":
    main()
