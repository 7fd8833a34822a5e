"""Tokens once: what was sampled is what is trained on, and what was shown is what is written down."""

from __future__ import annotations

import asyncio

import numpy as np
from hypothesis import given

from agentrl import Limits, Task, call, play
from agentrl.algorithms.samples import samples_of
from agentrl.rendering.messages import MarkupEscaper
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.types import NO_VERSION, Author, Ending, Finish
from tests.laws.conversations import DIALECT, TOOLS, WORDS, Conversation, conversations

TEMPERATURE = 0.7
MAX_RESPONSE_LEN = 40


class Played:
    """A conversation, played, with everyone's own notes of it."""

    def __init__(self, conversation):
        self.conversation = conversation
        self.words = conversation.words
        self.env = conversation.env()
        self.policy = conversation.policy()
        settings = SamplingSettings(temperature=TEMPERATURE, max_response_len=MAX_RESPONSE_LEN)
        agent = TokenAgent(self.policy, self.words.renderer, settings)
        self.episode = asyncio.run(play(self.env, agent, conversation.task))
        (self.sample,) = samples_of(self.episode)
        (self.trajectory,) = self.episode.trajectories

    @property
    def sampled(self):
        """What the policy says that it sampled, turn by turn."""
        return [
            list(self.policy.line(turn, sampling))[: sampling.max_new_tokens]
            for turn, sampling in enumerate(self.policy.samplings)
        ]


@given(conversations())
def test_no_conversation_of_the_models_making_is_a_failure(conversation):
    assert Played(conversation).episode.ending in (Ending.COMPLETED, Ending.TRUNCATED)


@given(conversations())
def test_the_sample_is_the_turns_laid_end_to_end(conversation):
    played = Played(conversation)
    parts = [
        part
        for turn in played.trajectory.turns
        for part in (turn.tokens.world_ids, turn.tokens.completion.token_ids)
    ]
    assert played.sample.token_ids.tolist() == np.concatenate(parts).tolist()
    assert (played.sample.temperatures[played.sample.loss_mask] == np.float32(TEMPERATURE)).all()
    assert played.sample.rollout_id == (played.episode.id, "agent")


@given(conversations())
def test_the_sample_is_what_the_model_saw_and_nothing_it_saw_is_missing(conversation):
    played = Played(conversation)
    ids = played.sample.token_ids.tolist()
    for prompt, sampled in zip(played.policy.prompts, played.sampled, strict=True):
        assert ids[: len(prompt) + len(sampled)] == [*prompt, *sampled]
    if played.policy.prompts:
        num_tokens = len(played.policy.prompts[-1]) + len(played.sampled[-1])
        # Behind it only what the world said when there was no room for another turn.
        assert not played.sample.loss_mask[num_tokens:].any()


@given(conversations())
def test_the_mask_is_one_exactly_on_the_sampled_tokens(conversation):
    played = Played(conversation)
    sampled = [token for turn in played.sampled for token in turn]
    mask = played.sample.loss_mask
    assert played.sample.token_ids[mask].tolist() == sampled
    assert np.array_equal(mask, played.sample.author == Author.POLICY)
    starts = [len(prompt) for prompt in played.policy.prompts]
    trained = {
        t for start, turn in zip(starts, played.sampled, strict=True) for t in range(start, start + len(turn))
    }
    assert set(np.flatnonzero(mask).tolist()) == trained


@given(conversations())
def test_every_trainable_token_has_the_logprob_and_the_version_it_was_sampled_with(conversation):
    played = Played(conversation)
    sample, mask = played.sample, played.sample.loss_mask
    logprobs = [-np.linspace(0.1, 1.0, len(turn), dtype=np.float32) for turn in played.sampled if turn] or [
        np.zeros(0, np.float32)
    ]
    assert sample.logprobs[mask].tolist() == np.concatenate(logprobs).tolist()
    assert set(sample.versions[mask].tolist()) <= {conversation.version}
    assert set(sample.versions[~mask].tolist()) <= {NO_VERSION}
    assert not sample.logprobs[~mask].any()


@given(conversations())
def test_the_decoded_trajectory_is_what_was_shown(conversation):
    played = Played(conversation)
    text = played.words.text
    for index, turn in enumerate(played.trajectory.turns):
        disarm = MarkupEscaper(played.words.tokenizer, (f"<{DIALECT.result}>", f"</{DIALECT.result}>"))
        answers = [disarm(message.content) for message in turn.observation]
        expected = "".join(f"<{DIALECT.result}> {answer}</{DIALECT.result}>" for answer in answers)
        if index == 0:
            expected = first_prompt(played.words, turn.observation)
        decoded = text(turn.tokens.world_ids)
        if index < len(played.policy.prompts):
            assert decoded == expected
        else:
            assert played.words.ids(expected)[: len(turn.tokens.world_ids)] == turn.tokens.world_ids.tolist()
    observations = [turn.observation for turn in played.trajectory.turns]
    assert observations == [conversation.task.prompt, *played.env.answers[: len(observations) - 1]]


@given(conversations())
def test_the_world_hears_what_was_sampled_and_never_an_unfinished_message(conversation):
    played = Played(conversation)
    finished = [
        played.words.renderer.parse(turn.tokens.completion.token_ids.tolist(), TOOLS)
        for turn in played.trajectory.turns
        if turn.tokens.completion.finish is Finish.STOP
    ]
    assert played.env.actions == finished
    unfinished = [turn.tokens.completion.finish is not Finish.STOP for turn in played.trajectory.turns]
    assert not any(unfinished[:-1])
    assert (played.episode.ending is Ending.COMPLETED) == (len(finished) == len(played.env.answers) + 1)


@given(conversations())
def test_no_sample_outgrows_the_limits_of_its_episode(conversation):
    played = Played(conversation)
    limits = conversation.limits
    assert len(played.trajectory.turns) <= limits.max_turns
    assert limits.max_tokens is None or len(played.sample) <= limits.max_tokens


def first_prompt(words, observation):
    """The prompt, in which all special tokens but the tags that prompts explain are escaped."""
    tags = (*(tool.name for tool in TOOLS), DIALECT.answer, DIALECT.result, "think")
    escape = MarkupEscaper(words.tokenizer, keep=[form for tag in tags for form in (f"<{tag}>", f"</{tag}>")])
    if words.tokenizer.chat_template is None:
        return "\n".join(escape(message.content) for message in observation) + "\n"
    turns = [{"role": message.role, "content": escape(message.content)} for message in observation]
    return words.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)


def test_a_split_that_the_tokenizer_would_never_make_is_kept_as_it_was_sampled():
    for words in WORDS:
        canonical = words.renderer.write(call("echo", text="Kalor was born"), TOOLS)
        spelled = words.pieces(words.text(canonical), range(100))
        assert words.text(spelled) == words.text(canonical)
        assert words.ids(words.text(spelled)) != spelled
        played = Played(Conversation(words, Task.ask("t", "Where?"), [["x"], ["y"]], [spelled], Limits()))
        assert played.episode.ending is Ending.COMPLETED
        assert played.sample.token_ids[played.sample.loss_mask].tolist() == spelled * 3
        assert [m.tool_calls[0].arguments for m in played.env.actions] == [{"text": "Kalor was born"}] * 3
