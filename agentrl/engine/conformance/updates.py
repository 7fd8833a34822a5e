"""What every engine keeps where its weights change while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import cast

import numpy as np

from agentrl.engine.conformance.subject import (
    PATIENCE_S,
    ConformanceError,
    Subject,
    expect,
    expect_logprobs,
    in_flight,
)
from agentrl.errors import EngineError
from agentrl.types import Completion, Finish
from agentrl.types.seams import Engine, Sampling, WeightTransaction

_HELD_S = 0.05


async def _send(subject: Subject, version: int, *, damage: int = 0, leave_out: int = 0) -> None:
    async with _staged(subject, version, leave_out) as (transaction, checksum):
        await transaction.commit(checksum + damage)


@asynccontextmanager
async def _staged(
    subject: Subject, version: int, leave_out: int = 0
) -> AsyncIterator[tuple[WeightTransaction, int]]:
    delivery = subject.delivery(version % 2)
    if subject.sink is None:
        raise ConformanceError("an engine with weight updates has a sink; set it in the Subject")
    async with subject.sink.begin(delivery.manifest, version) as transaction:
        for bucket in delivery.buckets[leave_out:]:
            await transaction.put(bucket)
        yield transaction, delivery.checksum


async def update(subject: Subject) -> None:
    """A commit reaches requests that run: earlier tokens are of the old version, later ones of the new."""
    async with _staged(subject, 1) as (transaction, checksum):
        tasks = await in_flight(subject)
        await transaction.commit(checksum)
    expect(subject.engine.version == 1, "after commit the engine must serve the new version")
    completions = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
    expect(
        any(0 < (c.versions == 0).sum() < len(c.versions) for c in completions),
        "no request ran across the update: either it waited for all of them, or versions are wrong",
    )
    for n, completion in enumerate(completions):
        expect((np.diff(completion.versions) >= 0).all(), "versions may only rise within a completion")
        expect_budget(completion, subject.max_context_len - 7)
        expect_logprobs(subject, subject.prompt(n), completion, 1.0)


def expect_budget(completion: Completion, num_tokens: int) -> None:
    """Expect exactly the tokens that were asked for, however often the request was interrupted."""
    expect(
        completion.finish is Finish.LENGTH and len(completion.token_ids) == num_tokens,
        f"a request for {num_tokens} tokens got {len(completion.token_ids)} and finished as "
        f"{completion.finish}: after an update a request goes on with what is left of its budget",
    )


async def episodes_across_updates(subject: Subject) -> None:
    """Sessions of four turns; the weights change in the middle of two turns, and before a third one.

    There are more sessions than slots, and turns of several lengths, so that an update finds some of them in
    the middle of a turn.
    """
    longest = (subject.max_context_len - 7 - 3 * 3) // 4
    prefixes = [subject.prompt(n) for n in range(5 * subject.max_slots)]
    sizes = [longest - longest // 5 * (n % 4) for n in range(len(prefixes))]
    spanning = 0

    async def turn(n: int, number: int) -> Completion:
        rule = Sampling(sizes[n], seed=100 * number + n)
        return await subject.engine.generate(prefixes[n], rule, session=f"s{n}")

    for number, moment in enumerate((None, "during", "before", "during")):
        version = subject.engine.version + 1
        if moment == "before":
            await _send(subject, version)
        async with AsyncExitStack() as stack:
            during = moment == "during"
            staged = await stack.enter_async_context(_staged(subject, version)) if during else None
            turns = [asyncio.create_task(turn(n, number)) for n in range(len(prefixes))]
            if staged is not None:
                await asyncio.wait(turns, return_when="FIRST_COMPLETED", timeout=PATIENCE_S)
                await staged[0].commit(staged[1])
            completions = await asyncio.wait_for(asyncio.gather(*turns), PATIENCE_S)
        for n, completion in enumerate(completions):
            expect_budget(completion, sizes[n])
            expect((np.diff(completion.versions) >= 0).all(), "versions may only rise within a completion")
            expect_logprobs(subject, prefixes[n], completion, 1.0)
            prefixes[n] += [*completion.token_ids.tolist(), *subject.prompt(50 + n, 3)]
            spanning += during and len(set(completion.versions.tolist())) > 1
        versions = {int(v) for completion in completions for v in completion.versions}
        allowed = {version - 1, version} if during else {subject.engine.version}
        expect(versions <= allowed, f"tokens have versions {versions} where {allowed} served")
    expect(spanning > 0, "no request ran across an update")


async def update_drops_caches(subject: Subject) -> None:
    """No key or value of older weights is used after an update."""
    prompt = subject.prompt(6)
    first = await subject.engine.generate(prompt, Sampling(4, seed=1), session="a")
    await _send(subject, 1)
    longer = [*prompt, *first.token_ids.tolist()]
    second = await subject.engine.generate(longer, Sampling(4, seed=1), session="a")
    expect(second.cached_tokens == 0, "the cache of older weights was used after an update")
    expect((second.versions == 1).all(), "tokens sampled after the update carry the new version")
    expect_logprobs(subject, longer, second, 1.0)


async def broken_updates(subject: Subject) -> None:
    """A damaged or incomplete update is refused, and the old version serves on, also what runs meanwhile."""
    for how in ({"damage": 1}, {"leave_out": 1}):
        running = await in_flight(subject)
        try:
            await _send(subject, 1, **how)
        except EngineError:
            pass
        else:
            raise ConformanceError(f"an update with {how} must be refused")
        after = await subject.engine.generate(subject.prompt(8), Sampling(4, seed=1), session=str(how))
        expect(
            subject.engine.version == 0,
            f"after an update with {how} the engine must keep serving the old version",
        )
        completions = await asyncio.wait_for(asyncio.gather(*running), PATIENCE_S)
        for completion in completions:
            expect_budget(completion, subject.max_context_len - 7)
        for n, completion in [*enumerate(completions), (8, after)]:
            expect(not completion.versions.any(), f"tokens have a version of an update with {how}")
            expect_logprobs(subject, subject.prompt(n), completion, 1.0)


async def released_memory(subject: Subject) -> None:
    """While memory is released, requests stop; then they go on with their tokens, under new weights."""
    engine, tasks = cast(Engine, subject.engine), await in_flight(subject)
    await engine.release_memory(("weights", "kv_cache"))
    # Those that ended before the release have been answered by now.
    await asyncio.sleep(_HELD_S)
    running = [task for task in tasks if not task.done()]
    await asyncio.sleep(_HELD_S)
    expect(not any(task.done() for task in running), "no request ends while memory is released")
    await engine.resume_memory(["weights"])
    try:
        await engine.resume_memory(["kv_cache"])
    except EngineError:
        pass
    else:
        raise ConformanceError("without weights the cache must not be resumed: tokens would be sampled")
    await _send(subject, 1)
    await engine.resume_memory(["kv_cache"])
    completions = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
    expect(
        any(0 < (c.versions == 0).sum() < len(c.versions) for c in completions),
        "no request was held in its middle and went on: its tokens from before are lost",
    )
    for n, completion in enumerate(completions):
        expect_budget(completion, subject.max_context_len - 7)
        expect_logprobs(subject, subject.prompt(n), completion, 1.0)
