"""SFT and RL see the same tokens: a conversation of a file is rendered as an episode of its messages is."""

from __future__ import annotations

import asyncio
import json
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from agentrl import Env, Limits, Message, Step, Task, call, play, say
from agentrl.algorithms.samples import samples_of
from agentrl.assembly.sections import SftSection
from agentrl.envs import Chat
from agentrl.rendering.fresh_tokenizer import CALL_MARKERS, train_tokenizer
from agentrl.rendering.template import TemplateRenderer
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.run.sft_data import SftReader
from agentrl.types import Author, Ending
from tests.laws.conversations import CORPUS, TOOLS, WORDS
from tests.rendering.subjects import FORMATS
from tests.rendering.subjects import renderer as family
from tests.worlds import Reciter


@lru_cache
def fresh():
    tokenizer = train_tokenizer(CORPUS, special_tokens=CALL_MARKERS, vocab_size=360)
    return TemplateRenderer(tokenizer)


RENDERERS = {
    **{
        f"{name}, {kind}": (lambda n=name, k=kind: family(n, k))
        for name in FORMATS
        for kind in ("byte-level", "sentencepiece")
    },
    "a fresh tokenizer": fresh,
    "tags that are tokens": lambda: WORDS[0].renderer,
    "tags that are strings": lambda: WORDS[1].renderer,
    "without a chat template": lambda: WORDS[2].renderer,
}
WORD = st.text("abc dé12.", min_size=1, max_size=12).map(str.strip).filter(bool)
REASONED = st.none() | WORD
ACTION = st.one_of(
    WORD.map(say),
    st.builds(lambda text: call("echo", text=text), WORD),
    st.builds(lambda a, b: call("add", a=a, b=b), st.integers(0, 99), st.integers(0, 99)),
)


class FixedMessages(Env):
    """Shows given messages, whatever the actions."""

    id = "FixedMessages-v0"
    limits = Limits(max_turns=10, max_tokens=None)
    dialect = Chat()
    tool_schemas = TOOLS

    def __init__(self, observations):
        super().__init__()
        self.observations = observations

    def tasks(self, split):
        return ()

    async def reset(self, task, *, seed):
        self.seed_rng(seed)
        return task.prompt, {}

    async def step(self, action):
        if not self.observations:
            return Step.finished(reward=1.0)
        return Step.going(*self.observations.pop(0))


def row_of(messages):
    """Messages in the form of OpenAI's API."""
    rows = []
    for message in messages:
        row = {"role": message.role, "content": message.text}
        if message.reasoning is not None:
            row["reasoning_content"] = message.reasoning
        if message.tool_calls:
            row["tool_calls"] = [
                {
                    "id": f"call_{n}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
                }
                for n, call in enumerate(message.tool_calls)
            ]
        if message.role == "tool":
            row |= {"tool_call_id": message.tool_call_id, "name": message.name}
        rows.append(row)
    return rows


@st.composite
def conversations(draw):
    """A prompt, actions, and the observation after each but the last."""
    prompt = [Message(role, draw(WORD)) for role in draw(st.sampled_from([("user",), ("system", "user")]))]
    actions = [draw(ACTION) for _ in range(draw(st.integers(1, 4)))]
    reasoned = [Message("assistant", a.content, draw(REASONED), a.tool_calls) for a in actions]
    observations = [
        (Message("tool", draw(WORD), tool_call_id="call_0", name=action.tool_calls[0].name),)
        if action.tool_calls
        else (Message("user", draw(WORD)),)
        for action in reasoned[:-1]
    ]
    return tuple(prompt), reasoned, observations


def tools_as_json():
    return [{"type": "function", "function": tool._asdict()} for tool in TOOLS]


async def rendered(renderer, row, folder):
    file = folder / "c.jsonl"
    file.write_text(json.dumps(row) + "\n")
    reader = SftReader(SftSection(), None, renderer, (), None)
    return (await reader.read([str(file)], "sft_data")).units[0]


async def both(renderer, conversation, folder):
    """The Samples of an episode in which the policy samples the actions, and those of the file's row."""
    prompt, actions, observations = conversation
    sampled = [renderer.write(action, TOOLS) for action in actions]
    agent = TokenAgent(
        Reciter(lambda turn, _: sampled[turn]), renderer, SamplingSettings(max_response_len=10**6)
    )
    episode = await play(FixedMessages([*observations]), agent, Task("t", prompt))
    assert episode.ending is Ending.COMPLETED
    recorded = [turn.action for turn in episode.turns]
    # A format without a form for reasoning beside a call, say, has no such episode.
    intended = [(a.text, a.reasoning, [(c.name, c.arguments) for c in a.tool_calls]) for a in actions]
    assume(
        intended == [(a.text, a.reasoning, [(c.name, c.arguments) for c in a.tool_calls]) for a in recorded]
    )
    between = [
        message for pair in zip(actions, [*observations, ()], strict=True) for message in (pair[0], *pair[1])
    ]
    row = {"messages": row_of([*prompt, *between]), "tools": tools_as_json()}
    return samples_of(episode), await rendered(renderer, row, folder)


# Formats without a form for reasoning next to a call filter many conversations out.
@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] * name.endswith("sentencepiece")) for name in RENDERERS],
)
@given(conversation=conversations())
def test_a_conversation_has_the_tokens_of_its_episode(tmp_path_factory, name, conversation):
    folder = tmp_path_factory.getbasetemp()
    played, imitated = asyncio.run(both(RENDERERS[name](), conversation, folder))
    assert len(played) == len(imitated)
    for episode, row in zip(played, imitated, strict=True):
        assert row.token_ids.tolist() == episode.token_ids.tolist()
        assert row.loss_mask.tolist() == episode.loss_mask.tolist()
        assert ((row.author == Author.DEMO) == (episode.author == Author.POLICY)).all()
        assert np.all(row.logprobs == 0)
