"""The experts that tokens were routed to: from the pass of an engine to the pass of a trainer.

A token is routed in the pass that it is an input of, so the token that was sampled last has no experts yet:

    prompt w0 w1 w2, sampled p3 p4 p5        the engine knows the experts of w0 w1 w2 p3 p4
    prompt w0 .. p5 w6 w7, sampled p8 p9     the next turn asks for no more than those of p5 w6 w7 p8

A completion has those of what it sampled in `extras`, and those of the end of its prompt in `prompt_extras`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from agentrl.types.extras import Extra

ROUTED_EXPERTS = "routed_experts"
"""The name of a dense int16 extra [T, layers, k]: the experts of each token in each layer of experts.

Layers without experts are left out. -1 = unknown: the trainer routes the token itself.
"""
REPLAYED_EXPERTS = "replayed_experts"
"""The same, of the trainer's own pass before the first update of a batch."""
UNKNOWN_EXPERT = -1

RoutedArray: TypeAlias = npt.NDArray[np.int16]


class ExpertLayers(NamedTuple):
    """The layers of experts of a model.

    numbers: of these layers among all, from 0. num_layers: all layers (count). k: the experts of a token in
    each of them (count).
    """

    numbers: tuple[int, ...]
    num_layers: int
    k: int

    def unknown(self, length: int) -> RoutedArray:
        """The experts of as many tokens of which none are known, [length, layers, k]."""
        return np.full((length, len(self.numbers), self.k), UNKNOWN_EXPERT, np.int16)


def routed_parts(
    rows: RoutedArray, num_prompt: int, num_sampled: int
) -> tuple[Mapping[str, Extra], Mapping[str, Extra]]:
    """The `extras` and `prompt_extras` of a completion; what is missing at the end is unknown.

    rows: [rows, layers, k], of the last `num_prompt` tokens of the prompt, and of what was sampled.
    """
    size = num_prompt + num_sampled
    missing = np.full((max(size - len(rows), 0), *rows.shape[1:]), UNKNOWN_EXPERT, np.int16)
    whole = np.concatenate([rows[:size], missing])
    sampled, prompt = _extra(whole[num_prompt:]), _extra(whole[:num_prompt])
    return {ROUTED_EXPERTS: sampled}, {ROUTED_EXPERTS: prompt}


def known_rows(*parts: Mapping[str, Extra]) -> RoutedArray | None:
    """The experts of consecutive tokens, without those of the last ones that are unknown.

    None = some part has no experts.
    """
    extras = [part.get(ROUTED_EXPERTS) for part in parts]
    arrays = [extra.values.astype(np.int16, copy=False) for extra in extras if extra is not None]
    if len(arrays) < len(extras):
        return None
    rows: RoutedArray = np.concatenate(arrays)
    known = np.flatnonzero(is_known(rows))
    return rows[: int(known[-1]) + 1 if len(known) else 0]


def is_known(rows: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """Whether the experts of each token are known, [T]."""
    known: npt.NDArray[np.bool_] = (rows.reshape(len(rows), -1) != UNKNOWN_EXPERT).all(-1)
    return known


def with_prompts(
    extras: Mapping[str, Extra], prompts: Sequence[tuple[int, Mapping[str, Extra]]], length: int
) -> dict[str, Extra]:
    """The extras of a sequence with those of its prompts, where a token has none yet: the first pass counts.

    Args:
        extras: of `length` tokens, by name.
        prompts: where each prompt ends, in order, and the dense extras of its last tokens.
        length: tokens (count).

    Raises:
        ValueError: extras of one name differ in their declaration.
    """
    whole = dict(extras)
    for end, of_prompt in prompts:
        for name, extra in of_prompt.items():
            before = whole.get(name) or extra.spec.empty(length)
            if before.spec != extra.spec or extra.offsets is not None:
                raise ValueError(f"the extra {name} of a prompt is {extra.spec}, of the rest {before.spec}")
            size = min(len(extra), end)
            values = before.values.copy()
            place = values[end - size : end]
            is_missing = (place.reshape(size, -1) == extra.fill).all(-1)
            place[is_missing] = extra.values[len(extra) - size :][is_missing]
            whole[name] = Extra(values, None, extra.fill)
    return whole


def _extra(rows: RoutedArray) -> Extra:
    return Extra.dense(rows, fill=UNKNOWN_EXPERT)
