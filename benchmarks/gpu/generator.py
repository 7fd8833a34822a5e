"""The generator beside a raw client of the same server: sampled tokens a second, and the driver's CPU time.

Episodes have four turns: three calls of a tool and an answer. The server samples all tokens of a turn; the
end of each completion is then replaced by a call, or by the answer, so that a model that has learned nothing
plays.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from agentrl.collector import rare_collections
from agentrl.data.source import Prompt
from agentrl.engine.sglang import SGLangPolicy
from agentrl.envs import Scorer
from agentrl.envs.dialect import Tags
from agentrl.errors import EngineError
from agentrl.protocols import Sampling
from agentrl.rendering.inline import InlineRenderer
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.rollout.group import GroupPlayer
from agentrl.types import JSON, Completion, Ending, Finish
from benchmarks.compare import figures_of
from benchmarks.gpu.job import Bench
from benchmarks.gpu.raw_client import RawClient
from benchmarks.gpu.server import url_of
from benchmarks.gpu.shapes import shape_of, tokenizer
from benchmarks.instant import texts_of
from benchmarks.library import TASK, Library
from benchmarks.question import ANSWER

_TURNS = 4
_NEW, _TINY_NEW = 128, 16
_GROUP = 8
_MOST_REPEATS = 5
_CONCURRENCY = 4096
_TOOL_CHARS = 120
_UNIT = 20_000
"""Sampled tokens a second that the driver's CPU time is stated for."""


@dataclass(slots=True)
class CallingPolicy:
    """The server's policy; the end of each completion becomes a call, or the answer of the last turn.

    num_tokens: sampled (count). prompts: lengths of all prompts, by turn (tokens).
    """

    policy: SGLangPolicy
    call: list[int]
    answer: list[int]
    new: int
    version: int = 0
    num_tokens: int = 0
    prompts: list[list[int]] = field(default_factory=lambda: [[] for _ in range(_TURNS)])
    _turns: dict[str, int] = field(default_factory=dict)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """The next turn of a session."""
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        self.prompts[turn].append(len(prompt_ids))
        plain = replace(sampling, stop=(), stop_token_ids=(), max_new_tokens=self.new, seed=None)
        sampled = await self.policy.generate(prompt_ids, plain, session=session)
        self.num_tokens += len(sampled.token_ids)
        end = self.call if turn < _TURNS - 1 else self.answer
        ids = np.concatenate([sampled.token_ids[: self.new - len(end)], np.array(end, np.int32)])
        logprobs = np.full(len(ids), -1.0, np.float32)
        logprobs[: min(len(ids), len(sampled.logprobs))] = sampled.logprobs[: len(ids)]
        versions = np.zeros(len(ids), np.int32)
        return Completion(ids.astype(np.int32), logprobs, versions, Finish.STOP, int(end[-1]))

    async def close_session(self, session: str) -> None:
        """Forget a session."""
        self._turns.pop(session, None)
        await self.policy.close_session(session)


class _Run(NamedTuple):
    """tokens: sampled (count). wall_s, cpu_s: of all episodes, and of this process (seconds)."""

    tokens: int
    wall_s: float
    cpu_s: float

    @property
    def rate(self) -> float:
        """Sampled tokens a second."""
        return self.tokens / self.wall_s


