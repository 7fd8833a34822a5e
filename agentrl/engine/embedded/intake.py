"""What the embedded engine checks of a request before it gets a slot."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from agentrl.engine.embedded.slots import Request
from agentrl.errors import EngineError, RequestTooLargeError
from agentrl.types import Completion, IntArray
from agentrl.types.seams import Sampling


class Intake(NamedTuple):
    """What an engine takes. can_decode: whether it has the text of tokens, which stop strings need."""

    vocab_size: int
    max_context_len: int
    can_decode: bool
    eos_token_ids: tuple[int, ...]

    def sampled(self, prompt_ids: Sequence[int], sampling: Sampling, session: str) -> Request:
        """A request to sample a continuation.

        Raises:
            RequestTooLargeError: prompt and max_new_tokens exceed max_context_len.
            EngineError: it is invalid.
        """
        prompt = self._prompt(prompt_ids)
        num_begun = 0 if sampling.continues is None else len(sampling.continues.token_ids)
        if sampling.max_new_tokens <= num_begun:
            raise EngineError("a request needs a prompt and at least one token to sample; give it both.")
        if len(prompt) + sampling.max_new_tokens > self.max_context_len:
            raise RequestTooLargeError(
                f"a prompt of {len(prompt)} tokens and max_new_tokens = {sampling.max_new_tokens} exceed "
                f"max_context_len = {self.max_context_len}; raise max_context_len or ask for fewer tokens."
            )
        if sampling.stop and not self.can_decode:
            raise EngineError("stop strings need the engine's `decode`; give it one, or use stop_token_ids.")
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        stops = (*sampling.stop_token_ids, *self.eos_token_ids)
        return Request(prompt, sampling, session, seed % 2**64, stops, _answer())

    def scored(self, token_ids: Sequence[int], start: int, session: str) -> Request:
        """A request for the logprobs of the tokens after `start`.

        Raises:
            RequestTooLargeError: they exceed max_context_len.
            EngineError: it is invalid.
        """
        prompt = self._prompt(token_ids)
        if not 0 <= start <= len(prompt):
            raise EngineError(f"a prompt of {len(prompt)} tokens cannot be scored from {start} on.")
        if len(prompt) > self.max_context_len:
            raise RequestTooLargeError(
                f"a prompt of {len(prompt)} tokens exceeds max_context_len = {self.max_context_len}; raise "
                "max_context_len."
            )
        return Request(prompt, Sampling(0), session, 0, (), _answer(), score_from=start)

    def _prompt(self, prompt_ids: Sequence[int]) -> IntArray:
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        if not len(prompt):
            raise EngineError("a request needs a prompt and at least one token to sample; give it both.")
        if prompt.min() < 0 or prompt.max() >= self.vocab_size:
            raise EngineError(
                f"the prompt's tokens go from {prompt.min()} to {prompt.max()}, the vocabulary is 0 to "
                f"{self.vocab_size - 1}; encode it with the model's own tokenizer."
            )
        return prompt


def _answer() -> asyncio.Future[Completion]:
    return asyncio.get_running_loop().create_future()
