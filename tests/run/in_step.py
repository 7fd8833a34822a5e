"""Batches of a tiny model as another engine sampled them, loops over them, and their factors in float64."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import numpy as np
import torch

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.assembly.algorithm import build_algorithm
from agentrl.run.loop import Loop
from agentrl.types import Group, Trajectory
from tests.run.tables import producer_of
from tests.run.test_whole_step import MAX_LENGTH, advantages, episodes, weight
from tests.trainer.tiny import gradients_of, trainer

ASYNCHRONOUS = 2


def rescored(group: Group, logprobs_of) -> Group:
    """The group with other logprobs of the engine. logprobs_of: of all tokens of a trajectory."""

    def of(trajectory: Trajectory) -> Trajectory:
        spans = [
            part for t in trajectory.turns for part in (t.tokens.world_ids, t.tokens.completion.token_ids)
        ]
        values, at, turns = logprobs_of(np.concatenate(spans)), 0, []
        for played in trajectory.turns:
            start = at + len(played.tokens.world_ids)
            at = start + len(played.tokens.completion.token_ids)
            completion = replace(played.tokens.completion, logprobs=values[start:at].astype(np.float32))
            turns.append(replace(played, tokens=replace(played.tokens, completion=completion)))
        return replace(trajectory, turns=tuple(turns))

    episodes = [replace(e, trajectories=tuple(map(of, e.trajectories))) for e in group.episodes]
    return replace(group, episodes=tuple(episodes))


def logprobs(model, ids) -> torch.Tensor:
    """[T], the first of which is 0."""
    token_ids = torch.tensor(np.asarray(ids, dtype=np.int64))
    logp_TV = torch.log_softmax(model(input_ids=token_ids[None], use_cache=False).logits[0, :-1], -1)
    chosen_T = logp_TV.gather(1, token_ids[1:, None])[:, 0]
    return torch.cat([torch.zeros(1, dtype=chosen_T.dtype), chosen_T])


def near(model, groups, spread: float, drift: float = 0.0) -> list[Group]:
    """The groups with the logprobs of an engine that are off by `spread`, and `drift` lower."""
    draw = np.random.default_rng(5)

    def noisy(ids):
        with torch.no_grad():
            return np.minimum(logprobs(model, ids).numpy() + draw.normal(-drift, spread, len(ids)), 0.0)

    return [rescored(group, noisy) for group in groups]


def split(group: Group) -> Group:
    """Every turn of its episodes is a trajectory, and so a sample, of its own."""
    return replace(
        group,
        episodes=tuple(
            replace(
                e, trajectories=tuple(replace(t, turns=(turn,)) for t in e.trajectories for turn in t.turns)
            )
            for e in group.episodes
        ),
    )


class Noting:
    """A trainer that counts the samples it scores in the role `old`."""

    def __init__(self, inner):
        self._inner, self.num_scored, self.updates = inner, 0, 0

    async def score(self, samples, roles=("old",), *, statistics=False):
        self.num_scored += len(samples) * ("old" in roles)
        return await self._inner.score(samples, roles, statistics=statistics)

    async def update(self, batch):
        self.updates += 1
        return await self._inner.update(batch)


async def iterations(model, groups, settings, *, in_step=True, num=1, lr=1e-2, **options):
    """Iterations of a loop over the same batch, its trainer and the gradient of the last step."""
    algorithm = build_algorithm(
        AlgorithmConfig(**settings), max_length=MAX_LENGTH, max_staleness=ASYNCHRONOUS
    )
    if not in_step:
        algorithm = replace(algorithm, uncorrected=None)
    inner = trainer(model, algorithm.loss, lr=lr, weight_decay=0.1, max_tokens_per_gpu=17)
    loop = Loop(producer_of([groups]), Noting(inner), algorithm, None, **{"num_steps": 1, **options})
    with gradients_of(model) as gradients:
        done = [await loop.iterate(step) for step in range(num)]
    return done, loop.trainer, gradients


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def distance(actual, expected) -> float:
    return float((flat(actual) - flat(expected)).norm() / flat(expected).norm())


# The factors of a sequence, from its log-ratios: loops in float64.


def bounded(low, high, mode):
    def factor(ratio):
        if mode == "mask":
            return ratio if low <= ratio <= high else 0.0
        return min(max(ratio, low if mode == "clip" else 0.0), high)

    return factor


def by_token(factor):
    return lambda gaps: [factor(exp(gap)) for gap in gaps]


def mis(level, mode, low, high, veto=None):
    factor = bounded(low, high, mode)

    def factors(gaps):
        whole = sum(gaps) / (len(gaps) if level == "geometric" else 1)
        ratios = [exp(gap if level == "token" else whole) for gap in gaps]
        if veto is not None and any(exp(gap) < veto for gap in gaps):
            return [0.0 for _ in gaps]
        return [factor(ratio) for ratio in ratios]

    return factors


def gated(statistic, over, low, high, weigh=lambda gaps: [1.0 for _ in gaps]):
    of = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: exp(d) - 1 - d}[statistic]

    def factors(gaps):
        values = [of(gap) for gap in gaps]
        whole = {"mean": sum(values) / len(values), "sum": sum(values), "max": max(values)}
        is_open = [low <= (value if over == "token" else whole[over]) <= high for value in values]
        return [factor * kept for factor, kept in zip(weigh(gaps), is_open, strict=True)]

    return factors


CORRECTIONS = {
    "tis": ({"correction": "tis", "tis_clip": 1.1, "tis_clip_low": 0.9}, by_token(bounded(0.9, 1.1, "clip"))),
    "icepop": (
        {"correction": "icepop", "icepop_low": 0.8, "icepop_high": 1.2},
        by_token(bounded(0.8, 1.2, "mask")),
    ),
    "veto": (
        {
            "correction": "mis",
            "mis_level": "token",
            "mis_mode": "truncate",
            "mis_upper": 1.2,
            "mis_veto": 0.8,
        },
        mis("token", "truncate", 0.0, 1.2, 0.8),
    ),
    "tis and a gate": (
        {
            "correction": "tis",
            "tis_clip": 1.1,
            "gate_statistic": "k3",
            "gate_over": "max",
            "gate_upper": 0.05,
        },
        gated("k3", "max", 0.0, 0.05, by_token(bounded(0.0, 1.1, "truncate"))),
    ),
    "none": ({"accept_bias": True}, lambda gaps: [1.0 for _ in gaps]),
}
for _level in ("token", "sequence", "geometric"):
    for _mode in ("truncate", "clip", "mask"):
        _settings = {"correction": "mis", "mis_level": _level, "mis_mode": _mode, "mis_upper": 1.2}
        if _mode != "truncate":
            _settings["mis_lower"] = 0.8
        CORRECTIONS[f"mis {_level} {_mode}"] = (_settings, mis(_level, _mode, 0.8, 1.2))
for _statistic, _upper in (("k1", 0.05), ("k2", 0.01), ("k3", 0.01)):
    for _over in ("token", "mean", "sum", "max"):
        _bound = 4 * _upper if _over == "sum" else _upper
        CORRECTIONS[f"gate {_statistic} {_over}"] = (
            {"gate_statistic": _statistic, "gate_over": _over, "gate_upper": _bound},
            gated(_statistic, _over, -_bound if _statistic == "k1" else 0.0, _bound),
        )


def expected_gradient(model, groups, factors_of):
    """Of -sum of weight x factor x advantage x ratio, at the ratio 1: episode by episode, token by token."""
    model.zero_grad()
    rollouts = list(episodes(groups))
    credit = advantages("grpo", groups, 1.0, 1.0, False)
    played = [e for group in groups for e in group.episodes]
    total = torch.zeros((), dtype=torch.float64)
    for episode, (*_, pairs), advantages_N in zip(played, rollouts, credit, strict=True):
        (trajectory,) = episode.trajectories
        ids, logps, engine, at = [], [], [], 0
        for turn in trajectory.turns:
            ids += [*turn.tokens.world_ids.tolist(), *turn.tokens.completion.token_ids.tolist()]
        logp_T = logprobs(model, ids)
        for turn in trajectory.turns:
            start = at + len(turn.tokens.world_ids)
            at = start + len(turn.tokens.completion.token_ids)
            logps += [logp_T[t] for t in range(start, at)]
            engine += turn.tokens.completion.logprobs.tolist()
        gaps = [logp.item() - other for logp, other in zip(logps, engine, strict=True)]
        share = weight("token", rollouts, len(pairs))
        for logp, factor, advantage in zip(logps, factors_of(gaps), advantages_N, strict=True):
            total = total - share * factor * advantage * logp
    total.backward()
    gradient = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return gradient
