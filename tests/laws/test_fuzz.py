"""The token laws over thousands of random conversations in every dialect."""

from __future__ import annotations

import re
import statistics

import numpy as np
import pytest

from agentrl.algorithms.samples import samples_of
from agentrl.types import NO_VERSION, Author, Finish, History, Restart
from tests.laws.fuzz import SUBJECTS, Played, play_seed

THINKING = re.compile(r"(qwen3|glm-4.5|template, tagged calls), (byte-level|sentencepiece)")
IN_TEST, IN_TEST_FULL = 3_000, 25_000


def check(played: Played) -> None:
    """Every law, for one conversation."""
    episode = played.episode
    assert episode.failure is None, episode.failure
    check_prompts(played)
    check_samples(played)
    check_words(played)


def check_prompts(played: Played) -> None:
    """What the model was shown is what its trajectory says, token for token."""
    prompts = iter(played.policy.prompts)
    completions = iter(played.policy.completions)
    for trajectory in played.episode.trajectories:
        prefix: list[int] = []
        for turn in trajectory.turns:
            sampled = turn.tokens.completion
            prefix += turn.tokens.world_ids.tolist()
            if sampled.finish is not Finish.LENGTH or len(sampled.token_ids):
                assert next(prompts) == prefix
                assert sampled is next(completions)
            prefix += sampled.token_ids.tolist()
    assert next(prompts, None) is None


def check_samples(played: Played) -> None:
    """Every sampled token is trained exactly once, as it was sampled, and nothing else is."""
    samples = samples_of(played.episode)
    assert len(samples) == len(played.episode.trajectories)
    trained = {"token_ids": [], "logprobs": [], "versions": []}
    for sample, trajectory in zip(samples, played.episode.trajectories, strict=True):
        author = [
            who
            for turn in trajectory.turns
            for who, ids in (
                (Author.WORLD, turn.tokens.world_ids),
                (Author.POLICY, turn.tokens.completion.token_ids),
            )
            for _ in ids
        ]
        assert sample.author.tolist() == author
        assert np.array_equal(sample.loss_mask, sample.author == Author.POLICY)
        assert (sample.versions[~sample.loss_mask] == NO_VERSION).all()
        for name in trained:
            trained[name] += getattr(sample, name)[sample.loss_mask].tolist()
    for name, values in trained.items():
        assert values == [
            v for completion in played.policy.completions for v in getattr(completion, name).tolist()
        ], name


def check_words(played: Played) -> None:
    """What the world added is what a whole rendering of the conversation ends with."""
    messages: tuple = ()
    turns = played.episode.turns
    starts = {id(trajectory.turns[0]): trajectory.reason for trajectory in played.episode.trajectories}
    for index, (turn, observation, tools) in enumerate(
        zip(turns, played.world.observations, played.world.offered, strict=False)
    ):
        assert turn.observation == observation
        restarts = id(turn) in starts
        messages = tuple(observation) if isinstance(observation, History) else messages + observation
        full_render = played.renderer.render(messages, tools)
        added = turn.tokens.world_ids.tolist()
        max_tokens = played.episode.limits.max_tokens
        if restarts:
            assert added == full_render[:max_tokens]
        elif len(turn.tokens.completion.token_ids):
            assert added == full_render[-len(added) :]
        check_reasoning(played, index, starts.get(id(turn)), added)
        if index < len(played.policy.prompts):
            check_nothing_stripped_stays(played, messages, played.policy.prompts[index], full_render)
        check_reason(played, index, starts.get(id(turn)) if restarts and index else None)
        sampled = turn.tokens.completion.token_ids.tolist()
        if index < len(played.world.actions):
            prompt = played.policy.prompts[index]
            assert turn.action == played.renderer.parse(sampled, tools, prompt_ids=prompt)
            assert played.world.actions[index] == turn.action
        messages += (turn.action,)


def check_reason(played: Played, index: int, reason: Restart | None) -> None:
    """A prefix ends exactly where its world or its tools say so, or its dialect cannot go on."""
    if not index:
        return
    observations, offered = played.world.observations, played.world.offered
    in_tags = "tags are" in played.episode.id
    if isinstance(observations[index], History):
        assert reason is observations[index].reason
    elif in_tags:
        assert reason is None
    elif offered[index] != offered[index - 1]:
        assert reason is Restart.TOOLS_CHANGED
    else:
        assert reason in (None, Restart.REASONING_STRIPPED, Restart.REWRITTEN)


def check_reasoning(played: Played, index: int, reason: Restart | None, added: list[int]) -> None:
    """Other tools in the middle of a chain of calls take no reasoning back."""
    roles = [message.role for message in played.world.observations[index]]
    faithful = THINKING.match(played.episode.id) and len(added) < played.episode.limits.max_tokens
    if not faithful or reason is not Restart.TOOLS_CHANGED or set(roles) != {"tool"}:
        return
    thought = played.world.actions[index - 1].reasoning
    if thought is not None and "\ufffd" not in thought:
        assert thought in unescaped(played, added)


def unescaped(played: Played, ids: list[int]) -> str:
    """The text of a prompt, in which a thought that is rendered again has its special tokens escaped."""
    return played.renderer.decode(ids).replace("\u2060", "")


def check_nothing_stripped_stays(played: Played, messages, prompt: list[int], full_render: list[int]) -> None:
    """Reasoning that the dialect takes back is in no prompt."""
    # Markup in a thought may have been read as something else.
    thoughts = [m.reasoning for m in messages if m.reasoning is not None and not set(m.reasoning) & set("<{")]
    if not thoughts or not THINKING.match(played.episode.id):
        return
    prompt_text, full_text = unescaped(played, prompt), unescaped(played, full_render)
    assert not [thought for thought in thoughts if thought in prompt_text and thought not in full_text]


@pytest.mark.parametrize("name", SUBJECTS)
async def test_the_token_laws_hold_in_random_conversations(name):
    turns, malformed, reasoned = [], [], []
    for seed in range(-(-IN_TEST // len(SUBJECTS))):
        played = await play_seed(name, seed)
        check(played)
        turns.append(len(played.episode.turns))
        reasoned += [turn.action.reasoning is not None for turn in played.episode.turns]
        malformed += [kind in ("broken", "any") for kind in played.policy.kinds]
    assert statistics.median(turns) >= 3
    assert statistics.mean(malformed) >= 0.2
    assert statistics.mean(reasoned) > 0.05 or not THINKING.match(name)


@pytest.mark.full
@pytest.mark.parametrize("name", SUBJECTS)
async def test_the_token_laws_hold_in_many_more_random_conversations(name):
    first = -(-IN_TEST // len(SUBJECTS))
    for seed in range(first, first + -(-IN_TEST_FULL // len(SUBJECTS))):
        check(await play_seed(name, seed))
