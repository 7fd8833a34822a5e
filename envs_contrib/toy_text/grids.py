"""The grid worlds: FrozenLake, CliffWalking and Taxi, each with a planner as expert.

The scores are exact: the distribution over (state, return so far) is propagated turn by turn, under
the expert's actions or under uniformly random ones, from the world's initial states to max_turns;
tests/envs_contrib/test_toy_text.py computes them again.
"""

from __future__ import annotations

from agentrl import GymEnv, Limits
from envs_contrib.toy_text.planner import best_actions

_LAKE = ("SFFF", "FHFH", "FFFH", "HFFG")
_PLACES = ("red (0, 0)", "green (0, 4)", "yellow (4, 0)", "blue (4, 3)")
_LAKE_RULES = """\
Walk from S to G over the frozen fields F; a hole H ends it. The ice is slippery: a step may go to
either side of where you meant to go, each as likely as straight on.

""" + "\n".join(" ".join(row) for row in _LAKE)
_CLIFF_RULES = """\
Walk from the lower left corner (row 3, column 0) of 4 rows and 12 columns to the lower right corner
(row 3, column 11) in as few steps as possible. Between them lies the cliff; whoever steps into it
begins anew."""
_TAXI_RULES = f"""\
Drive the taxi to the passenger, pick them up, drive to the destination and drop them off, in as few
steps as possible. The town has 5 rows and 5 columns. There are walls between columns 1 and 2 in rows 0
and 1, and between columns 0 and 1 and columns 2 and 3 in rows 3 and 4. The stops, as (row, column):
{", ".join(_PLACES)}."""


class FrozenLake(GymEnv):
    """Cross a frozen lake of 4 x 4 fields where only every third step goes where it was meant to.

    Reaching the goal is worth 1. The expert's actions are the best without a limit of turns.
    """

    expert_score = 0.740
    chance_score = 0.014
    limits = Limits(max_turns=100, max_tokens=8192)
    inline = True

    def __init__(self) -> None:
        super().__init__(
            "FrozenLake-v1",
            actions=("left", "down", "right", "up"),
            rules=_LAKE_RULES,
            describe=_on_the_lake,
        )

    def policy(self, observation: object) -> int:
        """The planned action."""
        return best_actions(self.gym_id)[_state(observation)]


class CliffWalking(GymEnv):
    """Walk along a cliff to the goal, in as few steps as possible and without falling.

    A step costs 1 and a fall 100, back to the start. The reward at the goal is 1 for the shortest way of
    13 steps, decreasing linearly to 0 for 50 steps.
    """

    expert_score = 1.0
    chance_score = 0.0
    limits = Limits(max_turns=50, max_tokens=8192)
    inline = True

    def __init__(self) -> None:
        super().__init__(
            "CliffWalking-v1",
            actions=("up", "right", "down", "left"),
            rules=_CLIFF_RULES,
            describe=_on_the_cliff,
            returns=(-50.0, -13.0),
        )

    def policy(self, observation: object) -> int:
        """The planned action."""
        return best_actions(self.gym_id)[_state(observation)]


class Taxi(GymEnv):
    """Fetch a passenger in a small town and bring them to where they want to go.

    A step costs 1, picking up or setting down in the wrong place 10, and the end of the ride earns 20.
    The reward at that end is this sum, scaled from [-20, 20] to [0, 1].
    """

    expert_score = 0.698
    chance_score = 0.0
    limits = Limits(max_turns=60, max_tokens=8192)
    inline = True

    def __init__(self) -> None:
        super().__init__(
            "Taxi-v4",
            actions=("south", "north", "east", "west", "pickup", "dropoff"),
            rules=_TAXI_RULES,
            describe=_in_town,
            returns=(-20.0, 20.0),
        )

    def policy(self, observation: object) -> int:
        """The planned action."""
        return best_actions(self.gym_id)[_state(observation)]


def _state(observation: object) -> int:
    return int(str(observation))


def _on_the_lake(observation: object) -> str:
    row, column = divmod(_state(observation), 4)
    return f"You stand on {_LAKE[row][column]} at row {row}, column {column}."


def _on_the_cliff(observation: object) -> str:
    row, column = divmod(_state(observation), 12)
    return f"You stand at row {row}, column {column}."


def _in_town(observation: object) -> str:
    rest, destination = divmod(_state(observation), 4)
    rest, passenger = divmod(rest, 5)
    row, column = divmod(rest, 5)
    where = f"waits at {_PLACES[passenger]}" if passenger < len(_PLACES) else "is in the taxi"
    return (
        f"The taxi is at row {row}, column {column}. The passenger {where} and wants to go to "
        f"{_PLACES[destination]}."
    )
