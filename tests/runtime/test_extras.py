"""Extra arrays: an engine's values for each token reach a loss unchanged, under any name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import agentrl
from agentrl.algorithms.config import AlgorithmConfig
from agentrl.algorithms.samples import samples_of
from agentrl.assembly.algorithm import build_algorithm, build_loss
from agentrl.engine.fake import FakeEngine
from agentrl.errors import ConfigError, UserError
from agentrl.losses import LossOutput, TokenOutputs, check_loss
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.trainer.batch import check_extras, micro_batches
from agentrl.trainer.loss_inputs import loss_inputs
from agentrl.types import Credit, Extra, ExtraSpec, Sample, Scores, TrainBatch, joined_extras
from agentrl.types.seams import Stops
from tests.algorithms.episodes import sample
from tests.trainer.tiny import VOCAB, qwen3, trainer
from tests.worlds import Parrot

EXPERTS = ExtraSpec("int16", (2,), fill=-1)
KEPT_IDS = ExtraSpec("int32", ragged=True)
COUNTS = st.lists(st.integers(0, 3), max_size=6)


@st.composite
def extras(draw):
    """A ragged extra of two columns, and a dense one of the same length."""
    counts = draw(COUNTS)
    values = draw(npst.arrays(np.int32, (sum(counts), 2)))
    offsets = np.cumsum([0, *counts])
    return Extra.ragged(values, offsets), Extra.dense(draw(npst.arrays(np.float32, (len(counts), 3))), fill=7)


def lists(extra):
    """The values of each token, by a loop over offsets."""
    if extra.offsets is None:
        return [value.tolist() for value in extra.values]
    return [extra.values[a:b].tolist() for a, b in zip(extra.offsets, extra.offsets[1:], strict=False)]


@given(st.lists(extras(), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_joining_and_taking_are_those_of_lists(drawn, rng):
    for form in (0, 1):
        parts = [pair[form] for pair in drawn]
        joined = Extra.joined(parts)
        expected = [value for part in parts for value in lists(part)]
        np.testing.assert_equal(lists(joined), expected)
        positions = [rng.randrange(len(expected)) for _ in range(5)] if expected else []
        np.testing.assert_equal(lists(joined.take(positions)), [expected[position] for position in positions])
        assert joined.take(positions).spec == joined.spec == parts[0].spec


@given(st.lists(st.tuples(st.booleans(), extras()), min_size=1, max_size=4))
def test_runs_that_lack_an_extra_are_filled(drawn):
    runs = [(len(dense), {"r": ragged, "d": dense} if has else {}) for has, (ragged, dense) in drawn]
    joined = joined_extras(runs)
    if not any(has for has, _ in drawn):
        assert joined == {}
        return
    filled = [[[]] * n if not own else lists(own["r"]) for n, own in runs]
    assert lists(joined["r"]) == [value for run in filled for value in run]
    filled = [[[7.0] * 3] * n if not own else lists(own["d"]) for n, own in runs]
    np.testing.assert_equal(lists(joined["d"]), [value for run in filled for value in run])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Extra.dense(["a"]), "holds numbers"),
        (lambda: Extra.dense(3), "one for each token"),
        (lambda: Extra.ragged([1, 2], [0, 1]), "end at its number"),
        (lambda: Extra.ragged([1, 2], [0, 2, 1, 2]), "never fall"),
        (lambda: Extra.joined([Extra.dense([1]), Extra.dense([1], fill=2)]), "must share dtype"),
    ],
)
def test_an_invalid_extra_is_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


class Spy:
    """A loss by path: weighs a token by the sum of its experts and the number of its kept ids."""

    extras: Mapping[str, ExtraSpec] = MappingProxyType({"experts": EXPERTS, "kept": KEPT_IDS})

    def __init__(self):
        self.calls = []

    def __call__(self, outputs, inputs):
        experts, kept = inputs.extras["experts"], inputs.extras["kept"]
        counts = torch.diff(kept.offsets)
        self.calls.append((experts.values, kept, counts))
        scale = experts.values.sum(1).to(outputs.logp_N) + counts.to(outputs.logp_N)
        terms = -inputs.weights_N * scale * outputs.logp_N
        return LossOutput(terms.sum(), {"scale": scale.sum().detach()})


spy = Spy()


def annotate(prompt, tokens):
    """Experts that encode the token, and as many kept ids as its remainder by 3."""
    ids = np.asarray(tokens, np.int64)
    counts = ids % 3
    kept = np.repeat(ids, counts)
    experts = np.stack([ids, ids + 1], axis=1).reshape(-1, 2)
    return {
        "experts": Extra.dense(experts.astype(np.int16), fill=-1),
        "kept": Extra.ragged(kept.astype(np.int32), np.concatenate([[0], np.cumsum(counts)])),
    }


class Letters:
    """Every letter is a token; a turn ends with an even one."""

    def stops(self, tools):
        return Stops((), tuple(range(0, VOCAB, 2)))

    def render(self, messages, tools):
        return [ord(letter) % VOCAB for message in messages for letter in message.text]

    def extend(self, seen, observation, tools):
        return self.render(observation, ())

    def parse(self, ids, tools, *, prompt_ids=()):
        return agentrl.call("echo", text=str(len(ids)))


async def played(n=6):
    """Episodes of a fake engine that annotates what it samples."""
    engine = FakeEngine(vocab_size=VOCAB, max_slots=8)
    engine.extras = annotate
    settings = SamplingSettings(max_response_len=5)
    env, task = Parrot, agentrl.Task.ask("t", "abc")
    agents = [TokenAgent(engine, Letters(), settings) for _ in range(n)]
    return [
        await agentrl.play(env(), agent, task, episode_id=f"e{k}", sampling_seed=k)
        for k, agent in enumerate(agents)
    ]


def test_check_loss_gives_a_loss_the_extras_that_it_declares():
    check_loss(Spy())
    with pytest.raises(KeyError):
        check_loss(lambda outputs, inputs: inputs.extras["experts"])
    loss = build_loss(AlgorithmConfig(custom_loss_function_path="tests.runtime.test_extras:spy"))
    assert loss is spy
    with pytest.raises(ConfigError, match="changes its inputs"):
        build_loss(AlgorithmConfig(custom_loss_function_path="tests.runtime.test_extras:careless"))


def careless(outputs, inputs):
    """Modifies its inputs."""
    inputs.extras["experts"].values.zero_()
    return LossOutput(-(inputs.weights_N * outputs.logp_N).sum(), {})


careless.extras = {"experts": EXPERTS}


def test_an_engine_without_a_used_extra_is_refused():
    with pytest.raises(UserError, match="uses the extra `experts`, the engine gives none"):
        check_extras([sample("e", [0, 1, 1])], Spy.extras)


@pytest.mark.parametrize("max_tokens", [12, 1000])
async def test_they_flow_from_a_completion_to_a_loss_by_path(max_tokens):
    episodes = await played()
    samples = tuple(sample for episode in episodes for sample in samples_of(episode))
    assert len(samples) == 6
    check_extras(samples, Spy.extras)
    batch = _batch(samples)
    recording = Spy()
    rows = micro_batches(samples, [sample.loss_mask for sample in samples], max_tokens)
    assert (len(rows) > 1) == (max_tokens == 12)
    for row in rows:
        inputs = loss_inputs(row, batch, torch.device("cpu"))
        tokens = torch.from_numpy(row.targets_N)
        values, offsets = inputs.extras["experts"].values, inputs.extras["kept"].offsets
        assert values.dtype is torch.int16
        assert torch.equal(values.long(), torch.stack([tokens, tokens + 1], dim=1))
        assert torch.equal(torch.diff(offsets), tokens % 3)
        assert torch.equal(inputs.extras["kept"].values.long(), tokens.repeat_interleave(tokens % 3))
        output = recording(_outputs(len(tokens)), inputs)
        assert float(output.metrics["scale"]) == float((2 * tokens + 1 + tokens % 3).sum())


def _outputs(n):
    return TokenOutputs(torch.zeros(n, requires_grad=True), torch.zeros(n))


def _batch(samples: tuple[Sample, ...]) -> TrainBatch:
    ones = tuple(sample.loss_mask.astype(np.float32) for sample in samples)
    return TrainBatch(samples, Scores(tuple(sample.logprobs for sample in samples)), Credit(ones, ones))


async def test_a_trainer_learns_with_them():
    """From engine to trainer, through episodes and samples, independent of the names."""
    algorithm = build_algorithm(
        AlgorithmConfig(custom_loss_function_path="tests.runtime.test_extras:spy"), max_length=16
    )
    samples = tuple(sample for episode in await played() for sample in samples_of(episode))
    spy.calls.clear()
    report = await trainer(qwen3(torch.float32), loss=algorithm.loss).update(_batch(samples))
    tokens = torch.cat(
        [torch.from_numpy(sample.token_ids[sample.loss_mask].astype(np.int64)) for sample in samples]
    )
    expected = float((2 * tokens + 1 + tokens % 3).double().mean())
    assert report.metrics["train/scale"] == pytest.approx(expected)
    assert sum(len(experts) for experts, _, _ in spy.calls) == len(tokens)
