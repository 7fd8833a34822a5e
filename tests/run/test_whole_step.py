"""A whole iteration against an oracle from scratch: rewards to gradients, in loops over tokens.

What counts and what does not is the point: advantages are whitened over the rollout batch, weights divide by
everything that was played for an optimizer step, and old logprobs are those that the batch began with.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import exp
from statistics import fmean, pstdev, stdev

import numpy as np
import pytest

from agentrl.algorithms.advantages import Advantages
from agentrl.algorithms.config import AlgorithmConfig
from agentrl.algorithms.corrections import CorrectionWatch
from agentrl.assembly.algorithm import build_algorithm
from agentrl.errors import UserError
from agentrl.rollout.batch_functions import BatchFunctions
from agentrl.run.journal_entries import iteration_entries
from agentrl.run.loop import Loop
from agentrl.types import Ending, RolloutId
from agentrl.weights.hf.source import Operations
from tests.run.tables import POLICY, STEP_SIZE, VALUES, VOCABULARY, TableTrainer, episodes_of, producer_of

MAX_LENGTH = 20
LIKELY = -1.6
GROUPS = [
    episodes_of("a", [1.0, 0.0, 0.5], seed=10),
    episodes_of("b", [1.0, 1.0], seed=11),
    episodes_of("c", [0.0, 1.0], seed=12),
    episodes_of("d", [0.0, 0.0, 0.0], seed=13),
    episodes_of("e", [0.25, 1.0, 0.0], seed=14),
    episodes_of("f", [0.5, 0.5], seed=15),
    episodes_of("g", [0.0, 2.0], seed=16),
]
# By hand: a, c, e, g have signal; b, d, f fill the smallest step up.
STEPS = {1: ["abcdefg"], 2: ["abcf", "deg"], 3: ["abf", "cd", "eg"]}


def run_of(config, num_steps, batches=(GROUPS,)):
    algorithm = build_algorithm(config, max_length=MAX_LENGTH)
    trainer = TableTrainer(algorithm.loss)
    producer = producer_of(batches)
    return Loop(
        producer=producer,
        trainer=trainer,
        algorithm=algorithm,
        sink=object(),
        num_steps=num_steps,
        num_epochs=config.ppo_epochs,
    )


async def gradients_of(num_steps, **settings):
    loop = run_of(AlgorithmConfig(**settings), num_steps)
    await loop.iterate(0)
    return loop.trainer.gradients


# The oracle: an episode is a list of (token before, token); everything else is a loop.


def episodes(groups):
    for group in groups:
        totals = [verdict.total for verdict in group.verdicts]
        for played, total in zip(group.episodes, totals, strict=True):
            yield group.id, totals, total, pairs_of([turn.tokens for turn in played.turns])


def cut_off(group):
    """Its first episode was truncated."""
    first, *others = group.episodes
    return replace(group, episodes=(replace(first, ending=Ending.TRUNCATED), *others))


def pairs_of(turns):
    pairs, before = [], None
    for turn in turns:
        before = turn.world_ids.tolist()[-1]
        for token in turn.completion.token_ids.tolist():
            pairs.append((before, token))
            before = token
    return pairs


def outcome(name, total, totals):
    centred = total - fmean(totals)
    if name == "grpo":
        return centred / (stdev(totals) + 1e-6)
    return centred * len(totals) / (len(totals) - 1) if name == "rloo" else centred


def advantages(name, groups, gamma, lambd, whitened):
    advantages = []
    endings = [played.ending for group in groups for played in group.episodes]
    for (_, totals, total, pairs), ending in zip(episodes(groups), endings, strict=True):
        rewards = [0.0] * len(pairs)
        rewards[-1] = total
        if ending is Ending.TRUNCATED:
            rewards[-1] += gamma * VALUES[pairs[-1][1]]
        if name in ("ppo", "reinforce_plus_plus"):
            values = [VALUES[before] if name == "ppo" else 0.0 for before, _ in pairs] + [0.0]
            later, backwards = 0.0, []
            for n in reversed(range(len(pairs))):
                decay = gamma if n + 1 < len(pairs) else 0.0
                later = rewards[n] + decay * values[n + 1] - values[n] + decay * lambd * later
                backwards.append(later)
            advantages.append(backwards[::-1])
        else:
            advantages.append([outcome(name, total, totals)] * len(pairs))
    if whitened:
        flat = [a for row in advantages for a in row]
        advantages = [[(a - fmean(flat)) / (pstdev(flat) + 1e-8) for a in row] for row in advantages]
    return advantages


def log_softmax(table, before, token):
    row = table[before] - table[before].max()
    return row[token] - np.log(np.exp(row).sum())


def weight(kind, played, n):
    """Of a token of an episode of n tokens, among all that was played for the step."""
    tokens = sum(len(pairs) for *_, pairs in played)
    return {
        "token": 1 / tokens,
        "sample": 1 / (len(played) * max(n, 1)),
        "rollout": 1 / (len(played) * max(n, 1)),
        "constant": 1 / (len(played) * MAX_LENGTH),
    }[kind]


def of_token(table, old, pair, share, advantage, eps):
    """The gradient of a clipped term by the logits of its row; 0 where the loss stops following it."""
    before, token = pair
    ratio = exp(log_softmax(table, before, token) - log_softmax(old, before, token))
    bounded = min(max(ratio, 1 - eps[0]), 1 + eps[1])
    if -advantage * ratio < -advantage * bounded:
        return np.zeros(VOCABULARY)
    slope = -share * advantage * ratio
    row = np.array([-slope * exp(log_softmax(table, before, k)) for k in range(VOCABULARY)])
    row[token] += slope
    return row


def of_step(members, table, old, kind, eps, removed=()):
    gradient = np.zeros((VOCABULARY, VOCABULARY))
    for number, ((*_, pairs), credit) in enumerate(members):
        if number in removed:
            continue
        share = weight(kind, [rollout for rollout, _ in members], len(pairs))
        for pair, advantage in zip(pairs, credit, strict=True):
            gradient[pair[0]] += of_token(table, old, pair, share, advantage, eps)
    return gradient


def naive_gradients(name, kind, steps, *, gamma=1.0, lambd=1.0, whitened=False, eps=(0.2, 0.28)):
    table, old = POLICY.copy(), POLICY.copy()
    by_episode = advantages(name, GROUPS, gamma, lambd, whitened)
    everyone = list(zip(episodes(GROUPS), by_episode, strict=True))
    gradients = []
    for step in steps:
        members = [(member, credit) for member, credit in everyone if member[0] in step]
        gradients.append(of_step(members, table, old, kind, eps))
        table = table - STEP_SIZE * gradients[-1]
    return gradients


CASES = {
    "grpo": ("grpo", "token", {}, {}),
    "grpo by rollouts": ("grpo", "rollout", {"loss_weighting": "rollout"}, {}),
    "dr_grpo": ("dr_grpo", "constant", {}, {}),
    "rloo by samples": ("rloo", "sample", {"loss_weighting": "sample"}, {}),
    "grpo whitened": (
        "grpo",
        "constant",
        {"normalize_advantages": True, "loss_weighting": "constant"},
        {"whitened": True},
    ),
    "reinforce_plus_plus": ("reinforce_plus_plus", "token", {"gamma": 0.9}, {"gamma": 0.9, "whitened": True}),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", "token", {}, {"whitened": True}),
    "grpo in epochs": ("grpo", "token", {"ppo_epochs": 3}, {}),
    "ppo": ("ppo", "token", {"gamma": 0.9, "lambd": 0.8}, {"gamma": 0.9, "lambd": 0.8, "whitened": True}),
}


@pytest.mark.parametrize("num_steps", STEPS)
@pytest.mark.parametrize("case", CASES)
async def test_every_gradient_of_an_iteration_is_the_oracles(case, num_steps):
    name, kind, settings, options = CASES[case]
    gradients = await gradients_of(
        num_steps, advantage_estimator=name, use_rollout_logprobs=False, **settings
    )
    expected = naive_gradients(name, kind, STEPS[num_steps] * settings.get("ppo_epochs", 1), **options)
    assert len(gradients) == len(expected)
    for actual, desired in zip(gradients, expected, strict=True):
        assert np.linalg.norm(actual - desired) <= 2e-6 * np.linalg.norm(desired)


@pytest.mark.parametrize("bootstrap", [False, True])
async def test_an_episode_that_was_cut_off_is_credited_with_what_the_critic_expects_to_follow(bootstrap):
    groups = [cut_off(group) for group in GROUPS]
    config = AlgorithmConfig(advantage_estimator="ppo", gamma=0.9, lambd=0.8, bootstrap_truncated=bootstrap)
    loop = run_of(config, 1, (groups,))
    iteration = await loop.iterate(0)
    expected = advantages("ppo", groups if bootstrap else GROUPS, 0.9, 0.8, True)
    other = advantages("ppo", GROUPS if bootstrap else groups, 0.9, 0.8, True)
    ids = [verdict.rollout_id for group in groups for verdict in group.verdicts]
    rows = [iteration.advantages[id] for id in ids]
    actual = [np.broadcast_to(own, len(row)) for own, row in zip(rows, expected, strict=True)]
    assert np.concatenate(actual) == pytest.approx(np.concatenate(expected), abs=1e-5)
    assert not np.allclose(np.concatenate(expected), np.concatenate(other), atol=1e-2)


async def test_the_oracle_clips_and_tells_the_cases_apart():
    # With one step no ratio leaves 1; with three, some are beyond the bounds.
    wide = naive_gradients("grpo", "token", STEPS[3], eps=(0.99, 99.0))
    narrow = naive_gradients("grpo", "token", STEPS[3], eps=(1e-3, 1e-3))
    assert not np.allclose(wide[-1], narrow[-1])
    lasts = [
        naive_gradients(n, kind, STEPS[2] * settings.get("ppo_epochs", 1), **options)[-1]
        for n, kind, settings, options in CASES.values()
    ]
    assert not any(np.allclose(a, b, rtol=1e-3, atol=1e-6) for i, a in enumerate(lasts) for b in lasts[:i])


NEARLY_NOTHING = {
    "entropy": {"entropy_coef": 1e-12},
    "a reference": {"use_kl_loss": True, "kl_loss_coef": 1e-12},
}


@pytest.mark.parametrize("term", NEARLY_NOTHING)
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl", "gspo", "cispo"])
async def test_what_a_batch_does_changes_as_little_as_a_coefficient(name, term):
    settings = {"advantage_estimator": name, "use_rollout_logprobs": False}
    without = await gradients_of(2, **settings)
    nearly = await gradients_of(2, **settings, **NEARLY_NOTHING[term])
    for actual, desired in zip(without, nearly, strict=True):
        assert np.linalg.norm(actual - desired) <= 1e-9 * np.linalg.norm(actual)


@pytest.mark.parametrize("kind", ["token", "sample", "rollout", "constant"])
async def test_a_rollout_that_a_filter_takes_out_counts_everywhere_but_in_the_loss(kind):
    """a.0, all of c and g.1: their advantages and denominators stay, their terms do not."""
    removed = {"a.0": "long", "c.0": "long", "c.1": "odd", "g.1": "long"}
    settings = {"advantage_estimator": "grpo", "use_rollout_logprobs": False, "loss_weighting": kind}
    # An entropy bonus of nearly nothing: groups without an advantage are in the loss, too.
    loop = replace(
        run_of(AlgorithmConfig(**settings, entropy_coef=1e-12), 1),
        functions=BatchFunctions(lambda groups: {RolloutId(id): reason for id, reason in removed.items()}),
    )
    iteration = await loop.iterate(0)
    everyone = list(zip(episodes(GROUPS), advantages("grpo", GROUPS, 1.0, 1.0, False), strict=True))
    ids = [episode.id for group in GROUPS for episode in group.episodes]
    out = [number for number, id in enumerate(ids) if id in removed]
    expected = of_step(everyone, POLICY, POLICY, kind, (0.2, 0.28), out)
    assert np.linalg.norm(loop.trainer.gradients[0] - expected) <= 2e-6 * np.linalg.norm(expected)
    assert not {rollout.episode for rollout in loop.trainer.updated[0]} & set(removed)
    assert {rollout.episode for rollout in loop.trainer.scored} >= set(removed)
    assert [group.id for group in iteration.dropped] == ["c"]
    reasons = {entry.episode.id: entry.reason for entry in iteration_entries(iteration)}
    assert {id: reason for id, reason in reasons.items() if reason} == {
        id: f"sample_filter/{reason}" for id, reason in removed.items()
    }
    assert iteration.metrics["rollout/sample_filter/drop_long"] == 3
    assert iteration.metrics["rollout/sample_filter/drop_odd"] == 1


@pytest.mark.parametrize("case", ["grpo", "ppo", "reinforce_plus_plus_baseline"])
async def test_the_journal_has_the_advantages_that_were_trained_on(case):
    name, _, settings, options = CASES[case]
    config = AlgorithmConfig(advantage_estimator=name, use_rollout_logprobs=False, **settings)
    entries = {e.episode.id: e for e in iteration_entries(await run_of(config, 2).iterate(0))}
    values = {"gamma": 1.0, "lambd": 1.0, "whitened": False, **options}
    ids = [episode.id for group in GROUPS for episode in group.episodes]
    for id, expected in zip(ids, advantages(name, GROUPS, **values), strict=True):
        if entries[id].reason == "zero_std" and name != "ppo":
            continue
        recorded = entries[id].advantages["agent"]
        assert len(recorded) in (1, len(expected))
        np.testing.assert_allclose(np.broadcast_to(recorded, len(expected)), expected, rtol=1e-5, atol=1e-6)


def every_other(groups, samples):
    """Every second token of an episode stays in the loss, the first of them in any case."""
    kept = []
    for sample in samples:
        mask = np.zeros(len(sample), bool)
        mask[np.flatnonzero(sample.loss_mask)[::2]] = True
        kept.append(replace(sample, loss_mask=mask))
    return kept


@pytest.mark.parametrize("kind", ["token", "sample", "rollout", "constant"])
async def test_a_token_that_a_conversion_takes_out_counts_nowhere_and_the_journal_has_0_for_it(kind):
    settings = {"advantage_estimator": "grpo", "use_rollout_logprobs": False, "loss_weighting": kind}
    loop = replace(run_of(AlgorithmConfig(**settings), 1), functions=BatchFunctions(convert=every_other))
    iteration = await loop.iterate(0)
    members = [
        ((*member[:3], member[3][::2]), credit[::2])
        for member, credit in zip(episodes(GROUPS), advantages("grpo", GROUPS, 1.0, 1.0, False), strict=True)
    ]
    expected = of_step(members, POLICY, POLICY, kind, (0.2, 0.28))
    assert np.linalg.norm(loop.trainer.gradients[0] - expected) <= 2e-6 * np.linalg.norm(expected)
    others = of_step(
        list(zip(episodes(GROUPS), advantages("grpo", GROUPS, 1.0, 1.0, False), strict=True)),
        *(POLICY, POLICY, kind, (0.2, 0.28)),
    )
    assert np.linalg.norm(others - expected) > 0.1 * np.linalg.norm(expected)

    entries = {e.episode.id: e for e in iteration_entries(iteration)}
    for (_, _, _, pairs), (_, credit) in zip(episodes(GROUPS), members, strict=True):
        assert len(pairs) >= len(credit)
    entry, credit = entries["a.0"], members[0][1]
    length = len(next(episodes(GROUPS))[3])
    assert length > 1
    expected_row = [credit[n // 2] if n % 2 == 0 else 0.0 for n in range(length)]
    np.testing.assert_allclose(entry.advantages["agent"], expected_row, rtol=1e-5)


def likely(samples, scores):
    """The tokens that the policy finds likely stay in the loss; the engine's logprobs are others."""
    return [
        replace(s, loss_mask=s.loss_mask & (p > LIKELY))
        for s, p in zip(samples, scores.proximal, strict=True)
    ]


