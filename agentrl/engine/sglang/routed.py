"""The experts of a request's tokens, from the replies to its parts.

SGLang 0.5.15 started with --enable-return-routed-experts answers `return_routed_experts` with
meta_info.routed_experts: base64 of int32 [rows, layers, k], for all layers of the model, 0 in those without
experts. The rows are of the tokens from `routed_experts_start_len` on, without the last one, which has not
been an input. Of tokens whose keys were cached they are those of the pass that computed the keys.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

import numpy as np

from agentrl.engine.sglang.wire import MetaInfo
from agentrl.errors import ConfigError, EngineError
from agentrl.types import UNKNOWN_EXPERT, Extra, RoutedArray, routed_parts
from agentrl.types.seams import Sampling


class RoutedDraft:
    """The experts of the tokens so far. num_prompt: tokens of the prompt (count)."""

    def __init__(self, sampling: Sampling, num_prompt: int) -> None:
        self._layers, self._start = sampling.return_routed_experts, sampling.routed_experts_start_len
        self._num_prompt = num_prompt
        self._rows = sampling.routed_before()

    @property
    def start(self) -> int:
        """The first token whose experts are not known, where a request asks for them."""
        return self._start + (0 if self._rows is None else len(self._rows))

    def add(self, meta: MetaInfo, num_tokens: int) -> None:
        """Append those of a reply, which was asked for those from `start` on. num_tokens: with the prompt.

        Raises:
            ConfigError: the server reports none.
            EngineError: it reports those of another number of tokens.
        """
        if self._layers is None or self._rows is None:
            return
        if meta.routed_experts is None:
            # A request that ends before it had a slot has none.
            if meta.finish_reason.type == "abort":
                return
            raise ConfigError(
                "the server does not report the experts of tokens; start it with "
                "--enable-return-routed-experts, and without a router before it, or leave router_replay and "
                "return_routed_experts out."
            )
        rows = _decoded(meta.routed_experts)
        expected = max(num_tokens - 1 - self.start, 0)
        size = self._layers.num_layers * self._layers.k
        if len(rows) != expected * size:
            raise EngineError(
                f"the server sent {len(rows)} experts of {expected} tokens in {self._layers.num_layers} "
                f"layers, {self._layers.k} in each; it has another model."
            )
        every = rows.reshape(expected, self._layers.num_layers, self._layers.k)
        own = every[:, list(self._layers.numbers)].astype(np.int16)
        # What a server has of a token that it has not computed: zeros.
        ordered = np.sort(own, -1)
        own[(ordered[..., 1:] == ordered[..., :-1]).any((1, 2))] = UNKNOWN_EXPERT
        self._rows = np.concatenate([self._rows, own])

    def parts(self, num_sampled: int) -> tuple[Mapping[str, Extra], Mapping[str, Extra]]:
        """The extras of a completion of so many tokens, and of its prompt."""
        if self._rows is None:
            return {}, {}
        return routed_parts(self._rows, self._num_prompt - self._start, num_sampled)


def encoded(rows: RoutedArray, numbers: tuple[int, ...], num_layers: int) -> str:
    """Experts as SGLang sends them. rows: [rows, layers, k], of the layers `numbers`."""
    every = np.zeros((len(rows), num_layers, rows.shape[2]), np.int32)
    every[:, list(numbers)] = rows
    return base64.b64encode(every.tobytes()).decode()


def _decoded(text: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), np.dtype("<i4")).astype(np.int32)
    except (binascii.Error, ValueError):
        raise EngineError("the server sent experts that are no base64 of int32; see its log.") from None
