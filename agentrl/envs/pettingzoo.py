"""A game of PettingZoo's AEC API as an environment of several agents.

    register("TicTacToe-v0", PettingZooEnv, game="pettingzoo.classic.tictactoe_v3", returns=(-1.0, 1.0))

Agents act in the game's own order (AEC, agent environment cycle). Actions are discrete: a model answers with
the number of an action, or with its name where `actions` has names. Source: https://arxiv.org/abs/2009.14471.
"""

from __future__ import annotations

import importlib
import os
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Protocol, cast

from gymnasium.spaces import Discrete, Space

from agentrl.envs.base import Script
from agentrl.envs.multi_agent import MultiAgentEnv
from agentrl.envs.values import text_of
from agentrl.errors import UserError
from agentrl.runtime.extras import require
from agentrl.types import JSON, JointStep, Limits, Message, Observation, Task, say
from agentrl.types.seams import ToolSchema

NUM_TASKS: Mapping[str, int] = {"train": 2000, "test": 500}
_FIRST_SEED: Mapping[str, int] = {"train": 0, "test": 1_000_000}
_TURNS = 64


class AecGame(Protocol):
    """The part of PettingZoo's `AECEnv` that is used here."""

    possible_agents: list[str]
    agents: list[str]
    agent_selection: str
    rewards: Mapping[str, float]
    terminations: Mapping[str, bool]
    truncations: Mapping[str, bool]

    def reset(self, seed: int | None = None) -> None:
        """Begin a game."""

    def step(self, action: int | None) -> None:
        """Apply the selected agent's action; None for an agent that has left the game."""

    def observe(self, agent: str) -> object:
        """The observation of an agent."""

    def action_space(self, agent: str) -> Space[object]:
        """The action space of an agent."""

    def close(self) -> None:
        """Close the game."""