@pytest.mark.parametrize("kind", ["token", "constant"])
@pytest.mark.parametrize("num_steps", [1, 2])
async def test_a_token_that_is_taken_out_by_its_scores_counts_nowhere(kind, num_steps):
    path = "tests.run.test_whole_step:likely"
    config = AlgorithmConfig(
        advantage_estimator="grpo", loss_weighting=kind, rollout_data_postprocess_path=path
    )
    loop = run_of(config, num_steps)
    iteration = await loop.iterate(0)
    table, everyone = POLICY.copy(), []
    for member, credit in zip(episodes(GROUPS), advantages("grpo", GROUPS, 1.0, 1.0, False), strict=True):
        left = [n for n, pair in enumerate(member[3]) if log_softmax(POLICY, *pair) > LIKELY]
        pairs = [member[3][n] for n in left]
        everyone.append(((*member[:3], pairs), [credit[n] for n in left]))
    sizes = [len(pairs) for (*_, pairs), _ in everyone]
    assert 0 < sum(sizes) < sum(len(pairs) for *_, pairs in episodes(GROUPS))
    for step, actual in zip(STEPS[num_steps], loop.trainer.gradients, strict=True):
        members = [(member, credit) for member, credit in everyone if member[0] in step]
        expected = of_step(members, table, POLICY, kind, (0.2, 0.28))
        assert np.linalg.norm(actual - expected) <= 2e-6 * np.linalg.norm(expected)
        table = table - STEP_SIZE * expected
    entries = {e.episode.id: e for e in iteration_entries(iteration)}
    recorded, length = entries["a.0"].advantages["agent"], len(next(episodes(GROUPS))[3])
    assert np.count_nonzero(np.broadcast_to(recorded, length)) == sizes[0]


