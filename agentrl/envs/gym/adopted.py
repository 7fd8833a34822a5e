"""The other way round: a `gymnasium.Env` as an environment of ours, in one line.

    register("FrozenLake-v0", GymEnv, gym_id="FrozenLake-v1", actions=("left", "down", "right", "up"))

Discrete actions are a tool `act`, by name where names are given and by number elsewhere; text actions
are what the model answers. Observations are told in words, rewards are those of the steps, and both
ends are Gymnasium's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import NamedTuple, cast

import gymnasium
from gymnasium.spaces import Discrete, Text

from agentrl.envs.base import Env, Script
from agentrl.envs.gym.spaces import TextSpace
from agentrl.errors import UserError
from agentrl.protocols import ToolSchema
from agentrl.tools import run
from agentrl.types import JSON, Limits, Message, Observation, Step, Task, ToolCall, call, say

ACT = "act"
NUM_TASKS: Mapping[str, int] = {"train": 2000, "test": 500}
_FIRST_SEED: Mapping[str, int] = {"train": 0, "test": 1_000_000}
_TURNS_WITHOUT_LIMIT = 100
_COLOURED = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0m", re.DOTALL)

World = gymnasium.Env[object, object]


class _Facts(NamedTuple):
    action_space: gymnasium.Space[object]
    render_modes: tuple[str, ...]


# Every episode makes an instance; what it offers is asked for before there is a world.
_known: dict[tuple[str, str], _Facts] = {}


class GymEnv(Env):
    """Plays an environment of Gymnasium's. A task is a seed, which fixes the whole world, its luck included.

    gym_id: Gymnasium's name for it. gym_kwargs: its arguments.
    actions: names of the discrete actions, in their order.
    rules: what the model is told before the first observation.
    describe: an observation in words. Without it: the world's own "ansi" picture, a coloured piece of
        it in brackets, or else the observation as Python prints it.
    returns: (worst, best). The episode is then paid once, by the world's end, the share of the way
        from worst to best that its return has gone. Where rewards can be negative, leaving off
        early would otherwise pay: a game that did not end is worth nothing.

    inline (of the class): its steps take microseconds and need no thread of their own.

    A turn without an action is answered with a sentence and counted as `idle_turns`. Unless the class
    sets `limits`, there are as many turns as Gymnasium's own time limit has steps, or 100.

    Raises:
        UserError: Gymnasium has no such environment, or its actions are neither discrete nor text.
    """

    inline = False

    def __init__(
        self,
        gym_id: str,
        *,
        actions: Sequence[str] = (),
        rules: str = "",
        describe: Callable[[object], str] | None = None,
        returns: tuple[float, float] | None = None,
        **gym_kwargs: object,
    ) -> None:
        super().__init__()
        self.gym_id = gym_id
        self._actions = tuple(actions)
        self._rules = rules
        self._describe = describe
        self._returns = returns
        self._gym_kwargs = gym_kwargs
        self._return = 0.0
        self._thread = None if self.inline else gym_id
        if type(self).limits is Env.limits:
            steps = _spec(gym_id).max_episode_steps
            self.limits = Limits(max_turns=steps or _TURNS_WITHOUT_LIMIT, max_tokens=None)

    def policy(self, observation: object) -> int | str | None:
        """The best action known, from the observation alone; None where none is: then there is no expert."""
        del observation
        return None

    def tasks(self, split: str) -> Sequence[Task]:
        """One task a seed; no seed is in two splits."""
        return _tasks(self._rules, split)

    @property
    def tool_schemas(self) -> Sequence[ToolSchema]:
        """The one tool `act`, or none where actions are text."""
        return () if self._act is None else (self._act,)

    async def reset(self, task: Task, *, seed: int) -> tuple[Observation, Mapping[str, JSON]]:
        """Begin at the task's seed; `seed` changes nothing."""
        self.seed_rng(seed)
        first = cast(str, await run(lambda: self._begun(_seed(task)), thread=self._thread))
        shown = [message.text for message in task.prompt if message.text]
        return (Message("user", "\n\n".join([*shown, first])),), {}

    async def step(self, action: Message) -> Step:
        """Do what the calls say, in their order, until the world ends."""
        return cast(Step, await run(lambda: self._answered(action), thread=self._thread))

    async def close(self) -> None:
        """Close the world."""
        if "_world" in vars(self):
            self._world.close()

    def expert(self, task: Task) -> Script:
        """Plays `policy` on a world of its own with the same seed, hence the same luck.

        Raises:
            UserError: this environment has no policy.
        """
        world = self._made(None)
        observation, _ = world.reset(seed=_seed(task))
        if self.policy(observation) is None:
            raise UserError(
                f"{self.id or self.gym_id} has no expert; write its `policy(observation)` method."
            )
        return self._play(world, observation)

    def _begun(self, seed: int) -> str:
        observation, _ = self._world.reset(seed=seed)
        self._return = 0.0
        return self._told(observation)

    def _answered(self, action: Message) -> Step:
        if self._act is None:
            said = "".join([action.text, *(one.raw for one in action.tool_calls)])
            if said not in self._facts.action_space:
                return self._idle(
                    Message("user", f"That is no action; {self._facts.action_space} is asked for.")
                )
            return self._moved(lambda text: Message("user", text), said)
        if not action.tool_calls:
            return self._idle(Message("user", f"Nothing was done; call `{ACT}`. {self._act.description}"))
        done = Step.going()
        for one in action.tool_calls:
            step = self._called(one)
            rewards = [reward for reward in (done.reward, step.reward) if reward is not None]
            observation = (*done.observation, *step.observation)
            done = step._replace(observation=observation, reward=sum(rewards) if rewards else None)
            if done.terminated or done.truncated:
                break
        return done

    def _play(self, world: World, observation: object) -> Script:
        ended = False
        try:
            while not ended:
                action = self.policy(observation)
                assert action is not None
                yield self._said(action)
                observation, _, terminated, truncated, _ = world.step(action)
                ended = terminated or truncated
        finally:
            world.close()

    def _said(self, action: int | str) -> Message:
        if isinstance(action, str):
            return say(action)
        named = self._actions[action - self._start] if self._actions else action
        return call(ACT, action=named)

    @cached_property
    def _world(self) -> World:
        return self._made("ansi" if self._describe is None and "ansi" in self._facts.render_modes else None)

    @cached_property
    def _facts(self) -> _Facts:
        key = self.gym_id, repr(sorted(self._gym_kwargs.items()))
        if key not in _known:
            world = self._made(None)
            _known[key] = _Facts(world.action_space, tuple(world.metadata.get("render_modes") or ()))
            world.close()
        return _known[key]

    @property
    def _start(self) -> int:
        space = self._facts.action_space
        return int(space.start) if isinstance(space, Discrete) else 0

    @cached_property
    def _act(self) -> ToolSchema | None:
        space = self._facts.action_space
        if isinstance(space, Text | TextSpace):
            return None
        if not isinstance(space, Discrete):
            raise UserError(
                f"{self.gym_id} takes actions of {space}; only discrete and text actions can be adopted, "
                "so wrap it into one that takes those."
            )
        if self._actions and len(self._actions) != space.n:
            raise UserError(
                f"{self.gym_id} has {space.n} actions, got {len(self._actions)} names; name each one."
            )
        last = int(space.start + space.n) - 1
        definition: dict[str, JSON] = {"type": "integer", "minimum": int(space.start), "maximum": last}
        known = f"a number from {space.start} to {last}"
        if self._actions:
            definition = {"type": "string", "enum": list(self._actions)}
            known = f"one of {', '.join(self._actions)}"
        parameters: dict[str, JSON] = {
            "type": "object",
            "properties": {"action": definition},
            "required": ["action"],
            "additionalProperties": False,
        }
        return ToolSchema(ACT, f"Do something: {known}.", parameters)

    def _called(self, one: ToolCall) -> Step:
        self.counts["tool_calls"] += 1

        def message(text: str) -> Message:
            return Message("tool", text, tool_call_id=one.id, name=one.name)

        if one.arguments is None:
            self.counts["malformed_calls"] += 1
            return self._idle(message(one.error or ""))
        if one.name != ACT:
            self.counts["unknown_tools"] += 1
            return self._idle(message(f"There is no tool {one.name[:40]!r}; there is `{ACT}`."))
        action = self._number(one.arguments)
        if action is None:
            self.counts["rejected_calls"] += 1
            assert self._act is not None
            return self._idle(message(f"That is no action. {self._act.description}"))
        return self._moved(message, action)

    def _number(self, arguments: Mapping[str, JSON]) -> int | None:
        given = arguments.get("action")
        if self._actions:
            return self._actions.index(given) + self._start if given in self._actions else None
        known = isinstance(given, int) and not isinstance(given, bool) and given in self._facts.action_space
        return int(str(given)) if known else None

    def _idle(self, said: Message) -> Step:
        self.counts["idle_turns"] += 1
        return Step.going(said)

    def _moved(self, message: Callable[[str], Message], action: int | str) -> Step:
        observation, reward, terminated, truncated, _ = self._world.step(action)
        self._return += float(reward)
        paid: float | None = float(reward)
        if self._returns is not None:
            paid = self._share() if terminated else None
        return Step((message(self._told(observation)),), paid, bool(terminated), bool(truncated), {})

    def _share(self) -> float:
        assert self._returns is not None
        worst, best = self._returns
        return min(1.0, max(0.0, (self._return - worst) / (best - worst)))

    def _told(self, observation: object) -> str:
        if self._describe is not None:
            return self._describe(observation)
        if self._world.render_mode == "ansi":
            return _COLOURED.sub(r"[\1]", str(self._world.render())).strip()
        return str(observation)

    def _made(self, render_mode: str | None) -> World:
        spec = copy(_spec(self.gym_id))
        mode = {} if render_mode is None else {"render_mode": render_mode}
        spec.kwargs = {**spec.kwargs, **self._gym_kwargs, **mode}
        return gymnasium.make(spec)


def _spec(gym_id: str) -> gymnasium.envs.registration.EnvSpec:
    try:
        return gymnasium.spec(gym_id)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise UserError(f"Gymnasium has no environment `{gym_id}`: {error}") from None


def _seed(task: Task) -> int:
    seed = task.metadata["seed"]
    assert isinstance(seed, int)
    return seed


@lru_cache(maxsize=64)
def _tasks(rules: str, split: str) -> tuple[Task, ...]:
    first = _FIRST_SEED[split]
    plain = Task("", (Message("user", rules),), None, {}, split)
    return tuple(
        replace(plain, id=f"{split}-{number}", metadata={"seed": first + number})
        for number in range(NUM_TASKS[split])
    )
