"""An engine without cost, so that a benchmark measures only the code that plays episodes.

The engine returns precomputed tokens at once; the tool of the environment (`library`) returns at once,
or after a delay. Between request and response the event loop runs all other episodes, as with a real engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from agentrl.data.source import Prompt
from agentrl.envs import Env, Scorer
from agentrl.envs.dialect import Tags
from agentrl.rendering.fresh_tokenizer import train_tokenizer
from agentrl.rendering.inline import InlineRenderer
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.rollout.group import GroupOutcome, GroupPlayer
from agentrl.rollout.player import Player as GroupPlaying
from agentrl.types import Completion, Ending, Finish
from agentrl.types.seams import Policy, Renderer, Sampling
from benchmarks.library import TASK, Library
from benchmarks.question import ANSWER, QUESTION

_WORDS = (
    *("river", "stone", "tower", "bridge", "harbour", "market", "garden"),
    *("winter", "summer", "castle", "forest", "valley", "window", "silver"),
)


@dataclass(slots=True)
class InstantEngine:
    """Generates `calls` tool calls, then the answer, in every session.

    parked: an event for which every turn waits, except the first of a session; None = no turn waits.
    num_requests, num_prompt_tokens: of all sessions (count). num_turns: by session.
    """

    call: list[int]
    answer: list[int]
    calls: int
    version: int = 0
    parked: asyncio.Event | None = None
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_turns: dict[str, int] = field(default_factory=dict)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """The next turn of a session."""
        del sampling
        self.num_requests += 1
        self.num_prompt_tokens += len(prompt_ids)
        turn = self.num_turns.get(session, 0)
        self.num_turns[session] = turn + 1
        if turn and self.parked is not None:
            await self.parked.wait()
        await asyncio.sleep(0)
        token_ids = self.call if turn < self.calls else self.answer
        tokens = np.array(token_ids, np.int32)
        logprobs = np.full(len(token_ids), -0.5, np.float32)
        return Completion(tokens, logprobs, np.zeros(len(token_ids), np.int32), Finish.STOP, token_ids[-1])

    async def close_session(self, session: str) -> None:
        """Remove the counter of a session."""
        self.num_turns.pop(session, None)


class Player:
    """Plays groups of `size` in a `Library`.

    payload: characters of each tool result. calls: tool calls before the final answer (count). work: of a
    call, see `Library`. policy: in place of its own engine.
    """

    def __init__(
        self,
        *,
        payload: int = 40,
        calls: int = 3,
        wait_s: float = 0.0,
        work: int = 0,
        size: int = 8,
        policy: Policy | None = None,
    ) -> None:
        self.size, self._work = size, work
        self.texts = texts_of(payload)
        self.tokenizer = train_tokenizer(
            [*_WORDS, QUESTION],
            special_tokens=["<look>", "</look>", "<answer>", "</answer>", "<result>", "</result>"],
            vocab_size=512,
        )
        renderer: Renderer = InlineRenderer(self.tokenizer, Tags())
        call, answer = self.encode("<look> tower</look>"), self.encode(f"<answer> {ANSWER}</answer>")
        self.engine = InstantEngine(call, answer, calls)
        sampling = SamplingSettings(max_response_len=64)
        self.group_player = GroupPlayer(
            make_env=lambda: self._env(wait_s),
            make_agent=lambda: TokenAgent(policy or self.engine, renderer, sampling),
            scorer=Scorer(),
            size=self.size,
            retries=0,
            seed=0,
        )

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, from the tokenizer only."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    async def play(self, episodes: int, player: GroupPlaying | None = None) -> list[GroupOutcome]:
        """Play this number of episodes concurrently, and check each of them. player: in place of its own."""
        player = player or self.group_player
        prompts = [Prompt(index, TASK, index) for index in range(episodes // self.size)]
        outcomes = await asyncio.gather(*(player.play(prompt, version=0) for prompt in prompts))
        turns = self.engine.calls + 1
        for episode in chain.from_iterable(outcome.episodes for outcome in outcomes):
            if episode.ending is not Ending.COMPLETED or len(episode.turns) != turns:
                raise AssertionError(f"episode {episode.id} was not played as it should be: {episode}")
        return list(outcomes)

    def _env(self, wait_s: float) -> Env:
        return Library(self.texts, wait_s, self._work)


def texts_of(payload: int) -> list[str]:
    """Texts of `payload` characters, from seeded random words: up to 4,096 texts, and at least 8 of them."""
    rng = np.random.default_rng(payload)
    number = max(8, min(4096, 8_000_000 // payload))
    return [_text(rng, payload) for _ in range(number)]


def _text(rng: np.random.Generator, payload: int) -> str:
    words = rng.choice(_WORDS, payload // 4)
    return " ".join(words.tolist())[:payload]