async def test_a_post_processing_that_fails_names_itself():
    loop = run_of(AlgorithmConfig(), 1)
    algorithm = replace(
        loop.algorithm, post_process=lambda samples, scores: samples[1:], is_idle=lambda group: False
    )
    with pytest.raises(UserError, match=r"the post-processing of data failed .*one for each, not"):
        await replace(loop, algorithm=algorithm).iterate(0)


async def test_a_function_of_a_batch_that_fails_names_itself():
    def lost(groups, samples):
        return samples[1:]

    loop = replace(run_of(AlgorithmConfig(), 1), functions=BatchFunctions(convert=lost))
    with pytest.raises(UserError, match=r"the conversion of samples failed .*one for each, not"):
        await loop.iterate(0)
    refuses = BatchFunctions(after_publishing=lambda report: 1 / 0)
    loop = replace(run_of(AlgorithmConfig(), 1), functions=refuses)
    with pytest.raises(UserError, match=r"the function after publishing failed .*ZeroDivisionError"):
        await loop.iterate(0)


async def test_a_function_hears_of_each_version_that_is_served():
    heard = []

    async def hear(report):
        heard.append(report.version)

    batches = (ALIKE, APART, ALIKE, APART)
    loop = replace(
        run_of(AlgorithmConfig(use_rollout_logprobs=False), 1, batches=batches),
        functions=BatchFunctions(after_publishing=hear),
    )
    for step in range(4):
        await loop.iterate(step)
    assert heard == loop.trainer.versions == [1, 2]


