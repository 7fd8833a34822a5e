"""A cache that forgets what was not used for longest."""

from __future__ import annotations

from collections import OrderedDict


class Cache:
    """At most `capacity` values by key. Reading and writing a key make it the latest."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("the capacity must be at least 1")
        self.capacity = capacity
        self.values: OrderedDict[str, int] = OrderedDict()
        self.hits = 0
        self.misses = 0

    def get(self, key: str) -> int | None:
        """The value of a key, or None."""
        if key not in self.values:
            self.misses += 1
            return None
        self.hits += 1
        self.values.move_to_end(key)
        return self.values[key]

    def put(self, key: str, value: int) -> None:
        """Store a value; the one that was not used for longest makes way."""
        self.values[key] = value
        self.values.move_to_end(key)
        if len(self.values) > self.capacity:
            self.values.popitem(last=False)


def replay(capacity: int, steps: list[list[str]]) -> list[str]:
    """The keys that remain after steps, the oldest first, then hits and misses.

    steps: [key] reads, [key, value] writes.
    """
    cache = Cache(capacity)
    for key, *value in steps:
        if value:
            cache.put(key, int(value[0]))
        else:
            cache.get(key)
    return [*cache.values, f"{cache.hits}/{cache.hits + cache.misses}"]


def reads(capacity: int, steps: list[list[str]]) -> list[int | None]:
    """What each read of `replay` returned."""
    cache = Cache(capacity)
    results: list[int | None] = []
    for key, *value in steps:
        if value:
            cache.put(key, int(value[0]))
        else:
            results.append(cache.get(key))
    return results