class Episodes:
    """Both sides: our generator, and the raw client with prompts of the same lengths."""

    def __init__(self, url: str, vocab: int, new: int) -> None:
        self._url, self._vocab, self.new = url, vocab, new
        self._tokenizer = tokenizer()
        self._lengths: list[int] = []

    async def ours(self, episodes: int, salt: str) -> int:
        """Play this number of episodes at once by groups; the tokens that were sampled.

        Raises:
            EngineError: an episode was not played to its end.
        """
        policy = SGLangPolicy(self._url, max_concurrency=_CONCURRENCY, vocab_size=self._vocab)
        policy.salt = salt
        calling = CallingPolicy(
            policy,
            self._encoded("<look> tower</look>"),
            self._encoded(f"<answer> {ANSWER}</answer>"),
            self.new,
        )
        try:
            with rare_collections():
                played = self._player(calling).play
                groups = (played(Prompt(i, TASK, i), version=0) for i in range(episodes // _GROUP))
                outcomes = await asyncio.gather(*groups)
        finally:
            await policy.close()
        for episode in (episode for outcome in outcomes for episode in outcome.episodes):
            if episode.ending is not Ending.COMPLETED or len(episode.turns) != _TURNS:
                raise EngineError(
                    f"an episode ended as {episode.ending.name} after {len(episode.turns)} turns"
                )
        self._lengths = self._lengths or [round(statistics.fmean(lengths)) for lengths in calling.prompts]
        return calling.num_tokens

    async def raw(self, episodes: int, salt: str) -> int:
        """The same requests by the raw client; `ours` has run before."""
        return await RawClient(self._url, self._lengths, self.new).play(episodes, salt)

    def _player(self, policy: CallingPolicy) -> GroupPlayer:
        texts = texts_of(_TOOL_CHARS)
        renderer, settings = (
            InlineRenderer(self._tokenizer, Tags()),
            SamplingSettings(max_response_len=self.new),
        )
        return GroupPlayer(
            make_env=lambda: Library(texts),
            make_agent=lambda: TokenAgent(policy, renderer, settings),
            scorer=Scorer(),
            size=_GROUP,
            retries=0,
            seed=0,
        )

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


async def run(bench: Bench) -> None:
    """A row for each number of episodes."""
    tiny = bench.spec.tiny
    shape = shape_of(bench.spec.shape, tiny=tiny)
    turn = bench.turn()
    episodes = Episodes(url_of(turn, shape.name), shape.vocab, _TINY_NEW if tiny else _NEW)
    bench.quiet()
    await episodes.ours(_GROUP, "first")
    sizes = bench.spec.episodes
    for position, size in enumerate(sizes):
        # The larger sizes take longer.
        share = bench.left_s * size / sum(sizes[position:])
        await _row(bench, episodes, size, share)


async def _row(bench: Bench, episodes: Episodes, size: int, seconds: float) -> None:
    ends = time.monotonic() + seconds
    sides = {"ours": episodes.ours, "raw": episodes.raw}
    runs: dict[str, list[_Run]] = {side: [] for side in sides}
    longest = 0.0
    # The kernels and graphs of this size are warm, and the connections of the server accepted once.
    await episodes.raw(min(size, 256), f"warm-{size}")
    for repeat in range(_MOST_REPEATS):
        started = time.monotonic()
        if repeat and started + longest > ends:
            break
        for side in sorted(sides, reverse=repeat % 2 == 1):
            runs[side].append(await _timed(partial(sides[side], size, f"{side}-{repeat}-{size}")))
        longest = max(longest, time.monotonic() - started)
    rates = {side: figures_of([run.rate for run in done]) for side, done in runs.items()}
    cores = statistics.median(run.cpu_s / run.wall_s for run in runs["ours"])
    ratio = rates["ours"].median / rates["raw"].median
    per_unit = cores * _UNIT / rates["ours"].median
    line = (
        f"{rates['ours'].median:,.0f} tokens/s against {rates['raw'].median:,.0f} of a raw client = "
        f"{ratio:.3f} (median of {len(runs['ours'])}, spread {rates['ours'].spread:.0%}); the driver takes "
        f"{cores:.2f} of a core, {per_unit:.2f} a {_UNIT:,} tokens/s"
    )
    figures: dict[str, JSON] = {
        "episodes": size,
        "turns": _TURNS,
        "new": episodes.new,
        "ratio": ratio,
        "driver_cores": cores,
        **{side: side_figures._asdict() for side, side_figures in rates.items()},
    }
    best = {"tokens_per_s": rates["ours"].median, "ratio": ratio, "driver_cores_less": per_unit}
    bench.row(f"{size} episodes", line, figures, best)


async def _timed(play: Callable[[], Awaitable[int]]) -> _Run:
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = await play()
    return _Run(tokens, time.perf_counter() - wall, time.process_time() - cpu)