async def test_a_filter_that_fails_ends_the_run_with_a_sentence():
    nobody = BatchFunctions(lambda groups: {RolloutId("nobody"): "x"})
    loop = replace(run_of(AlgorithmConfig(), 1), functions=nobody)
    with pytest.raises(UserError, match=r"the rollout sample filter failed .*no rollout of the batch"):
        await loop.iterate(0)


async def test_a_group_without_signal_counts_and_costs_no_forward_pass():
    loop = run_of(AlgorithmConfig(advantage_estimator="dr_grpo", use_rollout_logprobs=False), 2)
    iteration = await loop.iterate(0)
    updated = {rollout for rollouts in loop.trainer.updated for rollout in rollouts}
    trained = {e.id for g in iteration.trained for e in g.episodes}
    assert [g.id for g in iteration.trained] == ["a", "c", "e", "g"]
    assert [g.id for g in iteration.dropped] == ["b", "d", "f"]
    assert len(updated) == len(set(loop.trainer.scored)) == len(trained)
    assert iteration.metrics["rollout/zero_std/ratio"] == pytest.approx(3 / 7)
    reasons = {e.episode.id[0]: e.reason for e in iteration_entries(iteration)}
    assert reasons == {**dict.fromkeys("aceg", ""), **dict.fromkeys("bdf", "zero_std")}


