"""Intervals of integers: [start, end] holds start, start + 1, ..., end."""

from __future__ import annotations

from itertools import pairwise


def merge(intervals: list[list[int]]) -> list[list[int]]:
    """Join intervals that overlap or touch, and sort them.

    Raises:
        ValueError: an interval ends before it begins.
    """
    merged: list[list[int]] = []
    for start, end in sorted(intervals):
        if end < start:
            raise ValueError(f"[{start}, {end}] ends before it begins")
        if merged and start <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def size(intervals: list[list[int]]) -> int:
    """How many integers are in at least one of the intervals."""
    return sum(end - start + 1 for start, end in merge(intervals))


def contains(intervals: list[list[int]], number: int) -> bool:
    """Whether a number is in one of the intervals."""
    return any(start <= number <= end for start, end in intervals)


def gaps(intervals: list[list[int]]) -> list[list[int]]:
    """The intervals between them, in order."""
    merged = merge(intervals)
    return [[before[1] + 1, after[0] - 1] for before, after in pairwise(merged)]
