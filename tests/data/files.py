"""Writers of files of prompts for tests."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq

ROWS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n), "facts": {"n": n}} for n in range(40)]


def write_lines(path, rows=tuple(ROWS)):
    """A file of JSON lines."""
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path, rows=tuple(ROWS), **settings):
    """A Parquet file of the same rows."""
    pq.write_table(pa.Table.from_pylist(list(rows)), path, **settings)
    return path


def write_arrow(path, rows=tuple(ROWS), *, stream=True, batch=7):
    """An Arrow file as `datasets` writes it (a stream of batches), or one with a table of contents."""
    table = pa.Table.from_pylist(list(rows))
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path
