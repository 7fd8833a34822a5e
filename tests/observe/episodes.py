"""Synthetic episodes: random ones for properties, and one that looks like a real one."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from agentrl.types import (
    Completion,
    Ending,
    Episode,
    Failure,
    Finish,
    Limits,
    Message,
    Restart,
    RewardParts,
    Task,
    ToolCall,
    Trajectory,
    Turn,
    TurnTokens,
)

TEXT = st.text(st.characters(), max_size=12)
IDS = st.integers(1, 2**31 - 1)
SECONDS = st.none() | st.floats(0, 1e6, exclude_min=True)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
METADATA = st.dictionaries(TEXT, PLAIN | st.lists(PLAIN, max_size=2), max_size=3)


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
    return Message(role, draw(TEXT), draw(maybe), calls, draw(maybe), draw(maybe))


@st.composite
def turn_tokens(draw):
    length = draw(st.integers(0, 6))
    ints = npst.arrays(np.int32, length)
    floats = npst.arrays(np.float32, length, elements=st.floats(width=32))
    world = draw(npst.arrays(np.int32, st.integers(0, 6)))
    finish = draw(st.sampled_from(Finish))
    matched = draw(st.none() | TEXT | IDS)
    completion = Completion(draw(ints), draw(floats), draw(ints), finish, matched, draw(st.integers(0, 9)))
    return TurnTokens(world, completion)


OBSERVATIONS = st.lists(messages(), max_size=2).map(tuple)
TURNS = st.builds(Turn, OBSERVATIONS, messages(), st.none() | turn_tokens())
SOME_TURNS = st.lists(TURNS, max_size=3).map(tuple)
TRAJECTORIES = st.builds(Trajectory, SOME_TURNS) | st.builds(
    Trajectory, SOME_TURNS, st.integers(0, 9), st.sampled_from(Restart)
)
LIMITS = st.builds(Limits, st.integers(1, 99), st.none() | IDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS)
PARTS = st.builds(RewardParts, st.dictionaries(TEXT, st.floats(-9, 9), max_size=2))
TASKS = st.builds(Task, TEXT, OBSERVATIONS, st.none() | TEXT, METADATA, TEXT)


@st.composite
def episodes(draw):
    ending = draw(st.sampled_from(Ending))
    failure = Failure(draw(TEXT), draw(TEXT), draw(TEXT)) if ending is Ending.FAILED else None
    return Episode(
        id=draw(TEXT),
        env_id=draw(TEXT),
        task=draw(TASKS),
        seed=draw(st.integers()),
        limits=draw(LIMITS),
        trajectories=tuple(draw(st.lists(TRAJECTORIES, max_size=2))),
        step_rewards=tuple(draw(st.lists(st.none() | st.floats(allow_nan=False) | PARTS, max_size=3))),
        ending=ending,
        failure=failure,
        counts=draw(st.dictionaries(TEXT, st.integers(0, 99), max_size=2)),
        seconds=draw(st.floats(0, 1e9)),
    )


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
