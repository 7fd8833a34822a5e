"""A queue whose clients take turns, however many entries each of them has."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Turns(Generic[_T]):
    """Entries that wait, of many clients. The entries of one client are in the order of their arrival.

    A client is a sequence of names, such as an address and a session. Those with different first names take
    turns; where it is the turn of a first name, those with different second names under it do, and so on. No
    client has two turns while another one of its level waits.
    """

    def __init__(self) -> None:
        self._own: deque[_T] = deque()
        self._below: OrderedDict[str, Turns[_T]] = OrderedDict()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[_T]:
        yield from self._own
        for turns in self._below.values():
            yield from turns

    def add(self, entry: _T, client: Sequence[str] = ()) -> None:
        """Add an entry of a client. Without names it goes before those with names."""
        self._length += 1
        if client:
            self._below.setdefault(client[0], Turns()).add(entry, client[1:])
        else:
            self._own.append(entry)

    def pop(self) -> _T:
        """Remove the entry whose turn it is.

        Raises:
            IndexError: nothing waits.
        """
        if not self._length:
            raise IndexError("nothing waits")
        self._length -= 1
        if self._own:
            return self._own.popleft()
        name, turns = self._below.popitem(last=False)
        entry = turns.pop()
        if turns:
            self._below[name] = turns
        return entry

    def remove(self, entry: _T, client: Sequence[str] = ()) -> None:
        """Remove an entry of a client, which waits.

        Raises:
            ValueError, KeyError: it does not.
        """
        if client:
            turns = self._below[client[0]]
            turns.remove(entry, client[1:])
            if not turns:
                del self._below[client[0]]
        else:
            self._own.remove(entry)
        self._length -= 1

    def clear(self) -> None:
        """Remove all entries."""
        self._own.clear()
        self._below.clear()
        self._length = 0
