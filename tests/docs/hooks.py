"""The table of functions by path, as docs/functions.md shows it: `make reference` writes it."""

from __future__ import annotations

from pathlib import Path

from agentrl.assembly.hooks import hooks

PAGE = Path(__file__).parents[2] / "docs" / "functions.md"
_HEAD = "| setting | signature | called | may change | example |\n|---|---|---|---|---|\n"


def table() -> str:
    """A row of each hook."""
    rows = (
        (f"`{name}`", f"`{hook.signature}`", hook.runs, hook.changes, hook.example)
        for name, hook in hooks().items()
    )
    lines = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows)
    return _HEAD + "".join(f"| {line} |\n" for line in lines)


def shown(page: str) -> str:
    """The table of a page."""
    _, _, rest = page.partition(_HEAD.splitlines()[0])
    lines = (_HEAD.splitlines()[0] + rest).splitlines(keepends=True)
    return "".join(line for number, line in enumerate(lines) if all(x[0] == "|" for x in lines[: number + 1]))


def write() -> None:
    """Write the table into the page."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page.replace(shown(page), table()), encoding="utf-8")
