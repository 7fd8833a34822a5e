"""Clients take turns, whatever each of them adds and removes; a brute-force model is the oracle."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.embedded.scheduler import Turns

CLIENTS = st.tuples(st.sampled_from("ab"), st.sampled_from("xyz")) | st.just(())
STEPS = st.lists(st.tuples(st.sampled_from(["add", "add", "pop", "remove"]), CLIENTS), max_size=60)


def passed_over(prefix, waiting, since, last):
    """The clients of the level of this one that have waited since before its last turn."""
    level = len(prefix) - 1
    rivals = {c[: level + 1] for c in waiting.values() if c and c[:level] == prefix[:level]}
    return [rival for rival in rivals - {prefix} if since[rival] <= last.get(prefix, -1)]


@given(STEPS)
def test_no_client_has_two_turns_while_another_one_waits(steps):
    turns: Turns[int] = Turns()
    waiting: dict[int, tuple[str, ...]] = {}
    since: dict[tuple[str, ...], int] = {}
    last: dict[tuple[str, ...], int] = {}
    for number, (step, client) in enumerate(steps):
        own = [entry for entry, sender in waiting.items() if sender == client]
        if step == "add":
            turns.add(number, client)
            waiting[number] = client
        elif step == "remove" and own:
            turns.remove(own[-1], client)
            del waiting[own[-1]]
        elif step == "pop" and waiting:
            entry = turns.pop()
            served = waiting.pop(entry)
            # Of one client, the order of arrival.
            assert all(entry < other for other, sender in waiting.items() if sender == served)
            for level in range(len(served)):
                prefix = served[: level + 1]
                assert passed_over(prefix, waiting, since, last) == []
                last[prefix] = number
        for level in (1, 2):
            present = {c[:level] for c in waiting.values() if c}
            since = {p: n for p, n in since.items() if len(p) != level or p in present}
            for prefix in present:
                # A turn of its own begins a new wait.
                since[prefix] = max(since.get(prefix, number), last.get(prefix, -1))
        assert len(turns) == len(waiting)
        assert sorted(turns) == sorted(waiting)
