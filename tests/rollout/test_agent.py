"""The token agent: the prefix only grows, and sampled tokens are never encoded again."""

from __future__ import annotations

import numpy as np
import pytest

from agentrl import Message, Step, Task, play
from agentrl.algorithms.samples import samples_of
from agentrl.errors import ConfigError
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.types import Finish, History, Restart
from agentrl.types.seams import Seen, Session, Stops, ToolSchema
from tests.worlds import Reciter, Talk

PROMPT = (Message("user", "abc"),)
ANSWER = (Message("tool", "de"),)
LOOK = (ToolSchema("look", "Look.", {}),)


class Alphabet:
    """A tokenizer with one token for each letter, which begins each text with 1."""

    def encode(self, text, *, add_special_tokens=True):
        return [*([1] if add_special_tokens else ()), *map(ord, text)]

    def decode(self, token_ids, skip_special_tokens=False):
        return "".join(chr(token) for token in token_ids if token > 2 or not skip_special_tokens)


class Letters:
    """A renderer with one token for each letter, whose parse() returns the number of tokens."""

    tokenizer = Alphabet()

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


def session(max_tokens=100, seed=3):
    return Session("s", seed, max_tokens)


def agent_over(*turns, settings=None, renderer=None):
    policy = Reciter(lambda turn, sampling: turns[turn])
    return TokenAgent(policy, renderer or Letters(), settings or SamplingSettings()), policy


async def test_every_prompt_extends_the_previous_one_by_the_sampled_tokens_and_the_observation():
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


async def test_the_sampled_tokens_are_parsed():
    renderer = Letters()
    agent, _ = agent_over([50, 51], renderer=renderer)
    act = await agent.act(PROMPT, tools=(), session=session())
    assert renderer.parsed == [[50, 51]]
    assert act.message == Message("assistant", "2")


async def test_the_policy_receives_the_sampling_settings_and_the_session():
    settings = SamplingSettings(temperature=0.7, top_p=0.9, top_k=5)
    agent, policy = agent_over([50], settings=settings)
    await agent.act(PROMPT, tools=(), session=session(max_tokens=20, seed=11))
    (sampling,) = policy.samplings
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.7, 0.9, 5, 11)
    assert (sampling.stop, sampling.stop_token_ids) == (("</x>",), (7, 9))
    assert policy.sessions == ["s"]


@pytest.mark.parametrize(
    ("max_tokens", "max_response_len", "expected"),
    [(20, None, 16), (20, 10, 10), (20, 30, 16), (None, 10, 10), (5, None, 1)],
)
async def test_a_turn_may_use_the_remaining_tokens(max_tokens, max_response_len, expected):
    agent, policy = agent_over([50], settings=SamplingSettings(max_response_len=max_response_len))
    await agent.act(PROMPT, tools=(), session=session(max_tokens=max_tokens))
    assert policy.samplings[0].max_new_tokens == expected


async def test_the_prefix_counts_against_the_limit():
    agent, policy = agent_over([50, 51], [60])
    await agent.act(PROMPT, tools=(), session=session(max_tokens=30))
    await agent.act(ANSWER, tools=(), session=session(max_tokens=30))
    assert [sampling.max_new_tokens for sampling in policy.samplings] == [26, 21]


async def test_the_renderer_receives_the_conversation_and_its_tokens():
    renderer = Letters()
    agent, _ = agent_over([50, 51], [60], [70], renderer=renderer)
    for observation in (PROMPT, ANSWER, ANSWER):
        await agent.act(observation, tools=(), session=session())
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


async def test_a_restart_renders_the_whole_conversation_again():
    agent, policy = agent_over([50, 51], [60], [70])
    acts = [
        await agent.act(PROMPT, tools=(), session=session(max_tokens=40)),
        await agent.act(ANSWER, tools=LOOK, session=session(max_tokens=40)),
        await agent.act(ANSWER, tools=LOOK, session=session(max_tokens=40)),
    ]
    # The policy's turn is rendered again, not taken as sampled.
    restarted = [1, *b"abc", *b"2", *b"de"]
    assert policy.prompts == [[1, *b"abc"], restarted, [*restarted, 60, 2, *b"de"]]
    assert [act.restart for act in acts] == [None, Restart.TOOLS_CHANGED, None]
    assert acts[1].tokens.world_ids.tolist() == restarted
    assert [sampling.max_new_tokens for sampling in policy.samplings] == [36, 33, 29]


async def test_a_history_replaces_the_conversation():
    renderer = Letters()
    agent, policy = agent_over([50, 51], [60], [70], renderer=renderer)
    short = History((Message("user", "ab"), Message("assistant", "x")), Restart.COMPACTED)
    acts = [
        await agent.act(observation, tools=(), session=session()) for observation in (PROMPT, short, ANSWER)
    ]
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
    assert [trajectory.reason for trajectory in episode.trajectories] == [None, Restart.COMPACTED]


@pytest.mark.parametrize("max_tokens", [4, 3, 0, -5])
async def test_without_a_free_token_nothing_is_sampled_and_the_turn_is_cut(max_tokens):
    agent, policy = agent_over()
    act = await agent.act(PROMPT, tools=(), session=session(max_tokens=max_tokens))
    assert policy.prompts == []
    assert act.message == Message("assistant")
    assert act.tokens.completion.finish is Finish.LENGTH
    assert len(act.tokens.completion.token_ids) == 0
    # Tokens that no policy reads are recorded only up to the episode's limit.
    assert act.tokens.world_ids.tolist() == [1, *b"abc"][: max(max_tokens, 0)]
    assert act.tokens.world_ids.dtype == np.int32


async def test_without_any_limit_an_error_is_raised():
    agent, _ = agent_over()
    with pytest.raises(ConfigError, match="sets no limit of tokens; set rollout_max_context_len"):
        await agent.act(PROMPT, tools=(), session=session(max_tokens=None))


async def test_closing_closes_the_session():
    agent, policy = agent_over()
    await agent.close("s")
    assert policy.closed == ["s"]


class Spoken(Letters):
    """A prompt that cannot be extended after the word `new`; what was sampled is 5 letters again."""

    def extend(self, seen, observation, tools):
        return (
            Restart.REWRITTEN if observation[0].content == "new" else super().extend(seen, observation, tools)
        )


def letters(text):
    return [1, *map(ord, text)]


async def test_the_teachers_prompt_is_rendered_where_a_trajectory_begins():
    agent, policy = agent_over([50, 51], [60], [70], [80], renderer=Spoken())
    agent.privileged_text = "hint"
    history = History((Message("system", "s"), Message("user", "told")), Restart.COMPACTED)
    observations = (PROMPT, ANSWER, (Message("tool", "new"),), history)
    acts = [await agent.act(one, tools=(), session=session()) for one in observations]
    found = [a.tokens.privileged_ids and [*a.tokens.privileged_ids] for a in acts]
    # Messages of the model are the numbers of their tokens, see Letters.
    assert found == [letters("abc\n\nhint"), None, letters("abc\n\nhint2de1new"), letters("stold\n\nhint")]
    assert [a.restart for a in acts] == [None, None, Restart.REWRITTEN, Restart.COMPACTED]
    plain, other = agent_over([50, 51], [60], [70], [80], renderer=Spoken())
    alone = [await plain.act(one, tools=(), session=session()) for one in observations]
    assert [a.tokens.world_ids.tolist() for a in alone] == [a.tokens.world_ids.tolist() for a in acts]
    assert policy.prompts == other.prompts, "the policy never reads the hint"
    assert all(a.tokens.privileged_ids is None for a in alone)
