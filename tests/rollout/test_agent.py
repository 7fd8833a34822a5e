"""The token agent: the prefix only grows, and what was sampled stays as it was sampled."""

from __future__ import annotations

import numpy as np
import pytest

from agentrl import Message
from agentrl.protocols import Session, Stops
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.types import Finish
from tests.worlds import Reciter

PROMPT = (Message("user", "abc"),)
ANSWER = (Message("tool", "de"),)


class Letters:
    """A renderer of one token a letter, whose parse() says how many tokens it was shown."""

    def __init__(self):
        self.parsed = []

    def stops(self, tools):
        return Stops(("</x>",), (7, 9))

    def render(self, messages, tools):
        return [1, *(ord(c) for m in messages for c in m.content)]

    def extend(self, observation):
        return [2, *(ord(c) for m in observation for c in m.content)]

    def parse(self, ids, tools):
        self.parsed.append(list(ids))
        return Message("assistant", str(len(ids)))


def session(left=100, seed=3):
    return Session("s", seed, left)


def agent_over(*turns, settings=None, renderer=None):
    policy = Reciter(lambda turn, sampling: turns[turn])
    return TokenAgent(policy, renderer or Letters(), settings or SamplingSettings()), policy


async def test_every_prompt_is_the_one_before_with_what_was_sampled_and_what_was_shown():
    agent, policy = agent_over([50, 51], [60], [70])
    acts = [
        await agent.act(PROMPT, tools=(), session=session()),
        await agent.act(ANSWER, tools=(), session=session()),
        await agent.act(ANSWER, tools=(), session=session()),
    ]
    first = [1, *b"abc"]
    assert policy.prompts == [
        first,
        [*first, 50, 51, 2, *b"de"],
        [*first, 50, 51, 2, *b"de", 60, 2, *b"de"],
    ]
    assert [act.tokens.world_ids.tolist() for act in acts] == [first, [2, *b"de"], [2, *b"de"]]
    assert [act.tokens.completion.token_ids.tolist() for act in acts] == [[50, 51], [60], [70]]


async def test_the_sampled_tokens_are_what_is_read():
    renderer = Letters()
    agent, _ = agent_over([50, 51], renderer=renderer)
    act = await agent.act(PROMPT, tools=(), session=session())
    assert renderer.parsed == [[50, 51]]
    assert act.message == Message("assistant", "2")


async def test_the_policy_is_told_how_to_sample_and_for_which_session():
    settings = SamplingSettings(temperature=0.7, top_p=0.9, top_k=5)
    agent, policy = agent_over([50], settings=settings)
    await agent.act(PROMPT, tools=(), session=session(left=20, seed=11))
    (sampling,) = policy.samplings
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.7, 0.9, 5, 11)
    assert (sampling.stop, sampling.stop_token_ids) == (("</x>",), (7, 9))
    assert policy.sessions == ["s"]


@pytest.mark.parametrize(
    ("left", "most", "room"), [(20, None, 16), (20, 10, 10), (20, 30, 16), (None, 10, 10), (5, None, 1)]
)
async def test_a_turn_gets_the_room_that_is_left(left, most, room):
    agent, policy = agent_over([50], settings=SamplingSettings(max_response_len=most))
    await agent.act(PROMPT, tools=(), session=session(left=left))
    assert policy.samplings[0].max_new_tokens == room


@pytest.mark.parametrize("left", [4, 3, 0, -5])
async def test_without_room_for_a_token_nothing_is_sampled_and_the_turn_is_unfinished(left):
    agent, policy = agent_over()
    act = await agent.act(PROMPT, tools=(), session=session(left=left))
    assert policy.prompts == []
    assert act.message == Message("assistant")
    assert act.tokens.completion.finish is Finish.LENGTH
    assert len(act.tokens.completion.token_ids) == 0
    # What no policy will read is kept only as far as the episode's limit goes.
    assert act.tokens.world_ids.tolist() == [1, *b"abc"][: max(left, 0)]
    assert act.tokens.world_ids.dtype == np.int32


async def test_with_no_limit_at_all_the_mistake_is_named():
    agent, _ = agent_over()
    with pytest.raises(ValueError, match="max_tokens in the episode's limits or max_response_len"):
        await agent.act(PROMPT, tools=(), session=session(left=None))


async def test_closing_forgets_the_session():
    agent, policy = agent_over()
    await agent.close("s")
    assert policy.forgotten == ["s"]
