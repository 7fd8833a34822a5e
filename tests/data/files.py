"""Files of prompts, as tests write them."""

from __future__ import annotations

import json

ROWS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n), "facts": {"n": n}} for n in range(40)]


def write_lines(path, rows=tuple(ROWS)):
    """A file of JSON lines."""
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    return path
