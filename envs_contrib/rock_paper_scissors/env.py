"""The game, its tasks, and a predictable script as opponent."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product

from agentrl import JointStep, Limits, Message, MultiAgentEnv, Script, Task, say
from agentrl.tools import inline

MOVES = ("rock", "paper", "scissors")
PLAYERS = ("player_0", "player_1")
ROUNDS = 3
LAST_GAMES = 5
"""The number of the other player's last openings in a prompt."""
BLUNDERS = 0.4
"""The rate of random moves in demonstrations, so that RL can improve on them."""

_BEATS = {"paper": "rock", "rock": "scissors", "scissors": "paper"}
_BEATEN_BY = {loser: winner for winner, loser in _BEATS.items()}
Observations = Mapping[str, tuple[Message, ...]]
_OPENINGS = "The other opened its last games with: {}."
_RESULTS = {1.0: "You win", 0.5: "A draw", 0.0: "You lose"}


class RockPaperScissors(MultiAgentEnv):
    """Three rounds of rock, paper, scissors against a player whose last openings are known.

    Both move at the same time. A round is worth a third to its winner and half of that in a draw; an invalid
    move loses the round. Between two models the game is constant-sum, around 0.5. The script (`opponent`) is
    predictable: it opens with its most frequent last opening, and then plays the move that would have beaten
    the other's last move.
    """

    possible_agents = PLAYERS
    expert_score = 1.0
    chance_score = 0.5
    limits = Limits(max_turns=ROUNDS, max_tokens=256)

    def __init__(self) -> None:
        super().__init__()
        self.round = 0

    def tasks(self, split: str) -> Sequence[Task]:
        """Pairs of openings that have a most frequent move, four fifths of them for training."""
        return _tasks()[split]

    async def reset(self, task: Task, *, seed: int) -> tuple[Observations, Mapping[str, str]]:
        """Begin; each player observes the other's last openings."""
        self.seed_rng(seed)
        self.round = 0
        self.acting = PLAYERS
        observations = {
            player: (*task.prompt, Message("user", _OPENINGS.format(_of(task, other))))
            for player, other in zip(PLAYERS, reversed(PLAYERS), strict=True)
        }
        return observations, {}

    async def step(self, actions: Mapping[str, Message]) -> JointStep:
        """Play a round."""
        moves = {player: actions[player].text.strip().lower() for player in PLAYERS}
        first = _worth(moves["player_0"], moves["player_1"])
        second = _worth(moves["player_1"], moves["player_0"])
        rewards: dict[str, float | None] = {"player_0": first / ROUNDS, "player_1": second / ROUNDS}
        self.round += 1
        if self.round == ROUNDS:
            return JointStep.finished(rewards)
        observations = {
            player: (Message("user", f"The other played {_label(moves[other])}. {_RESULTS[worth]}."),)
            for player, other, worth in zip(PLAYERS, reversed(PLAYERS), (first, second), strict=True)
        }
        return JointStep.going(observations, rewards)

    @inline
    def save_state(self) -> Mapping[str, int]:
        """The number of rounds."""
        return {"round": self.round}

    def expert(self, task: Task, agent: str, prompt: str) -> Script:
        """Beats the script: first its opening, then its reply to the agent's last move."""
        del prompt
        own = _opening(task, agent)
        while True:
            yield say(own)
            own = _answer(own)

    def demonstrator(self, task: Task, agent: str, prompt: str, rng: random.Random) -> Script:
        """The expert, with random moves at the rate BLUNDERS."""
        del prompt
        best = _opening(task, agent)
        while True:
            own = rng.choice(MOVES) if rng.random() < BLUNDERS else best
            yield say(own)
            best = _answer(own)

    def opponent(self, task: Task, agent: str, prompt: str, rng: random.Random) -> Script:
        """The predictable player."""
        del prompt, rng
        text = yield say(_favourite(_of(task, agent)))
        while True:
            last = next((move for move in MOVES if f"played {move}" in text), MOVES[0])
            text = yield say(_BEATEN_BY[last])

    def corpus(self) -> Iterable[str]:
        """The prompts, and the messages between rounds."""
        for task in self.tasks("train"):
            yield from (message.text for message in task.prompt)
            yield _OPENINGS.format(_of(task, PLAYERS[0]))
        yield from (f"The other played {move}. {result}." for move in MOVES for result in _RESULTS.values())


def _opening(task: Task, agent: str) -> str:
    """The move that beats the other's most frequent opening."""
    other = PLAYERS[1 - PLAYERS.index(agent)]
    return _BEATEN_BY[_favourite(_of(task, other))]


def _answer(own: str) -> str:
    """The move that beats the script's reply to `own`."""
    return _BEATEN_BY[_BEATEN_BY[own]]


def _worth(own: str, other: str) -> float:
    """The score of a round: 1 for a win, 0.5 for a draw, 0 for a loss or an invalid move."""
    if own not in MOVES:
        return 0.0
    if own == other:
        return 0.5
    return float(_BEATS[own] == other or other not in MOVES)


def _label(move: str) -> str:
    return move if move in MOVES else "nothing"


def _of(task: Task, player: str) -> str:
    return str(task.metadata[player])


def _favourite(openings: str) -> str:
    return max(MOVES, key=openings.split(", ").count)


@lru_cache(maxsize=1)
def _tasks() -> Mapping[str, tuple[Task, ...]]:
    clear = [openings for openings in product(MOVES, repeat=LAST_GAMES) if _has_favourite(openings)]
    rng = random.Random(0)
    # No openings are in two splits: those held out cannot be memorised.
    rng.shuffle(clear)
    held_out = len(clear) // 5
    parts = {"test": clear[:held_out], "train": clear[held_out:]}
    return {split: tuple(_with_pairs(split, openings)) for split, openings in parts.items()}


def _has_favourite(openings: Sequence[str]) -> bool:
    counts = [openings.count(move) for move in MOVES]
    return counts.count(max(counts)) == 1


def _with_pairs(split: str, openings: Sequence[Sequence[str]]) -> Iterable[Task]:
    rng = random.Random(split)
    for number, first in enumerate(openings):
        second = rng.choice(openings)
        prompt = f"Play {ROUNDS} rounds of rock, paper, scissors. Answer with your move alone."
        metadata = {"player_0": ", ".join(first), "player_1": ", ".join(second)}
        yield Task(f"{split}-{number}", (Message("user", prompt),), None, metadata, split)
