"""Returns and generalised advantages along the trainable tokens of each episode.

The world's tokens between two turns are not steps and have no value: the last token of a turn is followed by
the policy's first token of the next turn. The value after the last token is 0, however the episode ended.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from agentrl.algorithms.tokens import Floats, Tokens

Discount = Literal["token", "turn"]
"""Where gamma and lambd apply: from each token to the next, or only where the next begins another turn."""


def discounted_returns(
    rewards_N: Floats, tokens: Tokens, *, gamma: float = 1.0, discount: Discount = "token"
) -> Floats:
    """The return from each token on, [N], in units of reward.

    return[n] = reward[n] + gamma x return[n + 1] inside an episode; with `discount = "turn"` gamma counts
    only where token n + 1 begins another turn.

    Takes O(N log L) operations of numpy, L being the longest episode, in log L passes.

    Raises:
        ValueError: gamma is not between 0 and 1.
    """
    return _scan(rewards_N, _decays(tokens, gamma, discount))


def gae(
    rewards_N: Floats,
    values_N: Floats,
    tokens: Tokens,
    *,
    gamma: float = 1.0,
    lambd: float = 1.0,
    discount: Discount = "token",
) -> tuple[Floats, Floats]:
    """Generalised advantages, and the returns that a critic learns from them, both [N], in units of reward.

    delta[n]     = reward[n] + gamma x value[n + 1] - value[n]
    advantage[n] = delta[n] + gamma x lambd x advantage[n + 1]
    return[n]    = advantage[n] + value[n]

    inside an episode; the value after its last token is 0. With `discount = "turn"` gamma and lambd count
    only where token n + 1 begins another turn: a turn is then one step, however many tokens it has. Source:
    https://arxiv.org/abs/1506.02438, equation 16. Cost as in `discounted_returns`.

    Args:
        rewards_N: of each token. values_N: the critic's prediction before each token.
        tokens: for the ends of episodes and turns.

    Raises:
        ValueError: gamma or lambd is not between 0 and 1.
    """
    _check_share("lambd", lambd)
    decays_N = _decays(tokens, gamma, discount)
    next_values_N = np.zeros_like(values_N)
    next_values_N[:-1] = values_N[1:]
    advantages_N = _scan(
        rewards_N + decays_N * next_values_N - values_N, _decays(tokens, gamma * lambd, discount)
    )
    return advantages_N, advantages_N + values_N


def _decays(tokens: Tokens, gamma: float, discount: Discount) -> Floats:
    """The factor on the next token's return, [N]; 0 at the end of an episode."""
    _check_share("gamma", gamma)
    decays_N = np.zeros(len(tokens))
    new_turn = np.diff(tokens.turn_N) != 0
    inside = gamma if discount == "token" else np.where(new_turn, gamma, 1.0)
    decays_N[:-1] = np.where(np.diff(tokens.rollout_index_N) == 0, inside, 0.0)
    return decays_N


def _scan(terms_N: Floats, decays_N: Floats) -> Floats:
    """y[n] = terms[n] + decays[n] x y[n + 1], by doubling.

    After k passes, sums[n] holds the terms n to n + 2^k - 1, and reach[n] is the factor on the sum at n +
    2^k. Products of decays only shrink, so nothing overflows, and there is no division.
    """
    sums, reach = terms_N.copy(), decays_N.copy()
    step = 1
    while step < len(sums) and np.any(reach):
        sums[:-step] += reach[:-step] * sums[step:]
        reach[:-step] *= reach[step:]
        reach[-step:] = 0.0
        step *= 2
    return sums


def _check_share(name: str, share: float) -> None:
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, got {share}")
