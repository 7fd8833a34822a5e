"""A trajectory that breaks a token law stops the run before it is trained on, by the law's name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agentrl import Limits, Message, Step, play, say
from agentrl.algorithms import steps
from agentrl.algorithms.config import AlgorithmConfig
from agentrl.algorithms.laws import TokenLaws
from agentrl.algorithms.samples import samples_of
from agentrl.assembly.algorithm import build_algorithm
from agentrl.errors import TokenLawError, UserError
from agentrl.records import Outcome
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.rollout.group import GroupOutcome
from agentrl.run.journal_entries import leftover_entries
from agentrl.run.loop import Loop
from agentrl.types import KEPT_IDS, Extra, Group, RolloutId, Verdict
from tests.rollout.test_agent import Letters
from tests.worlds import ASK, QUICK, Reciter, Speaker, Talk

VOCAB, SERVED, TURNS = 128, 5, 3
SIBLINGS = 2


class Engine(Reciter):
    """Recites three tokens a turn; `crook` may break what the second sibling gets."""

    def __init__(self, crook=None):
        super().__init__(lambda turn, sampling: [10 + turn, 20, 30], SERVED)
        self.crook = crook

    async def generate(self, prompt_ids, sampling, *, session):
        completion = await super().generate(prompt_ids, sampling, session=session)
        if self.crook is None:
            return completion
        return self.crook(completion, len(self.prompts) - 1)


def changed(**arrays):
    """An engine whose second turn has other values."""

    def crook(completion, turn):
        return replace(completion, **arrays) if turn == 1 else completion

    return crook


def short(name, value):
    """An engine that returns fewer values than tokens, which no `Completion` accepts."""

    def crook(completion, turn):
        if turn == 1:
            object.__setattr__(completion, name, value)
        return completion

    return crook


def ints(*values):
    return np.array(values, np.int32)


def floats(*values):
    return np.array(values, np.float32)


def kept(*lists):
    return Extra.of_lists([ints(*ids) for ids in lists])


class AddsToThePrompt(Letters):
    def parse(self, ids, tools, *, prompt_ids=()):
        prompt_ids[0] = 99
        return super().parse(ids, tools)


class ChangesTheTurn(Letters):
    def parse(self, ids, tools, *, prompt_ids=()):
        ids[-1] = 99
        return super().parse(ids, tools)


class RendersNothing(Letters):
    def render(self, messages, tools):
        return []


class AnotherTokenizer(Letters):
    def extend(self, seen, observation, tools):
        return [VOCAB]


ENGINES = {
    "a logprob is missing": ("lengths", 1, short("logprobs", floats(-1, -1))),
    "a version is missing": ("lengths", 1, short("versions", ints(5))),
    "an extra is short": ("lengths", 1, short("extras", {"experts": Extra.dense([1, 2])})),
    "an id beyond the vocabulary": ("vocabulary", 1, changed(token_ids=ints(1, VOCAB, 2))),
    "an id below 0": ("vocabulary", 1, changed(token_ids=ints(1, -1, 2))),
    "a logprob above 0": ("logprobs", 1, changed(logprobs=floats(-1, 0.5, -1))),
    "a logprob that is not a number": ("logprobs", 1, changed(logprobs=floats(-1, np.nan, -1))),
    "an impossible token": ("logprobs", 1, changed(logprobs=floats(-1, -np.inf, -1))),
    "weights that are not published": ("versions", 1, changed(versions=ints(5, 6, 6))),
    "no version": ("versions", 1, changed(versions=ints(-1, -1, -1))),
    "versions that fall in a turn": ("versions", 1, changed(versions=ints(5, 4, 5))),
    "versions that fall between turns": ("versions", 1, changed(versions=ints(4, 4, 5))),
    "kept ids without the token": ("kept", 1, changed(extras={KEPT_IDS: kept([1], [2], [0, 2])})),
    "kept ids beyond the vocabulary": ("kept", 1, changed(extras={KEPT_IDS: kept([1], [2, VOCAB], [3])})),
    "kept ids that are not ragged": ("kept", 1, changed(extras={KEPT_IDS: Extra.dense(ints(1, 2, 3))})),
    "greedy sampling": ("temperature", 1, changed(temperature=0.0)),
    "no temperature": ("temperature", 1, changed(temperature=float("nan"))),
}
RENDERERS = {
    "the prompt is changed": ("prefix", 1, AddsToThePrompt),
    "a turn is changed": ("prefix", 1, ChangesTheTurn),
    "an empty prompt": ("start", 0, RendersNothing),
    "the tokens of another tokenizer": ("vocabulary", 1, AnotherTokenizer),
}


def doubled(samples):
    return (*samples, *samples)


def without_the_last_token(samples):
    (sample,) = samples
    arrays = ("token_ids", "author", "loss_mask", "logprobs", "versions", "turns", "temperatures")
    return (replace(sample, **{name: getattr(sample, name)[:-1] for name in arrays}),)


def with_array(name, value):
    """The samples with another value at their last token."""

    def change(samples):
        (sample,) = samples
        values = getattr(sample, name).copy()
        values[-1] = value
        return (replace(sample, **{name: values}),)

    return change


def of_another(samples):
    return tuple(replace(sample, rollout_id=RolloutId("another")) for sample in samples)


SAMPLES = {
    "a sample twice": ("once", doubled),
    "no sample": ("once", lambda samples: ()),
    "a token less": ("once", without_the_last_token),
    "another token": ("once", with_array("token_ids", 7)),
    "another logprob": ("once", with_array("logprobs", -9.0)),
    "another version": ("once", with_array("versions", 0)),
    "another temperature": ("once", with_array("temperatures", 0.5)),
    "the sample of another episode": ("once", of_another),
    "a token outside the mask": ("mask", with_array("loss_mask", False)),
}


class Never:
    """A trainer that must not be called."""

    def __getattr__(self, name):
        raise AssertionError(f"the trainer's `{name}` was called")


class Batch:
    """A producer with one batch of one group."""

    version = SERVED

    def __init__(self, group):
        self.outcome = GroupOutcome(group, (), group.episodes)

    async def take(self):
        return [self.outcome]


async def played(crook=None, renderer=Letters, agent=None):
    """A group whose second sibling plays with the engine that `crook` breaks."""
    episodes = []
    for number in range(SIBLINGS):
        is_last = number == SIBLINGS - 1
        engine = Engine(crook if is_last else None)
        token_agent = TokenAgent(engine, (renderer if is_last else Letters)(), SamplingSettings())
        steps = [Step.going(Message("tool", "on"))] * (TURNS - 1) + [Step.finished(reward=1.0)]
        env = Talk(steps=steps)
        env.limits = Limits(max_turns=QUICK.max_turns, max_tokens=200)
        player = agent if agent is not None and is_last else token_agent
        episodes.append(await play(env, player, ASK, episode_id=f"g0-{number}"))
    assert [episode.failure for episode in episodes] == [None] * SIBLINGS
    verdicts = tuple(Verdict(e.id, "s", float(k)) for k, e in enumerate(episodes))
    return Group("g0", ASK, 0, tuple(episodes), verdicts)


async def refused(group) -> tuple[TokenLawError, Loop]:
    algorithm = build_algorithm(AlgorithmConfig(), max_length=9)
    loop = Loop(Batch(group), Never(), algorithm, None, 1, laws=TokenLaws(VOCAB))
    with pytest.raises(TokenLawError) as caught:
        await loop.iterate(0)
    return caught.value, loop


def check(error, loop, law, turn):
    assert isinstance(error, UserError)
    assert error.law == law
    sentence = str(error)
    assert sentence.startswith(f"episode g0-1, turn {turn} breaks the token law `{law}`: ")
    assert sentence.endswith(", then resume the run.")
    entries = list(leftover_entries([], loop.in_progress))
    fates = [(entry.episode.id, entry.outcome, entry.reason) for entry in entries]
    assert fates == [(f"g0-{n}", Outcome.DROPPED, f"token_law_{law}") for n in range(SIBLINGS)]


@pytest.mark.parametrize("name", ENGINES)
async def test_what_an_engine_breaks(name):
    law, turn, crook = ENGINES[name]
    check(*await refused(await played(crook)), law, turn)


@pytest.mark.parametrize("name", RENDERERS)
async def test_what_a_renderer_breaks(name):
    law, turn, renderer = RENDERERS[name]
    check(*await refused(await played(renderer=renderer)), law, turn)


@pytest.mark.parametrize("name", SAMPLES)
async def test_what_goes_wrong_between_episodes_and_samples(name, monkeypatch):
    law, change = SAMPLES[name]

    def crooked(episode):
        samples = samples_of(episode)
        return change(samples) if episode.id == "g0-1" else samples

    monkeypatch.setattr(steps, "samples_of", crooked)
    is_of_a_sample = name in ("a sample twice", "no sample", "the sample of another episode")
    error, loop = await refused(await played())
    check(error, loop, law, 0 if is_of_a_sample else TURNS - 1)


async def test_an_agent_without_tokens_is_not_trained():
    error, loop = await refused(await played(agent=Speaker(*[say("x")] * TURNS)))
    check(error, loop, "tokens", 0)


async def test_what_breaks_no_law_passes():
    group = await played()
    laws, samples = TokenLaws(VOCAB), [s for episode in group.episodes for s in samples_of(episode)]
    laws.check_episodes([group], version=SERVED)
    laws.check_samples([group], samples)
    assert [turn.tokens.prompt_crc32 is None for turn in group.episodes[0].turns] == [False] * TURNS


async def test_versions_may_rise_and_rounding_is_no_violation():
    group = await played(changed(logprobs=floats(-1, 1e-6, -1)))
    TokenLaws(VOCAB).check_episodes([group], version=SERVED + 1)
