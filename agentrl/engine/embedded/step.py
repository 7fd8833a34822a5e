"""One step: compute what is new in every active slot, sample one token for each, see who is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from agentrl.engine.embedded.decoder import Batch, Decoder
from agentrl.engine.embedded.parameters import Parameters
from agentrl.engine.embedded.sampler import sample
from agentrl.engine.embedded.slots import Request, Slots
from agentrl.types import Completion, Finish

Finished = tuple[Request, Completion]
_Slots = npt.NDArray[np.int64]

_PREFILL_TOKENS = 2048
# Tokens decoded before a stop string could begin, so that a decoder which treats the start of a text in
# its own way (a leading space dropped, a character split) has its start there.
_STOP_MARGIN = 4


class Stepper:
    """Moves all active slots on by one token. Synchronous: nothing else happens during a step."""

    def __init__(
        self,
        slots: Slots,
        decoder: Decoder,
        parameters: Parameters,
        decode: Callable[[Sequence[int]], str] | None,
    ) -> None:
        self.parameters = parameters
        self.version = 0
        self._slots = slots
        self._decoder = decoder
        self._decode = decode

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Prefill who has more than one token to compute, then decode one token for everybody else."""
        finished = self._prefill()
        self._make_dense()
        running = self._slots.running()
        if len(running):
            logits = self._decoder.forward(self.parameters, self._dense_batch(running))
            self._slots.cached[running] += 1
            finished += self._sample(running, logits)
        return finished

    def _prefill(self) -> list[Finished]:
        """Until every active slot has exactly one token to compute, in batches of similar length."""
        slots = self._slots
        finished: list[Finished] = []
        while True:
            running = slots.running()
            left = slots.known[running] - slots.cached[running]
            behind, left = running[left > 1], left[left > 1]
            if not len(behind):
                return finished
            order = np.argsort(-left, kind="stable")
            width = min(int(left[order[0]]), _PREFILL_TOKENS)
            finished += self._chunk(np.sort(behind[order[: _PREFILL_TOKENS // width]]), width)

    def _chunk(self, rows: _Slots, width: int) -> list[Finished]:
        """Compute up to `width` tokens of each row; sample in those that have no more."""
        slots = self._slots
        start = slots.cached[rows]
        end = np.minimum(slots.known[rows], start + width)
        columns = start[:, None] + np.arange(width)
        columns = np.where(columns < end[:, None], columns, self._decoder.scratch)
        complete = end == slots.known[rows]
        last = np.arange(len(rows)) * width + (end - start - 1)
        batch = Batch(rows, self._tokens(rows, columns), columns, int(end.max()), last[complete])
        logits = self._decoder.forward(self.parameters, batch)
        slots.cached[rows] = end
        return self._sample(rows[complete], logits)

    def _dense_batch(self, running: _Slots) -> Batch:
        """One token for every slot from the first active one to the last.

        Idle slots among them compute into a column that they overwrite before they read it.
        """
        rows = np.arange(running[0], running[-1] + 1)
        columns = self._slots.cached[rows][:, None]
        length = int(self._slots.known[running].max())
        return Batch(rows, self._tokens(rows, columns), columns, length, running - running[0])

    def _tokens(self, rows: _Slots, columns: _Slots) -> _Slots:
        ids = self._slots.ids
        return ids[rows[:, None], np.minimum(columns, ids.shape[1] - 1)]

    def _sample(self, rows: _Slots, logits: torch.Tensor) -> list[Finished]:
        """Give each row a token; end those that met a stop token, a stop string or their limit."""
        if not len(rows):
            return []
        slots = self._slots
        tokens, logprobs = sample(logits, slots.rules(rows))
        slots.append(rows, tokens, logprobs, self.version)
        stopped = slots.stopped(rows)
        finished = [
            self._finish(int(slot), Finish.STOP, int(token))
            for slot, token in zip(rows[stopped], tokens[stopped], strict=True)
        ]
        for slot in sorted(slots.searching.intersection(rows[~stopped].tolist())):
            matched = self._find_stop(slot)
            if matched is not None:
                finished.append(self._finish(slot, Finish.STOP, matched))
        full = rows[slots.active[rows] & (slots.known[rows] >= slots.limit[rows])]
        return finished + [self._finish(int(slot), Finish.LENGTH, None) for slot in full]

    def _find_stop(self, slot: int) -> str | None:
        if self._decode is None:
            return None
        stops = self._slots.request(slot).sampling.stop
        # A token is at least one byte, so a stop string lies within as many tokens as it has bytes.
        reach = max(len(stop.encode()) for stop in stops) + _STOP_MARGIN
        known = int(self._slots.known[slot])
        begin = max(int(self._slots.start[slot]), known - reach)
        text = self._decode(self._slots.ids[slot, begin:known].tolist())
        return next((stop for stop in stops if stop in text), None)

    def _finish(self, slot: int, finish: Finish, matched: str | int | None) -> Finished:
        request = self._slots.request(slot)
        completion = self._slots.completion(slot, finish, matched)
        self._slots.keep(slot)
        return request, completion

    def _make_dense(self) -> None:
        """Move the last active slots into gaps, where idle slots would cost a fifth of the step."""
        slots = self._slots
        running = slots.running()
        if not len(running) or running[-1] + 1 <= len(running) * 1.25 + 4:
            return
        gaps = np.flatnonzero(~slots.active[: len(running)])
        for source, target in zip(running[::-1][: len(gaps)].tolist(), gaps.tolist(), strict=True):
            self._decoder.exchange(source, target, int(max(slots.cached[source], slots.cached[target])))
            slots.exchange(source, target)
