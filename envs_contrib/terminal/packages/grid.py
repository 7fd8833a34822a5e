"""Maps of characters: `#` is a wall, everything else is free."""

from __future__ import annotations

from collections import deque


def parse(text: str) -> list[str]:
    """The rows of a map, blank lines left out.

    Raises:
        ValueError: the rows have different lengths.
    """
    rows = [line.strip() for line in text.splitlines() if line.strip()]
    if len({len(row) for row in rows}) > 1:
        raise ValueError("rows of different lengths")
    return rows


def rotate(text: str) -> str:
    """The map turned clockwise by a quarter."""
    rows = parse(text)
    return "\n".join("".join(column) for column in zip(*reversed(rows), strict=True))


def neighbours(rows: list[str], row: int, column: int) -> list[tuple[int, int]]:
    """The free places above, below, left and right of a place."""
    around = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
    return [(r, c) for r, c in around if 0 <= r < len(rows) and 0 <= c < len(rows[0]) and rows[r][c] != "#"]


def distance(text: str) -> int:
    """The fewest steps from the first free place to the last one, in reading order; -1 without a way."""
    rows = parse(text)
    free = [(r, c) for r, line in enumerate(rows) for c, place in enumerate(line) if place != "#"]
    if not free:
        return -1
    steps = {free[0]: 0}
    queue = deque([free[0]])
    while queue:
        place = queue.popleft()
        for neighbour in neighbours(rows, *place):
            if neighbour not in steps:
                steps[neighbour] = steps[place] + 1
                queue.append(neighbour)
    return steps.get(free[-1], -1)


def rooms(text: str) -> list[int]:
    """The sizes of the connected free areas, the largest first."""
    rows = parse(text)
    rest = {(r, c) for r, line in enumerate(rows) for c, place in enumerate(line) if place != "#"}
    sizes = []
    while rest:
        stack, size = [rest.pop()], 1
        while stack:
            found = [place for place in neighbours(rows, *stack.pop()) if place in rest]
            rest.difference_update(found)
            stack += found
            size += len(found)
        sizes.append(size)
    return sorted(sizes, reverse=True)
