"""Retokenization drift: the sampled tokens that encoding the text again would change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentrl.rollout.group import GroupOutcome
from agentrl.run import drift
from agentrl.run.drift import drift_metrics
from agentrl.types import Group, Verdict
from tests.algorithms.episodes import TASK, episode, turn
from tests.laws.conversations import WORDS

TEXTS = {1: "a", 2: "b", 3: "ab", 4: "-", 5: "\ufffd"}
IDS = {text: id for id, text in TEXTS.items()}


class Toy:
    """Five tokens; encoding prefers the longer one. 6 is half of a letter, and decodes to a replacement."""

    def decode(self, ids):
        return "".join(TEXTS.get(id, "\ufffd") for id in ids)

    def encode(self, text):
        ids = []
        while text:
            size = 2 if text[:2] in IDS else 1
            ids.append(IDS[text[:size]])
            text = text[size:]
        return ids


def measured(*trajectories, tokenizer=None):
    """The metrics of one-episode groups, without their common name."""
    outcomes = []
    for number, turns in enumerate(trajectories):
        played = turns if hasattr(turns, "trajectories") else episode(f"e{number}", turns)
        verdicts = tuple(Verdict(played.id, "s", 0.0, agent=agent) for agent in played.agents)
        group = Group(f"g{number}", TASK, 0, (played,), verdicts)
        outcomes.append(GroupOutcome(group, (), (played,)))
    metrics = drift_metrics(outcomes, tokenizer or Toy(), seed="0")
    return {name.removeprefix("rollout/retokenization_drift/"): value for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("turns", "count"),
    [
        ([turn([4], [3, 4])], 0),
        ([turn([4], [1, 2, 4])], 2),
        # Across the border: the world's token is not counted.
        ([turn([1], [2, 4])], 1),
        ([turn([4], [1]), turn([2], [4, 4])], 1),
        # The world may encode as it likes.
        ([turn([1, 2], [4, 4])], 0),
        # After a difference both are aligned again.
        ([turn([4], [4, 1, 2, 4, 4, 4, 3, 3, 1, 2])], 4),
        ([turn([4], [6, 4, 4, 4])], 1),
    ],
)
def test_tokens_that_encoding_again_would_change_are_counted(turns, count):
    sampled = sum(len(turn.tokens.completion.token_ids) for turn in turns)
    expected = {"count": count, "ratio": count / sampled, "episode_ratio": float(count > 0)}
    assert measured(turns) == pytest.approx(expected)


def test_the_ratios_are_over_all_tokens_and_all_episodes():
    metrics = measured([turn([4], [1, 2])], [turn([4], [3, 4, 4, 4, 4, 4])])
    assert metrics == {"count": 2.0, "ratio": 0.25, "episode_ratio": 0.5}


def test_only_what_the_trained_policy_sampled_counts():
    played = episode("e", [turn([4], [1, 2])])
    (trajectory,) = played.trajectories
    frozen = replace(played, trajectories=(replace(trajectory, trainable=False),), frozen_agents=("agent",))
    assert measured(frozen) == {"count": 0.0, "ratio": 0.0, "episode_ratio": 0.0}
    assert measured() == {"count": 0.0, "ratio": 0.0, "episode_ratio": 0.0}


def test_a_bounded_number_of_episodes_and_tokens_is_measured_the_same_ones_each_time(monkeypatch):
    drifting, steady = [turn([4], [1, 2])], [turn([4], [3, 4])]
    many = [drifting] * 40 + [steady] * 60
    assert measured(*many) == measured(*many)
    assert measured(*[drifting] * 100)["count"] == 2 * drift.NUM_EPISODES
    monkeypatch.setattr(drift, "MAX_TOKENS", 4)
    assert measured(*[drifting] * 100)["count"] == 2


def test_a_real_tokenizer_drifts_exactly_where_the_split_is_not_its_own():
    for words in WORDS:
        own = words.ids("Kalor was born in Tirak")
        split = words.pieces("Kalor was born in Tirak", range(3, 7))
        assert own != split

        class Real:
            decode, encode = staticmethod(words.text), staticmethod(words.ids)

        prompt = words.ids("Where?\n")
        assert measured([turn(prompt, own)], tokenizer=Real)["count"] == 0
        first = next(n for n, (a, b) in enumerate(zip(own, split, strict=False)) if a != b)
        last = next(n for n, (a, b) in enumerate(zip(own[::-1], split[::-1], strict=False)) if a != b)
        assert measured([turn(prompt, split)], tokenizer=Real)["count"] == len(split) - first - last
