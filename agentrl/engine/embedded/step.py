"""One step: compute the new tokens of every active slot, sample one token for each, finish requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from agentrl.engine.embedded.decoder import Batch, Decoder, ForwardPass, Weights
from agentrl.engine.embedded.sampler import sample
from agentrl.engine.embedded.slots import Request, Slots, shared_prefix
from agentrl.types import Completion, Finish

Finished = tuple[Request, Completion]
_Slots = npt.NDArray[np.int64]

_PREFILL_TOKENS = 2048
# Logits of tokens that are scored together (count of numbers), and the fewest such tokens.
_SCORED_LOGITS = 1 << 24
_MIN_SCORED = 16
# Deterministic inference: tokens of each forward pass, and the shortest context that they attend to.
_FIXED_ROWS = 16
_SHORTEST = 64
# Tokens decoded before the earliest start of a stop string: a tokenizer may decode the first tokens of a
# text differently (it drops a leading space, or splits a character).
_STOP_MARGIN = 4


class Stepper:
    """Advances all active slots by one token. Synchronous: the event loop is blocked during a step.

    deterministic: a token's logits do not depend on what else is computed. Kernels choose the order of a sum
    by the shape of their operands, so the shape of a token's forward pass follows from its position alone:
    `_FIXED_ROWS` tokens, each attending to a copy of its slot's context, whose length is a power of two.
    parameters: None while their memory is released.
    """

    def __init__(
        self,
        slots: Slots,
        decoder: ForwardPass,
        parameters: Weights,
        decode: Callable[[Sequence[int]], str] | None,
        *,
        deterministic: bool = False,
    ) -> None:
        self.parameters: Weights | None = parameters
        self.version = 0
        self._slots = slots
        self._decoder = decoder
        self._decode = decode
        self._deterministic = deterministic

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Prefill slots with more than one token to compute, then decode one token for every active slot."""
        if self._deterministic:
            return self._step_in_blocks()
        finished = self._score() + self._prefill()
        self._make_dense()
        running = self._slots.running()
        if len(running):
            logits = self._forward(self._dense_batch(running))
            self._slots.cached[running] += 1
            finished += self._sample(running, logits)
        return finished

    def _step_in_blocks(self) -> list[Finished]:
        """Compute the new tokens of all active slots in blocks of fixed shapes, then sample."""
        slots = self._slots
        positions = np.arange(slots.ids.shape[1])
        due = (positions >= slots.cached[:, None]) & (positions < self._slots.num_due()[:, None])
        rows, columns = np.nonzero(due & slots.active[:, None])
        lengths = _fixed_lengths(columns, self._decoder.scratch)
        finished: list[Finished] = []
        # By length, slot and column: a token's predecessors are in its block, or in an earlier one.
        for length in np.unique(lengths):
            (tokens,) = np.nonzero(lengths == length)
            for begin in range(0, len(tokens), _FIXED_ROWS):
                block = tokens[begin : begin + _FIXED_ROWS]
                finished += self._block(rows[block], columns[block], int(length))
        return finished + self._finish_scored()

    def _block(self, rows: _Slots, columns: _Slots, length: int) -> list[Finished]:
        """Compute tokens, by slot and column, and sample where one is the last of its slot."""
        slots = self._slots
        last = columns == slots.num_tokens[rows] - 1
        padding = _FIXED_ROWS - len(rows)
        padded = np.pad(rows, (0, padding), mode="edge")
        at = np.pad(columns, (0, padding), constant_values=self._decoder.scratch)[:, None]
        batch = Batch(padded, self._tokens(padded, at), at, length, np.arange(_FIXED_ROWS), gathers=True)
        logits = self._forward(batch)
        self._record(rows, columns, logits[: len(rows)])
        complete = rows[last]
        slots.cached[complete] = slots.num_tokens[complete]
        return self._sample(complete, logits[torch.from_numpy(np.flatnonzero(last))])

    def _score(self) -> list[Finished]:
        """Compute the logprobs of all prompts that are scored, in batches whose logits are bounded."""
        slots = self._slots
        vocab_size = self.parameters.vocab_size if self.parameters is not None else 1
        size = min(max(_SCORED_LOGITS // vocab_size, _MIN_SCORED), _PREFILL_TOKENS)
        while True:
            scoring = np.flatnonzero(slots.scoring)
            remaining = (self._slots.num_due() - slots.cached)[scoring]
            rows, remaining = scoring[remaining > 0], remaining[remaining > 0]
            if not len(rows):
                return self._finish_scored()
            order = np.argsort(-remaining, kind="stable")
            width = min(int(remaining[order[0]]), size)
            self._score_chunk(np.sort(rows[order[: size // width]]), width)

    def _score_chunk(self, rows: _Slots, width: int) -> None:
        """Compute up to `width` tokens of each row, and score the token after each."""
        slots = self._slots
        start = slots.cached[rows]
        end = np.minimum(self._slots.num_due()[rows], start + width)
        columns = start[:, None] + np.arange(width)
        is_due = columns < end[:, None]
        columns = np.where(is_due, columns, self._decoder.scratch)
        batch = Batch(
            rows, self._tokens(rows, columns), columns, int(end.max()), np.flatnonzero(is_due.reshape(-1))
        )
        logits = self._forward(batch)
        slots.cached[rows] = end
        self._record(np.repeat(rows, width)[batch.pick], columns.reshape(-1)[batch.pick], logits)

    def _record(self, rows: _Slots, columns: _Slots, logits: torch.Tensor) -> None:
        """Keep the logprob of the token after each of these, where its slot is scored. logits: [P, V]."""
        slots, scored = self._slots, np.flatnonzero(self._slots.scoring[rows])
        if not len(scored):
            return
        rows, columns, at = rows[scored], columns[scored] + 1, torch.from_numpy(scored)
        targets = torch.from_numpy(slots.ids[rows, columns])
        logprobs = logits[at, targets] - logits.logsumexp(-1)[at]
        slots.logprobs[rows, columns] = logprobs.numpy()

    def _finish_scored(self) -> list[Finished]:
        finished = []
        for slot in np.flatnonzero(self._slots.scoring).tolist():
            self._slots.cached[slot] = self._slots.num_due()[slot]
            self._slots.scored(slot)
            finished.append(self._finish(slot, Finish.LENGTH, None))
        return finished

    def _prefill(self) -> list[Finished]:
        """Prefill until every active slot has exactly one token to compute, in batches of similar length."""
        slots = self._slots
        finished: list[Finished] = []
        while True:
            rows = _rows_to_prefill(slots, self._decoder)
            if not len(rows):
                return finished
            remaining = slots.num_tokens[rows] - slots.cached[rows]
            order = np.argsort(-remaining, kind="stable")
            width = min(int(remaining[order[0]]), _PREFILL_TOKENS)
            finished += self._chunk(np.sort(rows[order[: _PREFILL_TOKENS // width]]), width)

    def _chunk(self, rows: _Slots, width: int) -> list[Finished]:
        """Compute up to `width` tokens of each row; sample in those that are then complete."""
        slots = self._slots
        start = slots.cached[rows]
        end = np.minimum(slots.num_tokens[rows], start + width)
        columns = start[:, None] + np.arange(width)
        columns = np.where(columns < end[:, None], columns, self._decoder.scratch)
        complete = end == slots.num_tokens[rows]
        last = np.arange(len(rows)) * width + (end - start - 1)
        batch = Batch(rows, self._tokens(rows, columns), columns, int(end.max()), last[complete])
        logits = self._forward(batch)
        slots.cached[rows] = end
        return self._sample(rows[complete], logits)

    def _forward(self, batch: Batch) -> torch.Tensor:
        assert self.parameters is not None, "an engine without weights makes no step"
        return self._decoder.forward(self.parameters, batch)

    def _dense_batch(self, running: _Slots) -> Batch:
        """One token for every slot from the first active one to the last.

        Inactive slots among them write to a column that they overwrite before they read it.
        """
        rows = np.arange(running[0], running[-1] + 1)
        columns = self._slots.cached[rows][:, None]
        length = int(self._slots.num_tokens[running].max())
        return Batch(rows, self._tokens(rows, columns), columns, length, running - running[0])

    def _tokens(self, rows: _Slots, columns: _Slots) -> _Slots:
        ids = self._slots.ids
        return ids[rows[:, None], np.minimum(columns, ids.shape[1] - 1)]

    def _sample(self, rows: _Slots, logits: torch.Tensor) -> list[Finished]:
        """Sample a token for each row; end those that reached a stop token, a stop string or their limit."""
        if not len(rows):
            return []
        slots = self._slots
        tokens, logprobs, kept = sample(logits, slots.rules(rows))
        slots.append(rows, tokens, logprobs, self.version)
        for row, ids in kept.items():
            slots.request(int(rows[row])).kept_ids.append(ids)
        stopped = slots.stopped(rows)
        finished = [
            self._finish(int(slot), Finish.STOP, int(token))
            for slot, token in zip(rows[stopped], tokens[stopped], strict=True)
        ]
        for slot in sorted(slots.searching.intersection(rows[~stopped].tolist())):
            matched = _matched_stop(slots, slot, self._decode)
            if matched is not None:
                finished.append(self._finish(slot, Finish.STOP, matched))
        full = rows[slots.active[rows] & (slots.num_tokens[rows] >= slots.limit[rows])]
        return finished + [self._finish(int(slot), Finish.LENGTH, None) for slot in full]

    def _finish(self, slot: int, finish: Finish, matched: str | int | None) -> Finished:
        request = self._slots.request(slot)
        completion = self._slots.completion(slot, finish, matched)
        self._slots.keep(slot)
        return request, completion

    def _make_dense(self) -> None:
        """Move the last active slots into gaps, where inactive slots would cost a fifth of the step."""
        slots = self._slots
        running = slots.running()
        if not len(running) or running[-1] + 1 <= len(running) * 1.25 + 4:
            return
        gaps = np.flatnonzero(~slots.active[: len(running)])
        for source, target in zip(running[::-1][: len(gaps)].tolist(), gaps.tolist(), strict=True):
            self._decoder.exchange(source, target, int(max(slots.cached[source], slots.cached[target])))
            slots.exchange(source, target)


def _rows_to_prefill(slots: Slots, decoder: ForwardPass) -> _Slots:
    """The active slots with several tokens to compute, after they have got what others have cached of these.

    One that begins as a row before it waits for that row: what siblings begin with is computed once.
    """
    is_due = slots.active & (slots.num_tokens - slots.cached > 1)
    if not isinstance(decoder, Decoder):
        # A cache of another kind may have forgotten what is before its last token.
        return np.flatnonzero(is_due)
    is_row = np.zeros_like(is_due)
    for slot in np.flatnonzero(is_due).tolist():
        source, length = shared_prefix(slots, slot, np.arange(len(is_due)) != slot, slots.cached)
        if length:
            decoder.move(source, slot, length, start=int(slots.cached[slot]))
            slots.cached[slot] = length
            request = slots.request(slot)
            request.cached_tokens = min(length, len(request.prompt))
        waits = shared_prefix(slots, slot, is_row, slots.num_tokens)[1] > 0
        is_row[slot] = not waits and slots.num_tokens[slot] - slots.cached[slot] > 1
    return np.flatnonzero(is_row)


def _fixed_lengths(columns: _Slots, longest: int) -> _Slots:
    """The length of the context that each token attends to: the next power of two."""
    exact = np.maximum(columns + 1, _SHORTEST)
    rounded = 2 ** np.ceil(np.log2(exact)).astype(np.int64)
    return np.minimum(rounded, longest)


def _matched_stop(slots: Slots, slot: int, decode: Callable[[Sequence[int]], str] | None) -> str | None:
    """The stop string that the last tokens of a slot have reached; None = none."""
    if decode is None:
        return None
    stops = slots.request(slot).sampling.stop
    # A token is at least one byte, so a stop string spans at most as many tokens as it has bytes.
    num_last = max(len(stop.encode()) for stop in stops) + _STOP_MARGIN
    end = int(slots.num_tokens[slot])
    begin = max(int(slots.start[slot]), end - num_last)
    text = decode(slots.ids[slot, begin:end].tolist())
    return next((stop for stop in stops if stop in text), None)
