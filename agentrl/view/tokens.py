"""An episode token by token: who wrote each, how likely it was, under which version."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from agentrl.types import Author, Episode, Turn, TurnTokens
from agentrl.view.transcript import visible, words_of

NAMES = {Author.WORLD: "world", Author.POLICY: "policy", Author.DEMO: "demo"}
_UNSURE_NATS = 3.0


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A piece of text with one author. surprise: 0 (certain) to 1 (a rare choice), for its tint."""

    text: str
    title: str
    surprise: float = 0.0


@dataclass(frozen=True, slots=True)
class Block:
    """What one author wrote in one go."""

    author: str
    pieces: tuple[TextSpan, ...]


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One token in the table below an episode."""

    index: int
    author: str
    text: str
    id: int
    logprob: float | None
    version: int | None


def blocks_of(episode: Episode, decode: Callable[[int], str], author: Author) -> Iterator[Block]:
    """The episode in blocks, by tokens where it has them and by messages where it has none."""
    for turn in episode.turns:
        yield from _spoken(turn, author) if turn.tokens is None else _sampled(turn.tokens, decode, author)


def token_rows(episode: Episode, decode: Callable[[int], str], author: Author) -> Iterator[TokenRow]:
    """Every token of the episode, in order."""
    index = 0
    for tokens in (turn.tokens for turn in episode.turns if turn.tokens is not None):
        for id in tokens.world_ids.tolist():
            yield TokenRow(index, NAMES[Author.WORLD], visible(decode(id)), id, None, None)
            index += 1
        written = tokens.completion
        columns = (written.token_ids.tolist(), written.logprobs.tolist(), written.versions.tolist())
        for id, logprob, version in zip(*columns, strict=True):
            yield TokenRow(index, NAMES[author], visible(decode(id)), id, logprob, version)
            index += 1


def _spoken(turn: Turn, author: Author) -> Iterator[Block]:
    for message in turn.observation:
        text = visible(words_of(message))
        yield Block(NAMES[Author.WORLD], (TextSpan(text, f"{message.role}, said by the world"),))
    title = "written by a demonstrator" if author is Author.DEMO else "said without tokens"
    yield Block(NAMES[author], (TextSpan(visible(words_of(turn.action)), title),))


def _sampled(tokens: TurnTokens, decode: Callable[[int], str], author: Author) -> Iterator[Block]:
    if len(tokens.world_ids):
        pieces = (
            TextSpan(visible(decode(id)), f"world · mask 0 · id {id}") for id in tokens.world_ids.tolist()
        )
        yield Block(NAMES[Author.WORLD], tuple(pieces))
    written = tokens.completion
    columns = (written.token_ids.tolist(), written.logprobs.tolist(), written.versions.tolist())
    yield Block(
        NAMES[author],
        tuple(
            TextSpan(visible(decode(id)), _title(author, id, logprob, version), surprise(logprob))
            for id, logprob, version in zip(*columns, strict=True)
        ),
    )


def _title(author: Author, id: int, logprob: float, version: int) -> str:
    likely = f"logprob {logprob:z.3f} (p = {math.exp(min(logprob, 0.0)):.2f})"
    return f"{NAMES[author]} · mask 1 · {likely} · version {version} · id {id}"


def surprise(logprob: float) -> float:
    """How unexpected a token was: 0 at logprob 0, 1 from -3 nats (p = .05) on."""
    return 0.0 if math.isnan(logprob) else round(min(max(-logprob / _UNSURE_NATS, 0.0), 1.0), 2)
