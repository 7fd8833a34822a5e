"""An episode token by token: the author, logprob and policy version of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from agentrl.types import Author, Episode, TurnTokens
from agentrl.view.transcript import Move, moves_of, text_of, visible

NAMES = {Author.WORLD: "world", Author.POLICY: "policy", Author.DEMO: "demo"}
FROZEN = "frozen"
"""The author of turns of an agent that is not trained, such as an opponent."""
_WORLD = NAMES[Author.WORLD]
_UNSURE_NATS = 3.0


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A piece of text with one author. surprise: 0 (certain) to 1 (a rare choice), for its tint."""

    text: str
    title: str
    surprise: float = 0.0


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive text of one author. images: data URLs.

    who: the author; in an episode of several agents the name of the agent that wrote it, or that it was
    shown to.
    """

    author: str
    pieces: tuple[TextSpan, ...]
    who: str
    images: tuple[str, ...] = ()


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
    """The episode in blocks: of tokens where it has them, else of messages."""
    for move in moves_of(episode):
        tokens = move.turn.tokens
        yield from _messages(move, author) if tokens is None else _sampled(move, tokens, decode, author)


def token_rows(episode: Episode, decode: Callable[[int], str], author: Author) -> Iterator[TokenRow]:
    """Every token of the episode, in order."""
    index = 0
    for move in moves_of(episode):
        tokens = move.turn.tokens
        if tokens is None:
            continue
        for id in tokens.world_ids.tolist():
            yield TokenRow(index, NAMES[Author.WORLD], visible(decode(id)), id, None, None)
            index += 1
        written = tokens.completion
        columns = (written.token_ids.tolist(), written.logprobs.tolist(), written.versions.tolist())
        for id, logprob, version in zip(*columns, strict=True):
            yield TokenRow(index, _name(move, author), visible(decode(id)), id, logprob, version)
            index += 1


def _messages(move: Move, author: Author) -> Iterator[Block]:
    for message in move.turn.observation:
        text = visible(text_of(message))
        images = tuple(image.url for image in message.images)
        yield Block(_WORLD, (TextSpan(text, f"{message.role}, written by the world"),), _to(move), images)
    title = "written by a demonstrator" if author is Author.DEMO else "written without tokens"
    yield Block(
        _name(move, author), (TextSpan(visible(text_of(move.turn.action)), title),), _by(move, author)
    )


def _sampled(move: Move, tokens: TurnTokens, decode: Callable[[int], str], author: Author) -> Iterator[Block]:
    if len(tokens.world_ids):
        pieces = (
            TextSpan(visible(decode(id)), f"world · mask 0 · id {id}") for id in tokens.world_ids.tolist()
        )
        yield Block(_WORLD, tuple(pieces), _to(move))
    written = tokens.completion
    columns = (written.token_ids.tolist(), written.logprobs.tolist(), written.versions.tolist())
    name = _name(move, author)
    pieces = (
        TextSpan(visible(decode(id)), _title(name, id, logprob, version), surprise(logprob))
        for id, logprob, version in zip(*columns, strict=True)
    )
    yield Block(name, tuple(pieces), _by(move, author))


def _name(move: Move, author: Author) -> str:
    return NAMES[author] if move.is_trained else FROZEN


def _by(move: Move, author: Author) -> str:
    return visible(move.agent) or _name(move, author)


def _to(move: Move) -> str:
    return f"to {visible(move.agent)}" if move.agent else _WORLD


def _title(name: str, id: int, logprob: float, version: int) -> str:
    likely = f"logprob {logprob:z.3f} (p = {math.exp(min(logprob, 0.0)):.2f})"
    mask = 0 if name == FROZEN else 1
    return f"{name} · mask {mask} · {likely} · version {version} · id {id}"


def surprise(logprob: float) -> float:
    """How unexpected a token was: 0 at logprob 0, 1 from -3 nats (p = .05) on."""
    return 0.0 if math.isnan(logprob) else round(min(max(-logprob / _UNSURE_NATS, 0.0), 1.0), 2)