@pytest.mark.parametrize(("low", "warned"), [(0.0, [False, True, False]), (0.9, [False] * 3)])
async def test_a_correction_that_never_acts_is_a_warning_of_the_iteration_that_sees_it(low, warned):
    config = AlgorithmConfig(correction="tis", tis_clip=1e9, tis_clip_low=low)
    loop = replace(run_of(config, 3), watch=CorrectionWatch(config.correction.name, patience=6))
    sentences = [(await loop.iterate(step)).warnings for step in range(3)]
    assert [bool(sentence) for sentence in sentences] == warned


ALIKE = [episodes_of("p", [1.0, 1.0], seed=20), episodes_of("q", [0.0, 0.0], seed=21)]
APART = [episodes_of("r", [1.0, 0.0], seed=22), episodes_of("s", [0.0, 1.0], seed=23)]


async def test_nothing_is_published_where_nothing_was_updated_and_the_run_goes_on():
    loop = run_of(AlgorithmConfig(use_rollout_logprobs=False), 1, batches=(ALIKE, APART, ALIKE, APART))
    iterations = [await loop.iterate(step) for step in range(4)]
    assert loop.trainer.versions == [1, 2]
    assert loop.producer.version == 2
    # The version that a group was played against is the one that served.
    assert loop.producer.played == [*zip("pqrspqrs", [0, 0, 0, 0, 1, 1, 1, 1], strict=True)]
    assert [i.metrics["train/optimizer_steps"] for i in iterations] == [0, 1, 0, 1]
    assert [i.metrics["perf/update_weights_bytes"] for i in iterations] == [0, 1, 0, 1]
    assert ["train/loss" in i.metrics for i in iterations] == [False, True, False, True]
    assert sum(map(len, loop.trainer.updated)) == 2 * sum(len(group.episodes) for group in APART)


