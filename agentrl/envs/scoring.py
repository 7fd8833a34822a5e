"""From what happened to what it was worth. Scoring stands beside the episode, never inside it."""

from __future__ import annotations

import re
import string

from agentrl.types import Episode, Verdict

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def sum_of_steps(episode: Episode) -> Verdict:
    """The environment's own score: the sum of its step rewards.

    An episode that a limit cut short before any reward is worth 0.0: not solving a task
    in time is an outcome of the policy, not a missing measurement.
    """
    given = [reward for reward in episode.step_rewards if reward is not None]
    return Verdict(episode.id, "env", float(sum(given)), turn_rewards=episode.step_rewards)


def squad_normalize(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces (SQuAD, arXiv:1606.05250)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(given: str, gold: str | None) -> float:
    """1.0 where both are the same after `squad_normalize`, else 0.0."""
    return float(gold is not None and squad_normalize(given) == squad_normalize(gold))
