"""Episodes of the generator's benchmark: `python -m benchmarks.gpu.playing FD` is a player of them.

Episodes have four turns: three calls of a tool and an answer. The server samples all tokens of a turn; the
end of each completion is then replaced by a call, or by the answer, so that a model that has learned nothing
plays.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from agentrl.engine.sglang import SGLangPolicy
from agentrl.envs import Scorer
from agentrl.envs.dialect import Tags
from agentrl.rendering.inline import InlineRenderer
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.players.hosted import HostedPlayer, main
from agentrl.runtime.clocks import Waits
from agentrl.types import Completion, Finish
from agentrl.types.seams import Policy, Sampling
from benchmarks.gpu.shapes import tokenizer
from benchmarks.instant import texts_of
from benchmarks.library import Library
from benchmarks.question import ANSWER

TURNS = 4
GROUP = 8
_CONCURRENCY = 4096
_TOOL_CHARS = 120


class Plan(NamedTuple):
    """url: of the server. vocab: of its model (tokens). new: sampled in each turn (tokens)."""

    url: str
    vocab: int
    new: int

    def policy(self) -> SGLangPolicy:
        """A policy of the server."""
        return SGLangPolicy(self.url, max_concurrency=_CONCURRENCY, vocab_size=self.vocab)


@dataclass(slots=True, eq=False)
class CallingPolicy:
    """The server's policy; the end of each completion becomes a call, or the answer of the last turn.

    prompts: lengths of all prompts, by turn (tokens).
    """

    policy: SGLangPolicy
    call: list[int]
    answer: list[int]
    new: int
    version: int = 0
    prompts: list[list[int]] = field(default_factory=lambda: [[] for _ in range(TURNS)])
    _turns: dict[str, int] = field(default_factory=dict)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """The next turn of a session."""
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        self.prompts[turn].append(len(prompt_ids))
        plain = replace(sampling, stop=(), stop_token_ids=(), max_new_tokens=self.new, seed=None)
        sampled = await self.policy.generate(prompt_ids, plain, session=session)
        end = self.call if turn < TURNS - 1 else self.answer
        ids = np.concatenate([sampled.token_ids[: self.new - len(end)], np.array(end, np.int32)])
        logprobs = np.full(len(ids), -1.0, np.float32)
        logprobs[: min(len(ids), len(sampled.logprobs))] = sampled.logprobs[: len(ids)]
        versions = np.zeros(len(ids), np.int32)
        return Completion(ids.astype(np.int32), logprobs, versions, Finish.STOP, int(end[-1]))

    async def close_session(self, session: str) -> None:
        """Forget a session."""
        self._turns.pop(session, None)
        await self.policy.close_session(session)


def player_of(policy: SGLangPolicy, new: int) -> tuple[GroupPlayer, CallingPolicy]:
    """What plays groups of these episodes, and its policy."""
    words = tokenizer()
    texts = "<look> tower</look>", f"<answer> {ANSWER}</answer>"
    call, answer = (list(words.encode(text, add_special_tokens=False)) for text in texts)
    calling = CallingPolicy(policy, call, answer, new)
    results = texts_of(_TOOL_CHARS)
    renderer, settings = InlineRenderer(words, Tags()), SamplingSettings(max_response_len=new)
    player = GroupPlayer(
        make_env=lambda: Library(results),
        make_agent=lambda: TokenAgent(calling, renderer, settings),
        scorer=Scorer(),
        size=GROUP,
        retries=0,
        seed=0,
    )
    return player, calling


@asynccontextmanager
async def opened(plan: bytes, policy: Policy, absence: Waits) -> AsyncIterator[HostedPlayer]:
    """The player of a plan, in a process of its own: it sends its requests to the server itself."""
    del policy, absence
    own = Plan(*json.loads(plan))
    sends = own.policy()
    yield HostedPlayer(player_of(sends, own.new)[0], sends)


if __name__ == "__main__":
    main(int(sys.argv[1]), opened)
