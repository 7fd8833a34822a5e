"""The model of an engine against a decoder that goes step by step, and its caches, versions and places."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_simulate.config import SimulateSection
from agentrl_simulate.engine import SimulatedEngine, SimulatedEngines
from agentrl_simulate.virtual_time import now_s, run_in_virtual_time

FAST_PREFILL = 1e15


def section(**own):
    fields = {"decode_step_s": 1.0, "decode_request_s": 0.0, "prefill_tok_per_s": FAST_PREFILL}
    return SimulateSection(**{**fields, **own})


def step_by_step(sizes, *, slots, step_s, each_s):
    """When each request ends, where all begin at 0: a loop over single steps."""
    waiting, running, now, ends = list(range(len(sizes))), {}, 0.0, {}
    while waiting or running:
        while waiting and len(running) < slots:
            index = waiting.pop(0)
            running[index] = sizes[index]
        now += step_s + each_s * len(running)
        running = {index: left - 1 for index, left in running.items()}
        ends |= {index: now for index, left in running.items() if not left}
        running = {index: left for index, left in running.items() if left}
    return [ends[index] for index in range(len(sizes))]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.integers(1, 6),
    st.floats(0.001, 1.0),
    st.floats(0.0, 0.5),
)
def test_requests_end_when_single_steps_say_so(sizes, slots, step_s, each_s):
    async def program():
        engine = SimulatedEngine(section(engine_slots=slots, decode_step_s=step_s, decode_request_s=each_s))

        async def ended(index, size):
            await engine.generate(f"s{index}", 5, size)
            return now_s()

        return await asyncio.gather(*(ended(*each) for each in enumerate(sizes)))

    expected = step_by_step(sizes, slots=slots, step_s=step_s, each_s=each_s)
    assert run_in_virtual_time(program()) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_session_computes_only_what_is_new_until_new_weights_come():
    async def program():
        engine = SimulatedEngine(section(prefill_tok_per_s=10.0))
        computed = []
        for prompt in (100, 150, 200):
            if prompt == 200:
                engine.install(1, 0.0)
            before = engine.num_prefilled
            await engine.generate("one", prompt, 10)
            computed.append(engine.num_prefilled - before)
        return computed, now_s()

    computed, seconds = run_in_virtual_time(program())
    # After 100 + 10 tokens 40 are new; after the update all 200 are.
    assert computed == [100, 40, 200]
    assert seconds == pytest.approx(340 / 10 + 3 * 10)


def test_only_so_many_sessions_keep_their_prefix():
    async def program(kept):
        engine = SimulatedEngine(section(cached_sessions=kept))
        for name in ("a", "b", "c"):
            await engine.generate(name, 100, 1)
        before = engine.num_prefilled
        await engine.generate("a", 101, 1)
        return engine.num_prefilled - before

    assert run_in_virtual_time(program(3)) == 0
    assert run_in_virtual_time(program(2)) == 101


def test_tokens_have_the_version_that_served_them_and_an_update_costs_its_standstill():
    async def program():
        engine = SimulatedEngine(section())
        request = asyncio.create_task(engine.generate("one", 1, 10))
        await asyncio.sleep(4)
        engine.install(7, 2.5)
        return dict(await request), now_s()

    versions, seconds = run_in_virtual_time(program())
    assert versions == {0: 4, 7: 6}
    assert seconds == pytest.approx(12.5)


def test_a_standstill_passes_also_while_nothing_runs():
    async def program():
        engine = SimulatedEngine(section())
        engine.install(1, 3.0)
        await asyncio.sleep(5)
        await engine.generate("one", 1, 2)
        return now_s()

    assert run_in_virtual_time(program()) == pytest.approx(7)


def test_a_cancelled_request_gives_its_place_to_the_next():
    async def program():
        engine = SimulatedEngine(section(engine_slots=1))
        first = asyncio.create_task(engine.generate("one", 1, 1000))
        await asyncio.sleep(3)
        second = asyncio.create_task(engine.generate("two", 1, 5))
        await asyncio.sleep(1)
        assert engine.num_requests == 2
        first.cancel()
        await second
        return now_s(), engine.num_requests

    assert run_in_virtual_time(program()) == (pytest.approx(9), 0)


def test_a_paused_engine_holds_its_requests():
    async def program():
        engine = SimulatedEngine(section())
        request = asyncio.create_task(engine.generate("one", 1, 10))
        await asyncio.sleep(4)
        engine.pause()
        await asyncio.sleep(100)
        assert not engine.is_busy
        engine.resume()
        await request
        return now_s(), engine.busy_s

    assert run_in_virtual_time(program()) == (pytest.approx(110), pytest.approx(10))


def test_a_slowed_engine_takes_so_much_longer():
    async def program():
        engine = SimulatedEngine(section())
        request = asyncio.create_task(engine.generate("one", 1, 10))
        await asyncio.sleep(4)
        engine.slow_down(2.0)
        await request
        return now_s()

    assert run_in_virtual_time(program()) == pytest.approx(16)


def test_sessions_are_shared_out_evenly_and_stay():
    async def program():
        engines = SimulatedEngines([SimulatedEngine(section()) for _ in range(3)])
        requests = [asyncio.create_task(engines.generate(f"s{n}", 1, 10)) for n in range(9)]
        await asyncio.sleep(0.5)
        loads = [engine.num_requests for engine in engines.engines]
        await asyncio.gather(*requests)
        before = [engine.num_sampled for engine in engines.engines]
        await engines.generate("s4", 11, 5)
        changed = [engine.num_sampled - n for engine, n in zip(engines.engines, before, strict=True)]
        for n in range(9):
            engines.close_session(f"s{n}")
        return loads, sorted(changed), engines.total(lambda engine: engine.num_prefilled)

    loads, changed, prefilled = run_in_virtual_time(program())
    assert loads == [3, 3, 3]
    assert changed == [0, 0, 5]
    assert prefilled == 9  # the second request of s4 found all of its prefix
