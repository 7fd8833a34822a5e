"""A game of TextArena as an environment: its messages as observations, a message of the model as a move."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Protocol, cast

from agentrl import Env, Limits, Message, Script, Step, Task, UserError
from agentrl.tools import JSON
from envs_contrib.measures import MEASURES
from envs_contrib.textarena.experts import EXPERTS

NUM_TASKS: Mapping[str, int] = {"train": 2000, "test": 500}
_FIRST_SEED: Mapping[str, int] = {"train": 0, "test": 1_000_000}
_MAX_MOVE_CHARS = 2000
_TOKENS_PER_TURN = 256

# What games raise for moves of a form that they do not expect.
_GAME_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    TypeError,
    ValueError,
)

Note = tuple[int, str, object]
"""The sender (-1 = the game), the text, and the kind of a message."""


class _State(Protocol):
    done: bool
    error_count: int
    rewards: Mapping[int, float] | None
    game_info: Mapping[int, Mapping[str, object]]


class _Game(Protocol):
    state: _State

    def reset(self, num_players: int, seed: int | None = None) -> None: ...

    def step(self, action: str) -> tuple[bool, Mapping[str, object]]: ...

    def get_observation(self) -> tuple[int, Sequence[Note]]: ...


class TextArena(Env):
    """A game of TextArena for one player, in text. A task is a seed, which fixes the game and its chance.

    A game that is won is worth 1. An illegal move earns nothing and is counted as `invalid_moves`; the second
    one in a row ends the game, which is then worth 0, whatever was reached. The parts `solved` and
    `invalid_moves` of a verdict report both.

    game: its id in TextArena, such as `Mastermind-v0`. partial: whether TextArena's own score of a game that
    was not won counts, cut to [0, 1]. max_turns: of an episode. chance, expert_score: the declared scores.

    Raises (when a task begins):
        UserError: TextArena is not installed, or has no such game.
    """

    group = "games"
    needs = ("textarena",)
    rewards = MEASURES

    def __init__(
        self,
        game: str,
        *,
        max_turns: int = 64,
        chance: float = 0.0,
        expert_score: float = 1.0,
        partial: bool = False,
    ) -> None:
        super().__init__()
        self.game = game
        self.chance_score, self.expert_score = chance, expert_score
        self.limits = Limits(max_turns=max_turns, max_tokens=1024 + max_turns * _TOKENS_PER_TURN)
        self._partial = partial
        self._game: _Game | None = None
        self._chance: object = None

    @property
    def has_expert(self) -> bool:
        """Whether there is a script for this game."""
        return self.game in EXPERTS

    def tasks(self, split: str) -> Sequence[Task]:
        """One task per seed; no seed is in two splits."""
        return _tasks(split)

    async def reset(self, task: Task, *, seed: int) -> tuple[tuple[Message, ...], Mapping[str, JSON]]:
        """Begin the game of the task's seed; `seed` has no effect."""
        self.seed_rng(seed)
        self._chance = random.Random(int(str(task.metadata["seed"]))).getstate()
        with self._own_chance():
            self._game = _made(self.game)
            self._game.reset(num_players=1, seed=int(str(task.metadata["seed"])))
        return (self._observed(),), {}

    async def step(self, action: Message) -> Step:
        """Make the move that the model wrote; brackets around it are added where it has none."""
        game = self._game
        assert game is not None
        text = "".join([action.text, *(call.raw for call in action.tool_calls)])[:_MAX_MOVE_CHARS]
        move = text if "[" in text or "]" in text else f"[{text.strip()}]"
        try:
            with self._own_chance():
                game.step(move)
        except _GAME_ERRORS:
            self.counts["invalid_moves"] += 1
            return Step.going(Message("user", "That is no move of this game; read its rules again."))
        broke_rule = bool(game.state.game_info[0].get("invalid_move"))
        if broke_rule or game.state.error_count > 0:
            self.counts["invalid_moves"] += 1
        if game.state.done:
            return Step.finished(self._observed(), reward=0.0 if broke_rule else self._score())
        return Step.going(self._observed())

    def expert(self, task: Task) -> Script:
        """The script of the game.

        Raises:
            UserError: there is none for this game.
        """
        if not self.has_expert:
            return super().expert(task)
        return self._played(task)

    def _played(self, task: Task) -> Script:
        example = _made(self.game)
        state = random.getstate()
        example.reset(num_players=1, seed=int(str(task.metadata["seed"])))
        random.setstate(state)
        prompt = "\n".join(text for _, text, _ in example.get_observation()[1])
        yield from EXPERTS[self.game](prompt)

    @contextmanager
    def _own_chance(self) -> Iterator[None]:
        """Games draw from the global generator of `random`; during a call it has this game's state."""
        state = random.getstate()
        random.setstate(cast(tuple[object, ...], self._chance))
        try:
            yield
        finally:
            self._chance = random.getstate()
            random.setstate(state)

    def _observed(self) -> Message:
        assert self._game is not None
        _, notes = self._game.get_observation()
        return Message("user", "\n".join(text for sender, text, _ in notes if sender == -1).strip())

    def _score(self) -> float:
        assert self._game is not None
        score = float((self._game.state.rewards or {}).get(0, 0.0))
        return min(1.0, max(0.0, score)) if self._partial else float(score >= 1.0)


def _made(game: str) -> _Game:
    try:
        import textarena
    except ImportError:
        raise UserError(
            f"the game {game} needs the package textarena; "
            "install it with `pip install 'agentrl[textarena]'`."
        ) from None
    try:
        # Without the wrappers of the plain id, which repeat the whole conversation in every observation.
        return cast(_Game, textarena.make(f"{game}-raw"))
    except ValueError as error:
        raise UserError(f"TextArena has no game `{game}`: {error}") from None


@lru_cache(maxsize=4)
def _tasks(split: str) -> tuple[Task, ...]:
    plain = Task("", (), None, {}, split)
    return tuple(
        replace(plain, id=f"{split}-{number}", metadata={"seed": _FIRST_SEED[split] + number})
        for number in range(NUM_TASKS[split])
    )
