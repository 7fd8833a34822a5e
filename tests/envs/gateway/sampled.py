"""What an engine has sampled, and what a journal says that it has: each token after all before it, once."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agentrl.algorithms.samples import samples_of
from agentrl.records import Entry, read_journal


class Sampled(Counter):
    """Sampled tokens by what stood before them (a hash), with the number of each and its logprob."""

    def add(self, prompt_ids, token_ids, logprobs) -> None:
        """A completion; its logprobs are float32."""
        before = _hash_of(prompt_ids)
        for token, logprob in zip(token_ids, logprobs, strict=True):
            self[before.digest(), int(token), float(np.float32(logprob))] += 1
            before.update(_bytes_of([token]))


def _hash_of(ids):
    return hashlib.blake2b(_bytes_of(ids), digest_size=16)


def _bytes_of(ids) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def logged(engine, monkeypatch) -> Sampled:
    """What the engines of a class sample from now on."""
    sampled, generate = Sampled(), engine.generate

    async def generates(self, prompt_ids, sampling, *, session):
        completion = await generate(self, prompt_ids, sampling, session=session)
        sampled.add(prompt_ids, completion.token_ids.tolist(), completion.logprobs.tolist())
        return completion

    monkeypatch.setattr(engine, "generate", generates)
    return sampled


def logged_by_sglang(folder: Path) -> Sampled:
    """What a server of SGLang has sampled, as it says itself (`log_requests`, as JSON, into a folder)."""
    sampled = Sampled()
    for path in sorted(folder.iterdir()):
        for line in path.read_text().splitlines():
            # After the time.
            entry = json.loads(line.partition("] ")[2])
            # Its own health checks ask for no logprobs.
            if entry.get("event") == "request.finished" and entry["obj"]["return_logprob"]:
                out = entry["out"]
                logprobs = [logprob for logprob, *_ in out["meta_info"]["output_token_logprobs"]]
                sampled.add(entry["obj"]["input_ids"], out["output_ids"], logprobs)
    return sampled


def journal_of(folder: Path) -> list[Entry]:
    """The entries of a run, read from its files."""
    files = sorted((folder / "trajectories").glob("*.jsonl.gz"))
    return [entry for file in files for entry in read_journal(file)]


def trained_in(entries: Sequence[Entry]) -> Sampled:
    """The tokens that the entries of a journal are trained on."""
    sampled = Sampled()
    for entry in entries:
        for sample in samples_of(entry.episode):
            _add_sample(sampled, sample)
    return sampled


def _add_sample(sampled, sample):
    """Each run of sampled tokens of a trajectory, after all that stands before it."""
    ids, mask = sample.token_ids.tolist(), sample.loss_mask
    starts = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0) == 1)
    for start in starts.tolist():
        end = start + int(np.argmin(np.append(mask[start:], False)))
        sampled.add(ids[:start], ids[start:end], sample.logprobs[start:end].tolist())