async def test_a_step_without_a_gradient_is_left_out_and_the_others_are_taken():
    batch = [*ALIKE, APART[0]]
    loop = run_of(AlgorithmConfig(use_rollout_logprobs=False), 3, batches=(batch,))
    iteration = await loop.iterate(0)
    assert iteration.metrics["train/optimizer_steps"] == 1
    assert [g.id for g in iteration.trained] == ["r"]


async def test_groups_with_signal_and_without_advantages_are_accounted_for():
    algorithm = build_algorithm(AlgorithmConfig(), max_length=MAX_LENGTH)
    nothing = replace(algorithm, estimator=lambda g, t, s: Advantages(np.zeros(len(t))))
    loop = replace(run_of(AlgorithmConfig(), 1, batches=(APART,)), algorithm=nothing)
    iteration = await loop.iterate(0)
    assert loop.trainer.gradients == []
    assert {entry.reason for entry in iteration_entries(iteration)} == {"zero_advantage"}


@pytest.mark.parametrize("peak", [None, 4e12])
async def test_operations_are_told_as_a_share_of_what_a_rank_can_do(peak):
    loop = run_of(AlgorithmConfig(), 2)
    operations = Operations(matrices=2_000_000, head=3_000_000, scores=5)
    loop = replace(loop, operations=operations, ranks=2, peak=peak, clock=itertools.count().__next__)
    metrics = (await loop.iterate(0)).metrics
    assert metrics["perf/actor_train_tflops"] > 0
    share = None if peak is None else pytest.approx(metrics["perf/actor_train_tflops"] / 4, rel=1e-9)
    assert metrics.get("perf/actor_train_mfu") == share
