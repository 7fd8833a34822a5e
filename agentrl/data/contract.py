"""The contract of a source of prompts, checked on its first prompts."""

from __future__ import annotations

import json
from collections.abc import Callable

from agentrl.data.source import AdaptiveSource, DataSource, Prompt, Skipped
from agentrl.types import Message, Task

_FIRST = 8
_FAR = 10_007


def check_data_source(make: Callable[..., object], *, seed: int = 0) -> DataSource:
    """Check that a source of prompts fulfils its contract; for the tests of custom sources.

    make: the class, or a function that is called with `seed=`. It is called twice. Both sources must return

    - a `fingerprint`: the same text;
    - for any ordinal a `Prompt` with that number, or `Skipped`; the first eight ordinals and 10,007 are
      requested;
    - the same prompts, in any order of the requests; of an `AdaptiveSource`, in their order, and the same
      ones where it goes on with what `save` returned.

    Returns:
        The first of the two sources.

    Raises:
        ValueError: the source violates the contract; the message names the rule. Errors of the source itself
            propagate.
    """
    source, other = _make_source(make, seed), _make_source(make, seed)
    if not isinstance(source.fingerprint, str) or not source.fingerprint:
        raise ValueError(f"`fingerprint` is {source.fingerprint!r}; it is a text that identifies the content")
    if other.fingerprint != source.fingerprint:
        raise ValueError(
            "two sources that were made alike have two fingerprints; make it of the content alone"
        )
    if isinstance(source, AdaptiveSource) and isinstance(other, AdaptiveSource):
        _check_adaptive(source, other)
        return source
    ordinals = (*range(_FIRST), _FAR)
    first = {ordinal: source.prompt(ordinal) for ordinal in ordinals}
    for ordinal, prompt in first.items():
        _check_prompt(prompt, ordinal)
    for ordinal in reversed(ordinals):
        for instance in (source, other):
            if instance.prompt(ordinal) != first[ordinal]:
                raise ValueError(
                    f"prompt {ordinal} differed when it was requested again; draw with "
                    'random.Random(f"{self.seed}/{ordinal}"), and keep no count of the calls'
                )
    return source


def _check_adaptive(source: AdaptiveSource, other: AdaptiveSource) -> None:
    """Check the draws of two sources, one of which goes on where the other was saved."""
    first = [source.preview().task(ordinal) for ordinal in range(_FIRST)]
    drawing = other.preview()
    for ordinal in range(_FIRST // 2):
        _check_prompt(drawing.prompt(ordinal), ordinal)
    pending = (1, 3)
    state = json.loads(json.dumps(drawing.state(pending)))
    other.restore(state)
    for ordinal in (*pending, *range(_FIRST // 2, _FIRST)):
        if other.task(ordinal) != first[ordinal]:
            raise ValueError(
                f"prompt {ordinal} differed after `load` of what `save` returned; save all that `draw` "
                'depends on, and draw with random.Random(f"{self.seed}/{ordinal}")'
            )


def _make_source(make: Callable[..., object], seed: int) -> DataSource:
    source = make(seed=seed)
    if not isinstance(source, DataSource):
        raise ValueError(f"it gives a {type(source).__name__}; write a subclass of agentrl.data.DataSource")
    return source


def _check_prompt(prompt: object, ordinal: int) -> None:
    if not isinstance(prompt, Prompt | Skipped) or (isinstance(prompt, Prompt) and not _is_task(prompt.task)):
        value = prompt.task if isinstance(prompt, Prompt) else prompt
        raise ValueError(
            f"prompt {ordinal} is {repr(value)[:80]}; `task` returns an agentrl.Task, or Skipped"
        )
    if prompt.index != ordinal:
        raise ValueError(f"prompt {ordinal} has the number {prompt.index}")


def _is_task(task: object) -> bool:
    return (
        isinstance(task, Task)
        and bool(task.prompt)
        and all(isinstance(message, Message) for message in task.prompt)
    )
