"""Both engines pass every check; and each check fails on an engine that is broken in its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from agentrl.engine.conformance import (
    CHECKS,
    ConformanceCheck,
    ConformanceError,
    EngineCaps,
    Subject,
    lack,
    run_conformance,
)
from agentrl.engine.fake import FakeEngine, _Running
from agentrl.types import Completion, Finish, FloatArray
from agentrl.types.seams import Sampling
from tests.engine.subjects import VOCAB, embedded_subject, fake_subject, family_subject, text_of

SUBJECTS = {
    "fake": fake_subject,
    "qwen3": partial(embedded_subject, "qwen3"),
    "llama": partial(embedded_subject, "llama"),
    "deterministic": partial(embedded_subject, "llama", deterministic=True),
    "gemma2": partial(family_subject, "gemma2"),
}
# Without windows, with experts, with recurrences.
OTHERS = {
    "gpt2": partial(family_subject, "gpt2"),
    "qwen3_moe": partial(family_subject, "qwen3_moe", deterministic=True),
    "falcon_h1": partial(family_subject, "falcon_h1"),
}


@pytest.mark.parametrize("make", SUBJECTS.values(), ids=SUBJECTS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
async def test_an_engine_passes(check: ConformanceCheck, make: Callable[[], Subject]) -> None:
    subject = make()
    assert lack(check, subject.caps) is None, "our own engines declare no missing capability"
    await check.run(subject)
    await subject.engine.close()


@pytest.mark.full
@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
async def test_other_families_pass(check: ConformanceCheck, make: Callable[[], Subject]) -> None:
    await test_an_engine_passes(check, make)


async def test_a_missing_capability_is_reported_where_it_is_declared() -> None:
    report = await run_conformance(lambda: fake_subject(EngineCaps(stop_strings=False)))
    assert len(report.passed) == len(CHECKS) - 1
    (skipped,) = report.skipped
    assert skipped.startswith("stop strings")
    assert skipped.endswith("lacks stop_strings")


class Broken(FakeEngine):
    """A fake that changes each completion."""

    def __init__(self, change: Callable[[Completion], Completion]) -> None:
        super().__init__(vocab_size=VOCAB, max_slots=4, max_context_len=64, decode=text_of)
        self._change = change

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        return self._change(await super().generate(prompt_ids, sampling, session=session))


CHANGES: dict[str, Callable[[Completion], Completion]] = {
    "logprobs shifted by one": lambda c: replace(c, logprobs=np.roll(c.logprobs, 1)),
    "logprobs of temperature one": lambda c: replace(c, logprobs=c.logprobs * np.float32(1.01)),
    "the stop token dropped": lambda c: (
        replace(c, token_ids=c.token_ids[:-1], logprobs=c.logprobs[:-1], versions=c.versions[:-1])
        if c.finish is Finish.STOP
        else c
    ),
    "an abort passed off as an end": lambda c: replace(c, finish=Finish.LENGTH),
    "versions always zero": lambda c: replace(c, versions=np.zeros_like(c.versions)),
    "versions always new": lambda c: replace(c, versions=np.ones_like(c.versions)),
    "the cache not reported": lambda c: replace(c, cached_tokens=0),
    "the matched string is missing": lambda c: replace(c, matched=None),
    "a shorter budget after an update": lambda c: (
        replace(c, token_ids=c.token_ids[:-1], logprobs=c.logprobs[:-1], versions=c.versions[:-1])
        if len(set(c.versions.tolist())) > 1
        else c
    ),
    "a longer budget after an update": lambda c: (
        replace(
            c,
            token_ids=np.append(c.token_ids, c.token_ids[-1:]),
            logprobs=np.append(c.logprobs, c.logprobs[-1:]),
            versions=np.append(c.versions, c.versions[-1:]),
        )
        if len(set(c.versions.tolist())) > 1
        else c
    ),
}


class Stale(FakeEngine):
    """A fake whose sessions go on with the weights that they began with, under the version that serves."""

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCAB, max_slots=4, max_context_len=64, decode=text_of)
        self._tables: dict[str, FloatArray] = {}

    def _next(self, request: _Running) -> tuple[int, float]:
        current = self._table
        self._table = self._tables.setdefault(request.session, current)
        try:
            return super()._next(request)
        finally:
            self._table = current


async def test_the_suite_catches_a_stale_cache() -> None:
    for name in ("an update drops all caches", "across updates every token has the version"):
        (check,) = [check for check in CHECKS if check.name.startswith(name)]
        with pytest.raises(ConformanceError, match=r"has logprob|cache of older weights"):
            await check.run(fake_subject(engine=Stale()))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_the_suite_catches(change: Callable[[Completion], Completion]) -> None:
    with pytest.raises(ConformanceError):
        await run_conformance(lambda: fake_subject(engine=Broken(change)))
