"""Synthetic episodes: random ones for properties, and a realistic one."""

import asyncio
import dataclasses

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from agentrl.records import Journal
from agentrl.types import (
    Completion,
    Ending,
    Episode,
    Extra,
    Failure,
    Finish,
    Image,
    Limits,
    Message,
    Restart,
    RewardParts,
    Task,
    Text,
    ToolCall,
    ToolStats,
    Trajectory,
    Turn,
    TurnTokens,
    Usage,
)
from agentrl.types.messages import IMAGE_TYPES
from agentrl.types.statistics import SPECULATION

TEXT = st.text(st.characters(), max_size=12)
IDS = st.integers(1, 2**31 - 1)
SECONDS = st.none() | st.floats(0, 1e6, exclude_min=True)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
METADATA = st.dictionaries(TEXT, PLAIN | st.lists(PLAIN, max_size=2), max_size=3)


PARTS_OF_MESSAGES = st.builds(Text, TEXT) | st.builds(
    Image.of, st.binary(max_size=9), st.sampled_from(IMAGE_TYPES)
)
CONTENT = TEXT | st.lists(PARTS_OF_MESSAGES, max_size=3).map(tuple)


@st.composite
def tool_calls(draw):
    if draw(st.booleans()):
        return ToolCall(draw(TEXT), draw(METADATA), draw(TEXT), draw(TEXT))
    return ToolCall(draw(TEXT), None, draw(TEXT), draw(TEXT), draw(TEXT))


@st.composite
def messages(draw):
    role = draw(st.sampled_from(["system", "user", "assistant", "tool"]))
    calls = tuple(draw(st.lists(tool_calls(), max_size=2))) if role == "assistant" else ()
    maybe = st.none() | TEXT
    return Message(role, draw(CONTENT), draw(maybe), calls, draw(maybe), draw(maybe))


@st.composite
def extras(draw, length):
    """Dense ones of several shapes and dtypes, and ragged ones."""
    counts = draw(st.lists(st.integers(0, 3), min_size=length, max_size=length))
    offsets = np.cumsum([0, *counts])
    every = {
        "experts": Extra.dense(draw(npst.arrays(np.int16, (length, 2))), fill=-1),
        "weight": Extra.dense(draw(npst.arrays(np.float64, length, elements=st.floats(-1, 1)))),
        "kept": Extra.ragged(draw(npst.arrays(np.int32, int(offsets[-1]))), offsets),
    }
    return {name: extra for name, extra in every.items() if draw(st.booleans())}


@st.composite
def turn_tokens(draw):
    length = draw(st.integers(0, 6))
    ints = npst.arrays(np.int32, length)
    floats = npst.arrays(np.float32, length, elements=st.floats(width=32))
    world = draw(npst.arrays(np.int32, st.integers(0, 6)))
    finish = draw(st.sampled_from(Finish))
    matched = draw(st.none() | TEXT | IDS)
    completion = Completion(
        draw(ints),
        draw(floats),
        draw(ints),
        finish,
        matched,
        draw(st.integers(0, 9)),
        draw(st.floats(0, 2)),
        draw(extras(length)),
        speculation=draw(st.dictionaries(st.sampled_from(SPECULATION), st.integers(0, 99))),
    )
    return TurnTokens(world, completion)


OBSERVATIONS = st.lists(messages(), max_size=2).map(tuple)
TURNS = st.builds(Turn, OBSERVATIONS, messages(), st.none() | turn_tokens())
AGENTS = ("solver", "critic")
COUNTS = st.dictionaries(TEXT, st.integers(0, 99), max_size=2)
STATS = st.builds(
    ToolStats, *[st.integers(0, 9)] * 5, COUNTS, COUNTS, COUNTS, st.floats(0, 9), st.floats(0, 9)
)
LIMITS = st.builds(Limits, st.integers(1, 99), st.none() | IDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS)
PARTS = st.builds(RewardParts, st.dictionaries(TEXT, st.floats(-9, 9), max_size=2))
TASKS = st.builds(Task, TEXT, OBSERVATIONS, st.none() | TEXT, METADATA, TEXT)


@st.composite
def trajectories(draw, frozen):
    """Any number of trajectories of both agents, each turn a step."""
    drawn = []
    step = 0
    for _ in range(draw(st.integers(0, 3))):
        turns = []
        for turn in draw(st.lists(TURNS, max_size=2)):
            turns.append(dataclasses.replace(turn, step=step))
            step += draw(st.integers(1, 2))
        agent = draw(st.sampled_from(AGENTS))
        is_restart = draw(st.booleans())
        reason = (draw(st.integers(0, 9)), draw(st.sampled_from(Restart))) if is_restart else (None, None)
        drawn.append(Trajectory(tuple(turns), *reason, agent, agent not in frozen))
    return tuple(drawn)


REWARD = st.none() | st.floats(allow_nan=False) | PARTS
STEP_REWARDS = REWARD | st.dictionaries(st.sampled_from(AGENTS), REWARD)


@st.composite
def episodes(draw):
    frozen = tuple(draw(st.sets(st.sampled_from(AGENTS))))
    ending = draw(st.sampled_from(Ending))
    failure = Failure(draw(TEXT), draw(TEXT), draw(TEXT)) if ending is Ending.FAILED else None
    return Episode(
        id=draw(TEXT),
        env_id=draw(TEXT),
        task=draw(TASKS),
        seed=draw(st.integers()),
        limits=draw(LIMITS),
        trajectories=draw(trajectories(frozen)),
        step_rewards=tuple(draw(st.lists(STEP_REWARDS, max_size=3))),
        ending=ending,
        failure=failure,
        counts=draw(COUNTS),
        tools=draw(st.dictionaries(TEXT, STATS, max_size=2)),
        usage=draw(st.none() | st.builds(Usage, *[st.integers(0, 9)] * 4, st.none() | st.floats(0, 9))),
        agents=AGENTS,
        frozen_agents=frozen,
        seconds=draw(st.floats(0, 1e9)),
    )


def journalled(folder, entries):
    """The file of an evaluation that holds these entries."""

    async def written():
        async with Journal(folder) as journal:
            return await journal.write_eval("x", 0, entries)

    return asyncio.run(written())


def simple_episode(id="g0-0", *, ending=Ending.COMPLETED):
    logprobs = np.array([-0.1, -2.5], np.float32)
    completion = Completion(np.array([5, 6], np.int32), logprobs, np.array([3, 3], np.int32), Finish.STOP, 6)
    turn = Turn(
        (Message("user", "Where was Torba born?"),),
        Message("assistant", "Torek"),
        TurnTokens(np.array([1, 2, 3], np.int32), completion),
    )
    failure = Failure("tool", "timeout", "took longer than 3 s") if ending is Ending.FAILED else None
    task = Task.ask("rl/1", "Where was Torba born?", "Torek", hops=1)
    return Episode(id, "Echo-v0", task, 7, Limits(), (Trajectory((turn,)),), (1.0,), ending, failure)
