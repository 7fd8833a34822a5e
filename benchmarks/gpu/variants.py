"""Variants of trainers, as a user writes them: `0.6B`, `0.6B:rows=8192,recompute=full`, `4B:transformers`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, cast, get_args

from agentrl.errors import UserError, did_you_mean
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.types import JSON
from benchmarks.gpu.shapes import SHAPES

Side = Literal["megatron", "torch", "transformers"]
_SIDES: Final = get_args(Side)
_SHORT: Final = {"rows": "max_tokens_per_gpu", "recompute": "recompute_granularity"}
_OWN: Final = ("samples", "ranks", "layers", "kernels")
_PARAMETER = re.compile(r",(?=[a-z0-9_]+(?:=|,|$))")


@dataclass(frozen=True, slots=True)
class Variant:
    """A shape, who trains it, and settings that differ from the usual ones.

    text: as it was written. trainer, layout: fields of `TrainerConfig` and `MegatronConfig`. own: samples
    and ranks (count), layers (count), kernels (whether they are recorded).
    """

    text: str
    shape: str
    side: Side = "megatron"
    trainer: Mapping[str, JSON] = field(default_factory=dict)
    layout: Mapping[str, JSON] = field(default_factory=dict)
    own: Mapping[str, JSON] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The text with its side, without what changes no figure."""
        words = [
            word
            for word in _PARAMETER.split(self.text.partition(":")[2])
            if word not in (self.side, "kernels")
        ]
        return " ".join([self.shape, self.side, *filter(None, words)])

    def number(self, name: str, default: int) -> int:
        """A whole number among its own settings.

        Raises:
            UserError: it is none.
        """
        value = self.own.get(name, default)
        if not isinstance(value, int):
            raise UserError(f"`{name}` of the variant `{self.text}` is a whole number; write {name}=8.")
        return value


def parsed(text: str) -> Variant:
    """The variant that a text names.

    Raises:
        UserError: there is no such shape, side or setting.
    """
    shape, _, rest = text.partition(":")
    if shape not in SHAPES:
        raise UserError(
            f"There is no shape `{shape}`; there are {', '.join(SHAPES)}.{did_you_mean(shape, SHAPES)}"
        )
    side: Side = "megatron"
    trainer, layout, own = dict[str, JSON](), dict[str, JSON](), dict[str, JSON]()
    for word in filter(None, _PARAMETER.split(rest)):
        key, has_value, value = word.partition("=")
        key = _SHORT.get(key, key)
        if not has_value and key in _SIDES:
            side = cast(Side, key)
        elif key in _OWN:
            own[key] = _json(value) if has_value else True
        elif has_value and key in TrainerConfig.model_fields:
            trainer[key] = _json(value)
        elif has_value and key in MegatronConfig.model_fields:
            layout[key] = None if value == "none" else _json(value)
        else:
            names = [*_SIDES, *_SHORT, *_OWN, *MegatronConfig.model_fields, *TrainerConfig.model_fields]
            raise UserError(
                f"`{word}` of the variant `{text}` is neither {', '.join(_SIDES)} nor SETTING=VALUE of the "
                f"trainer.{did_you_mean(key, names)}"
            )
    return Variant(text, shape, side, trainer, layout, own)


def _json(value: str) -> JSON:
    try:
        parsed_value: JSON = json.loads(value)
    except ValueError:
        return value
    return parsed_value
