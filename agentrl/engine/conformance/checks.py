"""The checks, one function for each guarantee of an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from agentrl.engine.conformance import kept, updates
from agentrl.engine.conformance.subject import (
    PATIENCE_S,
    ConformanceError,
    Subject,
    expect,
    expect_logprobs,
    in_flight,
)
from agentrl.errors import EngineError, RequestTooLargeError
from agentrl.types import Completion, Finish
from agentrl.types.seams import Sampling, StreamingPolicy


class ConformanceCheck(NamedTuple):
    """One guarantee. needs: the capability that the check requires."""

    name: str
    run: Callable[[Subject], Awaitable[None]]
    needs: str | None


_ATTEMPTS = 5


def _same(a: Completion, b: Completion) -> bool:
    return np.array_equal(a.token_ids, b.token_ids)


async def _greedy(subject: Subject) -> None:
    prompt = subject.prompt(1)
    completion = await subject.sample(1, Sampling(12, temperature=0.0))
    ids = [*prompt, *completion.token_ids.tolist()]
    rows = subject.logits(ids, 0)[len(prompt) - 1 : -1]
    gap = rows.max(-1) - rows[np.arange(len(rows)), completion.token_ids]
    expect((gap <= subject.tolerance).all(), "greedy sampling did not take the likeliest token")
    expect(completion.temperature == 0.0, "a greedy completion does not report temperature 0")
    expect_logprobs(subject, prompt, completion, 0.0)


async def _temperatures(subject: Subject) -> None:
    temperatures = (0.7, 1.0, 1.3)
    numbers = range(len(temperatures))
    rules = [Sampling(12, temperature=t, top_p=0.9, top_k=20, seed=3) for t in temperatures]
    for completion, n in zip(
        await asyncio.gather(*(subject.sample(n, rules[n]) for n in numbers)), numbers, strict=True
    ):
        expect_logprobs(subject, subject.prompt(n), completion, temperatures[n])
        expect(completion.temperature == temperatures[n], "a completion does not report its temperature")


async def _top_k_and_top_p(subject: Subject) -> None:
    prompt = subject.prompt(5)
    for n, rule in enumerate((Sampling(1, top_k=2), Sampling(1, top_p=0.3))):
        row = subject.logits(prompt, 0)[-1].astype(np.float64)
        order = np.argsort(-row)
        probs = np.exp(row[order] - row.max()) / np.exp(row - row.max()).sum()
        size = rule.top_k or int((probs.cumsum() - probs < rule.top_p).sum())
        drawn = {
            int(
                (await subject.engine.generate(prompt, _seeded(rule, seed), session=f"{n}.{seed}")).token_ids[
                    0
                ]
            )
            for seed in range(40)
        }
        expect(
            drawn <= set(order[:size].tolist()),
            f"{rule.top_k=} {rule.top_p=} let through tokens outside the {size} likeliest",
        )


async def _top_k_with_top_p(subject: Subject) -> None:
    """top_p counts in the whole distribution: a third token stays that it would lose among the three."""
    prompts = [subject.prompt(n) for n in range(12)]
    shares = []
    for prompt in prompts:
        row = subject.logits(prompt, 0)[-1].astype(np.float64)
        probs = np.sort(np.exp(row - row.max()) / np.exp(row - row.max()).sum())[::-1]
        shares.append(probs[2] / probs[:3].sum())
    prompt = prompts[int(np.argmax(shares))]
    row = subject.logits(prompt, 0)[-1].astype(np.float64)
    order = np.argsort(-row)
    probs = np.exp(row[order] - row.max()) / np.exp(row - row.max()).sum()
    mass, rest = probs[:2].sum(), probs[2:].sum()
    rule = Sampling(1, top_k=3, top_p=float(mass + 0.01 * rest))
    requests = (
        subject.engine.generate(prompt, _seeded(rule, seed), session=f"joint.{seed}") for seed in range(80)
    )
    drawn = {int(completion.token_ids[0]) for completion in await asyncio.gather(*requests)}
    expect(
        drawn == set(order[:3].tolist()),
        "top_p below 1 has to count in the whole distribution, also where top_k cuts it: the third token is "
        "one of the three likeliest, and those before it have less than the mass top_p",
    )


def _seeded(rule: Sampling, seed: int) -> Sampling:
    return Sampling(rule.max_new_tokens, rule.temperature, rule.top_p, rule.top_k, seed=seed)


async def _limits(subject: Subject) -> None:
    completions = await asyncio.gather(*(subject.sample(n, Sampling(1 + n, seed=n)) for n in range(6)))
    for n, completion in enumerate(completions):
        expect(
            len(completion.token_ids) == 1 + n,
            f"{1 + n} tokens were requested, {completion.token_ids} returned",
        )
        expect(
            completion.finish is Finish.LENGTH, f"a completion at its limit finished as {completion.finish}"
        )
        expect((completion.versions == 0).all(), "version 0 serves, the tokens have another version")


async def _stop_tokens(subject: Subject) -> None:
    free = await subject.sample(2, Sampling(16, temperature=0.0))
    stop = int(free.token_ids[5])
    first = free.token_ids.tolist().index(stop)
    unused = next(i for i in range(subject.vocab_size) if i not in free.token_ids)
    rule = Sampling(16, temperature=0.0, stop_token_ids=(unused, stop))
    completion = await subject.engine.generate(subject.prompt(2), rule, session="other")
    expect(
        completion.token_ids.tolist() == free.token_ids[: first + 1].tolist(),
        "a stop token must end the completion",
    )
    expect(
        (completion.finish, completion.matched) == (Finish.STOP, stop),
        f"it finished as {completion.finish}, {completion.matched!r}",
    )
    rule = Sampling(first + 1, temperature=0.0, stop_token_ids=(unused, stop))
    completion = await subject.engine.generate(subject.prompt(2), rule, session="at the limit")
    expect(
        (completion.finish, completion.matched) == (Finish.STOP, stop),
        f"at the limit it finished as {completion.finish}",
    )


async def _stop_strings(subject: Subject) -> None:
    free = (await subject.sample(2, Sampling(16, temperature=0.0))).token_ids.tolist()
    stop = subject.decode(free[4:7])
    size = next(n for n in range(1, 17) if stop in subject.decode(free[:n]))
    rule = Sampling(size, temperature=0.0, stop=("\0never\0", stop))
    completion = await subject.engine.generate(subject.prompt(2), rule, session="other")
    expect(
        completion.token_ids.tolist() == free[:size],
        "a completion must have all tokens of the stop string, and no more",
    )
    expect(
        (completion.finish, completion.matched) == (Finish.STOP, stop),
        f"it finished as {completion.finish}, {completion.matched!r}",
    )


async def _seeds(subject: Subject) -> None:
    rule = Sampling(20, seed=11)
    unbatched = await subject.sample(3, rule)
    others = [subject.sample(n, Sampling(25, seed=n)) for n in range(10, 10 + subject.max_slots)]
    batched, *_ = await asyncio.gather(
        subject.engine.generate(subject.prompt(3), rule, session="again"), *others
    )
    expect(_same(unbatched, batched), "the same seed gave another completion in a batch with other requests")
    other = await subject.engine.generate(subject.prompt(3), Sampling(20, seed=12), session="other")
    expect(not _same(unbatched, other), "another seed gave the same completion")
    free = [await subject.engine.generate(subject.prompt(3), Sampling(20), session=f"f{n}") for n in "ab"]
    expect(not _same(*free), "two requests without a seed gave the same completion")


async def _sessions(subject: Subject) -> None:
    prompt = subject.prompt(4)
    rule = Sampling(6, temperature=0.0)
    first = await subject.engine.generate(prompt, rule, session="a")
    longer = [*prompt, *first.token_ids.tolist(), *subject.prompt(40, 3)]
    second = await subject.engine.generate(longer, rule, session="a")
    expect_logprobs(subject, longer, second, 0.0)
    num_computed = len(prompt) + len(first.token_ids) - 1
    expect(
        num_computed <= second.cached_tokens <= num_computed + 1,
        f"the second turn has {num_computed} computed tokens, cached_tokens is {second.cached_tokens}",
    )
    rewritten = [*longer[:3], (longer[3] + 1) % subject.vocab_size, *longer[4:]]
    third = await subject.engine.generate(rewritten, rule, session="a")
    expect(third.cached_tokens <= 3, "tokens after a rewritten one were taken from the cache")
    expect_logprobs(subject, rewritten, third, 0.0)


async def _closed_sessions(subject: Subject) -> None:
    prompt, rule = subject.prompt(4, 12), Sampling(6, temperature=0.0)
    first = await subject.engine.generate(prompt, rule, session="a")
    again = await subject.engine.generate(prompt, rule, session="a")
    expect(again.cached_tokens > 0, "a session's own cache was not used")
    other = await subject.engine.generate(prompt, rule, session="b")
    expect(other.cached_tokens == 0, "another session's cache was used")
    await subject.engine.close_session("a")
    await subject.engine.close_session("never opened")
    fresh = await subject.engine.generate(prompt, rule, session="a")
    expect(fresh.cached_tokens == 0, "a closed session's cache was used")
    same = _same(first, again) and _same(first, fresh)
    expect(same, "with and without the session's cache the completions differ")


async def _more_than_slots(subject: Subject) -> None:
    count = 3 * subject.max_slots + 1
    rules = [Sampling(3 + n % 5, temperature=0.0) for n in range(count)]
    completions = await asyncio.gather(*(subject.sample(n, rule) for n, rule in enumerate(rules)))
    for n in range(0, count, 4):
        unbatched = await subject.engine.generate(subject.prompt(n), rules[n], session="unbatched")
        await subject.engine.close_session("unbatched")
        expect(
            _same(unbatched, completions[n]), "a request gave another completion in a batch than by itself"
        )


async def _busy_session(subject: Subject) -> None:
    # On a busy machine the first request may have ended before the second one arrives, which shows nothing.
    for _ in range(_ATTEMPTS):
        tasks = await in_flight(subject)
        is_refused = False
        try:
            await subject.sample(0, Sampling(1))
        except EngineError:
            is_refused = True
        has_ended = tasks[0].done()
        await subject.engine.abort()
        await asyncio.gather(*tasks)
        if is_refused:
            return
        if not has_ended:
            break
    raise ConformanceError("a session that runs a request must refuse a second one")


async def _abort(subject: Subject) -> None:
    tasks = await in_flight(subject)
    await subject.engine.abort()
    completions = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
    expect({c.finish for c in completions} == {Finish.ABORT}, "after abort every request finishes as `abort`")
    expect(any(len(c.token_ids) for c in completions), "an aborted request keeps the tokens it had")
    for n, completion in enumerate(completions):
        expect_logprobs(subject, subject.prompt(n), completion, 1.0)
    after = await subject.engine.generate(subject.prompt(0), Sampling(2), session="after")
    expect(after.finish is Finish.LENGTH, "an engine must serve after an abort")


async def _stopped_and_continued(subject: Subject) -> None:
    rule = Sampling(subject.max_context_len - 7, seed=1, temperature=0.0)
    unbroken = await asyncio.gather(*(subject.sample(n, rule) for n in range(subject.max_slots - 1)))
    tasks = [asyncio.create_task(subject.sample(n, rule)) for n in range(subject.max_slots - 1)]
    short = subject.engine.generate(subject.prompt(0), Sampling(4), session="first")
    await asyncio.wait_for(short, PATIENCE_S)
    await subject.engine.abort()
    stopped = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
    for n, begun in enumerate(stopped):
        if begun.finish is not Finish.ABORT or not len(begun.token_ids):
            continue
        whole = await subject.sample(n, replace(rule, continues=begun))
        size = len(begun.token_ids)
        kept = (whole.token_ids[:size] == begun.token_ids).all()
        expect(bool(kept), "a completion that goes on begins with the tokens that it had")
        expect(_same(whole, unbroken[n]), "a request that was stopped and went on gave other tokens")
        expect_logprobs(subject, subject.prompt(n), whole, 0.0)


async def _shown(subject: Subject) -> None:
    engine, rule = subject.engine, Sampling(subject.max_context_len - 7, seed=1)
    if not isinstance(engine, StreamingPolicy):
        raise ConformanceError("an engine has the method `watched`: see `StreamingPolicy`")
    told: list[list[int]] = [[] for _ in range(subject.max_slots - 1)]

    async def watched(number: int, policy: StreamingPolicy) -> Completion:
        told[number].clear()
        with policy.watched(f"s{number}", told[number].extend):
            return await subject.sample(number, rule)

    for is_aborted in (False, True):
        tasks = [asyncio.create_task(watched(number, engine)) for number in range(len(told))]
        if is_aborted:
            short = subject.engine.generate(subject.prompt(0), Sampling(4), session="unwatched")
            await asyncio.wait_for(short, PATIENCE_S)
            await subject.engine.abort()
        for ids, completion in zip(told, await asyncio.gather(*tasks), strict=True):
            are_first = completion.token_ids[: len(ids)].tolist() == ids
            expect(are_first, "what is shown is what the completion begins with, each token once")
            expect(is_aborted or len(ids) > 0, "tokens are shown before the completion has ended")


async def _cancel(subject: Subject) -> None:
    tasks = await in_flight(subject)
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    expect(
        all(isinstance(e, asyncio.CancelledError) for e in ended),
        "a cancelled generate() must raise CancelledError",
    )
    # Their sessions are free again at once, too.
    again = [subject.sample(n, Sampling(2)) for n in range(len(tasks))]
    completions = await asyncio.wait_for(asyncio.gather(*again), PATIENCE_S)
    expect({len(c.token_ids) for c in completions} == {2}, "cancelled requests must free their slots")


async def _too_large(subject: Subject) -> None:
    rule = Sampling(subject.max_context_len - 6)
    try:
        await subject.sample(1, rule)
    except RequestTooLargeError as error:
        numbers = ("7 tokens", str(rule.max_new_tokens), str(subject.max_context_len))
        expect(all(n in str(error) for n in numbers), f"the refusal must name {numbers}: {error}")
    else:
        raise ConformanceError("a request that can never fit must be refused")
    fits = await subject.sample(1, Sampling(subject.max_context_len - 7, seed=1))
    expect(len(fits.token_ids) == subject.max_context_len - 7, "a request that just fits must run")


async def _unknown_tokens(subject: Subject) -> None:
    for token in (-1, subject.vocab_size):
        try:
            await subject.engine.generate([1, token, 2], Sampling(2), session="unknown")
        except EngineError:
            continue
        raise ConformanceError(f"a prompt with token {token}, which the model does not have, must be refused")
    completion = await subject.sample(1, Sampling(2))
    expect(len(completion.token_ids) == 2, "an engine must serve after it refused a prompt")


async def _close(subject: Subject) -> None:
    tasks = await in_flight(subject)
    await subject.engine.close()
    completions = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
    expect({c.finish for c in completions} == {Finish.ABORT}, "closing ends every request as `abort`")
    try:
        await subject.sample(2, Sampling(1))
    except EngineError:
        return
    raise ConformanceError("a closed engine must refuse requests")


CHECKS: tuple[ConformanceCheck, ...] = (
    ConformanceCheck("greedy takes the likeliest token", _greedy, None),
    ConformanceCheck("logprobs are after temperature, before top-p and top-k", _temperatures, None),
    ConformanceCheck("top-k and top-p cut the tail", _top_k_and_top_p, None),
    ConformanceCheck("top-p counts in the whole distribution", _top_k_with_top_p, None),
    ConformanceCheck(
        "kept ids are those of top-k and top-p, and logprobs are of them", kept.kept_ids, "kept_ids"
    ),
    ConformanceCheck("kept ids are those of top-p alone", kept.kept_ids_of_top_p, "kept_ids_of_top_p"),
    ConformanceCheck("a completion that goes on has all kept ids", kept.continued_with_kept_ids, "kept_ids"),
    ConformanceCheck("limits are met exactly", _limits, None),
    ConformanceCheck("stop tokens end a completion and are part of it", _stop_tokens, None),
    ConformanceCheck("stop strings end a completion and are part of it", _stop_strings, "stop_strings"),
    ConformanceCheck("seeds reproduce, also in a batch", _seeds, "seeds"),
    ConformanceCheck("a session computes only what is new", _sessions, "prefix_cache"),
    ConformanceCheck("a session's cache is private and ends with it", _closed_sessions, "private_caches"),
    ConformanceCheck("more requests than slots", _more_than_slots, None),
    ConformanceCheck("a session runs one request at a time", _busy_session, None),
    ConformanceCheck("abort ends every request with its tokens so far", _abort, None),
    ConformanceCheck("a request that was stopped goes on with its tokens", _stopped_and_continued, None),
    ConformanceCheck("tokens are shown as they are sampled", _shown, None),
    ConformanceCheck("cancelling frees the slot", _cancel, None),
    ConformanceCheck("a request that exceeds the context is refused in a sentence", _too_large, None),
    ConformanceCheck("tokens outside of the vocabulary are refused", _unknown_tokens, None),
    ConformanceCheck("an update takes effect at a token boundary", updates.update, "weight_updates"),
    ConformanceCheck("an update drops all caches", updates.update_drops_caches, "weight_updates"),
    ConformanceCheck(
        "across updates every token has the version and the logprob of the weights that sampled it",
        updates.episodes_across_updates,
        "weight_updates",
    ),
    ConformanceCheck("a broken update changes nothing", updates.broken_updates, "weight_updates"),
    ConformanceCheck(
        "a release of memory costs no request a token", updates.released_memory, "releases_memory"
    ),
    ConformanceCheck("close aborts, then refuses", _close, None),
)
