"""The token agent: the prefix only grows, and what was sampled stays as it was sampled."""

from __future__ import annotations

import numpy as np
import pytest

from agentrl import Message, Step, Task, play
from agentrl.algorithms.samples import samples_of
from agentrl.protocols import Seen, Session, Stops, ToolSchema
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.types import Finish, History, Restart
from tests.worlds import Reciter, Talk

PROMPT = (Message("user", "abc"),)
ANSWER = (Message("tool", "de"),)
LOOK = (ToolSchema("look", "Look.", {}),)


class Letters:
    """A renderer of one token a letter, whose parse() says how many tokens it was shown."""

    def __init__(self):
        self.parsed = []
        self.seen = []

    def stops(self, tools):
        return Stops(("</x>",), (7, 9))

    def render(self, messages, tools):
        return [1, *(ord(c) for m in messages for c in m.content)]

    def extend(self, seen, observation, tools):
        self.seen.append(seen)
        if tools != seen.tools:
            return Restart.TOOLS_CHANGED
        return [2, *(ord(c) for m in observation for c in m.content)]

    def parse(self, ids, tools, *, prompt_ids=()):
        self.parsed.append(list(ids))
        return Message("assistant", str(len(ids)))

    def write(self, action, tools):
        return [ord(c) for c in action.content]


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


async def test_the_whole_prefix_counts_against_the_room():
    agent, policy = agent_over([50, 51], [60])
    await agent.act(PROMPT, tools=(), session=session(left=30))
    await agent.act(ANSWER, tools=(), session=session(left=30))
    assert [sampling.max_new_tokens for sampling in policy.samplings] == [26, 21]


async def test_the_renderer_is_told_what_the_model_has_seen_and_said():
    renderer = Letters()
    agent, _ = agent_over([50, 51], [60], [70], renderer=renderer)
    for shown in (PROMPT, ANSWER, ANSWER):
        await agent.act(shown, tools=(), session=session())
    first = [1, *b"abc"]
    assert renderer.seen == [
        Seen((*PROMPT, Message("assistant", "2")), (), first, [50, 51]),
        Seen(
            (*PROMPT, Message("assistant", "2"), *ANSWER, Message("assistant", "1")),
            (),
            [*first, 50, 51, 2, *b"de"],
            [60],
        ),
    ]


async def test_where_the_prefix_does_not_hold_the_whole_conversation_is_shown_anew():
    agent, policy = agent_over([50, 51], [60], [70])
    acts = [
        await agent.act(PROMPT, tools=(), session=session(left=40)),
        await agent.act(ANSWER, tools=LOOK, session=session(left=40)),
        await agent.act(ANSWER, tools=LOOK, session=session(left=40)),
    ]
    # What the policy said comes back as the renderer writes it, not as it was sampled.
    anew = [1, *b"abc", *b"2", *b"de"]
    assert policy.prompts == [[1, *b"abc"], anew, [*anew, 60, 2, *b"de"]]
    assert [act.restart for act in acts] == [None, Restart.TOOLS_CHANGED, None]
    assert acts[1].tokens.world_ids.tolist() == anew
    assert [sampling.max_new_tokens for sampling in policy.samplings] == [36, 33, 29]


async def test_a_history_from_the_world_replaces_everything_said_before():
    renderer = Letters()
    agent, policy = agent_over([50, 51], [60], [70], renderer=renderer)
    short = History((Message("user", "ab"), Message("assistant", "x")), Restart.COMPACTED)
    acts = [await agent.act(shown, tools=(), session=session()) for shown in (PROMPT, short, ANSWER)]
    assert policy.prompts == [[1, *b"abc"], [1, *b"abx"], [1, *b"abx", 60, 2, *b"de"]]
    assert [act.restart for act in acts] == [None, Restart.COMPACTED, None]
    assert renderer.seen[-1].messages == (*short, Message("assistant", "1"))


async def test_three_turns_and_two_samples():
    """The worked example of `Conversation`."""
    compacted = Step.restarted(Message("user", "fg"), reason=Restart.COMPACTED)
    env = Talk(steps=[Step.going(*ANSWER), compacted, Step.finished(reward=1.0)])
    agent, _ = agent_over([50, 51], [60], [70, 71], settings=SamplingSettings(max_response_len=9))
    episode = await play(env, agent, Task("t", PROMPT), episode_id="e")
    first, second = samples_of(episode)
    assert first.token_ids.tolist() == [1, *b"abc", 50, 51, 2, *b"de", 60]
    assert first.loss_mask.tolist() == [False] * 4 + [True] * 2 + [False] * 3 + [True]
    assert second.token_ids.tolist() == [1, *b"fg", 70, 71]
    assert second.loss_mask.tolist() == [False] * 3 + [True] * 2
    assert first.rollout_id == second.rollout_id == ("e", "agent")
    assert [one.reason for one in episode.trajectories] == [None, Restart.COMPACTED]


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