class PettingZooEnv(MultiAgentEnv):
    """Plays a game of PettingZoo's. A task is a seed, which fixes all randomness of the game.

    The agents are those of the game, which is opened at the first access to `possible_agents`.

    game: its module, e.g. pettingzoo.classic.tictactoe_v3. game_kwargs: arguments of its `env()`.
    actions: names of the discrete actions, in their order; without them a model answers with numbers.
    rules: the text that each agent reads before its first turn.
    describe: the text of an agent's observation; without it, its str(), with all numbers of its arrays.
    returns: (worst, best). An agent is then rewarded once, at the end of the game, with its return
        scaled from [worst, best] to [0, 1]; a game that did not end is worth nothing.

    A message that is no legal action (by the observation's `action_mask`, where it has one) gets a sentence
    as its answer, is counted as `invalid_moves`, and may be corrected in the agent's next turn. The
    `opponent` plays a random legal action.

    Raises:
        MissingExtraError: PettingZoo is not installed (raised when the game is opened).
        UserError: there is no such game, or its actions are not discrete (likewise).
    """

    needs = ("pettingzoo",)

    def __init__(
        self,
        game: str,
        *,
        actions: Sequence[str] = (),
        rules: str = "",
        describe: Callable[[object, str], str] | None = None,
        returns: tuple[float, float] | None = None,
        **game_kwargs: object,
    ) -> None:
        super().__init__()
        self.game = game
        self._actions, self._rules, self._returns = tuple(actions), rules, returns
        self._describe = describe or (lambda observation, _: text_of(observation))
        self._game_kwargs = game_kwargs
        self._sums: dict[str, float] = {}
        self._taken: list[int] = []
        if type(self).limits is MultiAgentEnv.limits:
            self.limits = Limits(max_turns=_TURNS, max_tokens=None)

    @cached_property
    def _aec(self) -> AecGame:
        # Opened at its first use: an environment can be listed where PettingZoo is not installed.
        aec = _opened(self.game, self._game_kwargs)
        for agent in aec.possible_agents:
            self._check_actions(aec.action_space(agent), agent)
        return aec

    @property
    def possible_agents(self) -> Sequence[str]:
        """The agents of the game."""
        return tuple(self._aec.possible_agents)

    @property
    def tool_schemas(self) -> Sequence[ToolSchema]:
        """No tools: an action is the text of a message."""
        return ()

    def policy(self, observation: object, agent: str) -> int | None:
        """The best action for an observation; None = no expert (the default)."""
        del observation, agent
        return None

    def tasks(self, split: str) -> Sequence[Task]:
        """One task per seed; no seed is in two splits."""
        return _tasks(self._rules, split)

    async def reset(self, task: Task, *, seed: int) -> tuple[Mapping[str, Observation], Mapping[str, JSON]]:
        """Begin at the task's seed; `seed` is only for scripts."""
        self.seed_rng(seed)
        self._aec.reset(seed=int(str(task.metadata["seed"])))
        self._sums, self._taken = dict.fromkeys(self.possible_agents, 0.0), []
        self._unseen = dict.fromkeys(self.possible_agents, task.prompt)
        self.acting = (self._aec.agent_selection,)
        return self._observations(), {}

    async def step(self, actions: Mapping[str, Message]) -> JointStep:
        """Apply the selected agent's action; return the observation of the next agent."""
        ((agent, message),) = actions.items()
        action = self._action(message.text, agent)
        if action is None:
            self.counts["invalid_moves"] += 1
            sentence = f"That is no legal action. Answer with one of: {self._names(self.legal(agent))}."
            return JointStep.going({agent: (Message("user", sentence),)})
        rewards = self._take(action)
        ended = self._skip_finished_agents()
        if self._returns is not None:
            rewards = {name: self._share(total) for name, total in self._sums.items()} if ended else {}
        if ended:
            by_time = any(self._aec.truncations.values()) and not any(self._aec.terminations.values())
            return JointStep({}, rewards, not by_time, by_time)
        self.acting = (self._aec.agent_selection,)
        return JointStep.going(self._observations(), rewards)

    def save_state(self) -> Mapping[str, JSON]:
        """The actions so far: the task's seed fixes all else."""
        return {"actions": list(self._taken)}

    async def load_state(self, state: Mapping[str, JSON]) -> None:
        """Take the same actions again."""
        for action in cast(list[int], state["actions"]):
            self._take(action)
            self._skip_finished_agents()
            # Its agent has seen this.
            self._observations()

    async def close(self) -> None:
        """Close the game."""
        if "_aec" in vars(self):
            self._aec.close()

    def _take(self, action: int) -> dict[str, float | None]:
        """The rewards of an action, by agent."""
        self._aec.step(action)
        self._taken.append(action)
        rewards: dict[str, float | None] = {
            name: float(self._aec.rewards[name]) for name in self._aec.rewards
        }
        for name, reward in rewards.items():
            self._sums[name] += reward or 0.0
        return rewards

    def legal(self, agent: str) -> list[int]:
        """The actions that an agent may take now."""
        space = cast(Discrete, self._aec.action_space(agent))
        every = range(int(space.start), int(space.start + space.n))
        observation = self._aec.observe(agent)
        mask = observation.get("action_mask") if isinstance(observation, Mapping) else None
        return [action for k, action in enumerate(every) if mask is None or mask[k]]

    @property
    def has_expert(self) -> bool:
        """Whether the class has a policy, or an expert of its own."""
        is_own = type(self).expert is not PettingZooEnv.expert
        return is_own or type(self).policy is not PettingZooEnv.policy

    def expert(self, task: Task, agent: str, prompt: str) -> Script:
        """Plays `policy`.

        Raises:
            UserError: this environment has no policy.
        """
        if not self.has_expert:
            return super().expert(task, agent, prompt)
        return self._best(agent)

    def opponent(self, task: Task, agent: str, prompt: str, rng: random.Random) -> Script:
        """Plays a random legal action."""
        del task, prompt
        while True:
            yield say(self._name(rng.choice(self.legal(agent))))

    def _best(self, agent: str) -> Script:
        while True:
            action = self.policy(self._aec.observe(agent), agent)
            assert action is not None
            yield say(self._name(action))

    def _observations(self) -> dict[str, Observation]:
        agent = self._aec.agent_selection
        words = Message("user", self._describe(self._aec.observe(agent), agent))
        return {agent: (*self._unseen.pop(agent, ()), words)}

    def _skip_finished_agents(self) -> bool:
        """Take the empty steps of agents that have left; return whether the game has ended."""
        aec = self._aec
        has_ended = all(aec.terminations[name] or aec.truncations[name] for name in aec.agents)
        while aec.agents and not has_ended and _is_out(aec, aec.agent_selection):
            aec.step(None)
        return has_ended

    def _action(self, text: str, agent: str) -> int | None:
        by_name = {self._name(action): action for action in self.legal(agent)}
        return by_name.get(text.strip())

    def _name(self, action: int) -> str:
        return self._actions[action] if self._actions else str(action)

    def _names(self, actions: Sequence[int]) -> str:
        return ", ".join(map(self._name, actions))

    def _share(self, total: float) -> float:
        assert self._returns is not None
        worst, best = self._returns
        return min(1.0, max(0.0, (total - worst) / (best - worst)))

    def _check_actions(self, space: Space[object], agent: str) -> None:
        if not isinstance(space, Discrete):
            raise UserError(
                f"{self.game}: {agent} takes actions of {space}; only discrete ones can be played."
            )
        if self._actions and (len(self._actions) != space.n or space.start != 0):
            raise UserError(
                f"{self.game} has {space.n} actions from {space.start} on, got {len(self._actions)} names; "
                "name each one, beginning with number 0."
            )


def _is_out(aec: AecGame, agent: str) -> bool:
    return aec.terminations[agent] or aec.truncations[agent]


def _opened(game: str, kwargs: Mapping[str, object]) -> AecGame:
    require(f"the game {game}", "pettingzoo", "pygame")
    # pygame prints a greeting to standard output, which is for results.
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    try:
        with warnings.catch_warnings():
            # PettingZoo 1.27 warns of every import of a game's module, which is how `game` names it.
            warnings.simplefilter("ignore", DeprecationWarning)
            module = importlib.import_module(game)
    except ModuleNotFoundError as error:
        raise UserError(
            f"there is no game `{game}` ({error}); name a module such as pettingzoo.classic.tictactoe_v3."
        ) from None
    if not callable(make := getattr(module, "env", None)):
        raise UserError(f"{game} has no `env()`; name the module of a game with the AEC API.")
    return cast(AecGame, make(**kwargs))


@lru_cache(maxsize=64)
def _tasks(rules: str, split: str) -> tuple[Task, ...]:
    prompt = (Message("user", rules),) if rules else ()
    plain = Task("", prompt, None, {}, split)
    first = _FIRST_SEED[split]
    return tuple(
        replace(plain, id=f"{split}-{number}", metadata={"seed": first + number})
        for number in range(NUM_TASKS[split])
    )
