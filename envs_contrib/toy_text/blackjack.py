"""Blackjack: one hand against the dealer, cards drawn with replacement."""

from __future__ import annotations

from typing import cast

from agentrl import GymEnv, Limits

_STICK, _HIT = 0, 1
_RULES = """\
Get cards whose sum is closer to 21 than the dealer's without going above. Hit to be dealt one more,
stick to stop; the dealer then draws up to 17. Face cards count 10; an ace counts 11 where that does
not exceed 21, then it is usable, and else 1."""


class Blackjack(GymEnv):
    """Beat the dealer: come closer to 21, and not above it. A win is worth 1, a draw 0.5, a loss 0.

    The rules are those of Sutton and Barto, example 5.1. The scores are exact expectations over all
    cards, by recursion over the player's and the dealer's hands: of the expert, which plays basic
    strategy as far as hitting and sticking go, and of a player who does either with equal chance.
    """

    expert_score = 0.478
    chance_score = 0.303
    limits = Limits(max_turns=12, max_tokens=2048)
    inline = True

    def __init__(self) -> None:
        super().__init__(
            "Blackjack-v1",
            actions=("stick", "hit"),
            rules=_RULES,
            describe=_at_the_table,
            returns=(-1.0, 1.0),
        )

    def policy(self, observation: object) -> int:
        """Basic strategy (Baldwin et al., The optimum strategy in blackjack, 1956), hit or stick only."""
        total, dealer, usable = _hand(observation)
        if usable:
            return _STICK if total >= 19 or (total == 18 and 2 <= dealer <= 8) else _HIT
        if total >= 17:
            return _STICK
        weakest = 4 if total == 12 else 2
        return _STICK if total >= 12 and weakest <= dealer <= 6 else _HIT


def _hand(observation: object) -> tuple[int, int, int]:
    total, dealer, usable = cast(tuple[int, int, int], observation)
    return int(total), int(dealer), int(usable)


def _at_the_table(observation: object) -> str:
    total, dealer, usable = _hand(observation)
    ace = ", with a usable ace" if usable else ""
    return f"Your cards sum to {total}{ace}. The dealer shows {'an ace' if dealer == 1 else dealer}."
