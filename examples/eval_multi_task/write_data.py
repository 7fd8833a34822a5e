"""The rows of the example: sums to train on, and three held-out sets of other kinds."""

import json
from pathlib import Path

FOLDER = Path(__file__).parent / "data"


def rows(name: str) -> list[dict[str, str]]:
    """Those of a file."""
    if name == "choices":
        return [
            {"question": f"{n} + {n}? (A) {2 * n} (B) {2 * n + 1}", "answer": "A"} for n in range(200, 224)
        ]
    if name == "doubles":
        return [{"problem": f"Double {n}.", "solution": str(2 * n)} for n in range(300, 324)]
    start = 0 if name == "train" else 100
    return [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(start, start + 64)]


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in ("train", "sums", "choices", "doubles"):
        lines = [json.dumps(row) + "\n" for row in rows(name)]
        (FOLDER / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
