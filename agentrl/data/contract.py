"""The promises of a source of prompts, checked on its first ones."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.data.source import DataSource, Prompt, Skipped
from agentrl.types import Message, Task

_FIRST = 8
_FAR = 10_007


def check_data_source(make: Callable[..., object], *, seed: int = 0) -> DataSource:
    """Check that a source of prompts keeps its promises: use it in the tests of your own.

    make: the class, or a function that is called with `seed=`. It is called twice. Both sources must give

    - a `fingerprint`: the same text;
    - for any ordinal a `Prompt` with that number, or `Skipped`; the first ones, and one far away, are asked
      for;
    - the same prompts, in whatever order they are asked for.

    Returns:
        One of the two.

    Raises:
        ValueError: a promise is broken; one sentence says which. Errors of the source itself pass through.
    """
    source, other = _made(make, seed), _made(make, seed)
    if not isinstance(source.fingerprint, str) or not source.fingerprint:
        raise ValueError(f"`fingerprint` is {source.fingerprint!r}; it is a text that identifies the content")
    if other.fingerprint != source.fingerprint:
        raise ValueError(
            "two sources that were made alike have two fingerprints; make it of the content alone"
        )
    ordinals = (*range(_FIRST), _FAR)
    first = {ordinal: source.prompt(ordinal) for ordinal in ordinals}
    for ordinal, found in first.items():
        _check_prompt(found, ordinal)
    for ordinal in reversed(ordinals):
        for one in (source, other):
            if one.prompt(ordinal) != first[ordinal]:
                raise ValueError(
                    f"prompt {ordinal} was another when it was asked for again; draw with "
                    'random.Random(f"{self.seed}/{ordinal}"), and keep no count of the calls'
                )
    return source


def _made(make: Callable[..., object], seed: int) -> DataSource:
    source = make(seed=seed)
    if not isinstance(source, DataSource):
        raise ValueError(f"it gives a {type(source).__name__}; write a subclass of agentrl.data.DataSource")
    return source


def _check_prompt(found: object, ordinal: int) -> None:
    if not isinstance(found, Prompt | Skipped) or (isinstance(found, Prompt) and not _is_task(found.task)):
        given = found.task if isinstance(found, Prompt) else found
        raise ValueError(
            f"prompt {ordinal} is {repr(given)[:80]}; `task` returns an agentrl.Task, or Skipped"
        )
    if found.index != ordinal:
        raise ValueError(f"prompt {ordinal} has the number {found.index}")


def _is_task(task: object) -> bool:
    return (
        isinstance(task, Task)
        and bool(task.prompt)
        and all(isinstance(message, Message) for message in task.prompt)
    )
