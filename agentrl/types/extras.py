"""Extra arrays that an engine returns and a loss uses: declared once, passed on unchanged in between.

    kept = Extra.of_lists(ids)    # the token ids that top-p kept, a different number for each token
    Completion(..., extras={"entropies": Extra.dense(entropies_T), KEPT_IDS: kept})

An `Extra` contains its declaration: dtype, shape of one token's value, fill value, and whether it is ragged.
That suffices to join it over turns, to fill it where the policy sampled nothing, to split it into
micro-batches and to shard it over context-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from agentrl.types.arrays import NumberArray, freeze

KEPT_IDS = "kept_ids"
"""The name of a ragged int32 extra: the token ids that top-p and top-k kept when a token was sampled.

It is what `Sampling.return_kept_ids` asks for. The logprob of a token that has some is that of the
distribution renormalised over them; a token without any was sampled from the whole vocabulary.
"""


@dataclass(frozen=True, slots=True)
class ExtraSpec:
    """The declaration of an extra, sufficient to join, fill, split and shard it.

    dtype: by numpy's name (`int16`). shape: of one value; () = a number. fill: the value of tokens that were
    not sampled. ragged: a token has any number of values instead of one, and none where it was not sampled.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    fill: float = 0.0
    ragged: bool = False

    def empty(self, length: int) -> Extra:
        """An extra of this declaration for `length` tokens that were not sampled."""
        values = np.full((0 if self.ragged else length, *self.shape), self.fill, np.dtype(self.dtype))
        return Extra(values, np.zeros(length + 1, np.int64) if self.ragged else None, self.fill)


@dataclass(frozen=True, slots=True, eq=False)
class Extra:
    """A value, or a sequence of values, for each of T tokens.

    values: dense: [T, *shape]. Ragged: [M, *shape], with those of token t at offsets[t]:offsets[t + 1].
    fill: the dense value of tokens that were not sampled; a ragged extra has no values there.
    offsets: int64 [T + 1] where ragged, else None.

    Raises:
        ValueError: the dtype holds objects or text, or the offsets do not rise from 0 to M.
    """

    values: NumberArray
    offsets: NumberArray | None
    fill: float = 0.0

    def __post_init__(self) -> None:
        if self.values.dtype.kind not in "biuf" or self.values.ndim < 1:
            raise ValueError(f"an extra holds numbers, one for each token at least, got {self.values.dtype}")
        offsets = self.offsets
        if offsets is not None:
            is_complete = len(offsets) and offsets[0] == 0 and offsets[-1] == len(self.values)
            if not is_complete or np.any(np.diff(offsets) < 0):
                raise ValueError(
                    "offsets of a ragged extra begin at 0, never fall and end at its number of values"
                )
            freeze(offsets)
        freeze(self.values)
        object.__setattr__(self, "fill", float(self.fill))

    @classmethod
    def dense(cls, values: npt.ArrayLike, *, fill: float = 0) -> Extra:
        """One value of any shape for each token: [T, *shape]."""
        return cls(np.array(values), None, fill)

    @classmethod
    def ragged(cls, values: npt.ArrayLike, offsets: npt.ArrayLike) -> Extra:
        """A sequence of values for each token, with its boundaries in `offsets`."""
        return cls(np.array(values), np.array(offsets, dtype=np.int64))

    @classmethod
    def of_lists(cls, lists: Sequence[NumberArray]) -> Extra:
        """A sequence of ids for each token, int32, from one array for each."""
        counts = [len(ids) for ids in lists]
        return cls.ragged(
            np.concatenate([np.zeros(0, np.int32), *lists], dtype=np.int32), [0, *accumulate(counts)]
        )

    def lists(self) -> list[NumberArray]:
        """The values of each token, as one array for each; a dense extra has one value in each."""
        bounds = np.arange(1, len(self)) if self.offsets is None else self.offsets[1:-1]
        return np.split(self.values, bounds) if len(self) else []

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    @property
    def spec(self) -> ExtraSpec:
        """The declaration, which all extras of one name share."""
        return ExtraSpec(
            self.values.dtype.name, self.values.shape[1:], self.fill, ragged=self.offsets is not None
        )

    def take(self, positions_n: npt.ArrayLike) -> Extra:
        """The values of some tokens, by position, in that order."""
        positions = np.asarray(positions_n, dtype=np.intp)
        if self.offsets is None:
            return Extra(self.values[positions], None, self.fill)
        counts = np.diff(self.offsets)[positions]
        starts = self.offsets[:-1][positions]
        inside = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
        return Extra(self.values[np.repeat(starts, counts) + inside], offsets, self.fill)

    @staticmethod
    def joined(parts: Sequence[Extra]) -> Extra:
        """Concatenate extras of one declaration.

        Raises:
            ValueError: there are none, or their declarations differ.
        """
        if len({part.spec for part in parts}) != 1:
            specs = sorted({str(part.spec) for part in parts})
            raise ValueError(f"extras of one name must share dtype, shape, fill and form, got {specs}")
        values = np.concatenate([part.values for part in parts])
        if parts[0].offsets is None:
            return Extra(values, None, parts[0].fill)
        counts = [np.diff(part.offsets) for part in parts if part.offsets is not None]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(counts), dtype=np.int64)])
        return Extra(values, offsets, parts[0].fill)


def joined_extras(parts: Sequence[tuple[int, Mapping[str, Extra]]]) -> dict[str, Extra]:
    """Concatenate the extras of consecutive parts of a sequence; parts that lack one are filled.

    Args:
        parts: the number of tokens of each part, and its extras by name.

    Raises:
        ValueError: extras of one name differ in their declaration.
    """
    first: dict[str, ExtraSpec] = {}
    for _, extras in parts:
        for name, extra in extras.items():
            first.setdefault(name, extra.spec)
    return {
        name: Extra.joined([extras.get(name) or spec.empty(length) for length, extras in parts])
        for name, spec in first.items()
    }
