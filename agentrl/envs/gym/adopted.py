"""A `gymnasium.Env` as an environment of agentrl, in one line.

    register("FrozenLake-v0", GymEnv, gym_id="FrozenLake-v1", actions=("left", "down", "right", "up"))
    register("Fetch-v0", GymEnv, gym_id="minigrid:BabyAI-Pickup-v0", describe=my_text)

Discrete actions are a tool `act`, by name where `actions` has names and by number elsewhere; text actions
are the model's answers. Observations are text, rewards are those of the steps, and `terminated` and
`truncated` are Gymnasium's.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import NamedTuple, SupportsFloat, cast

import gymnasium
from gymnasium.spaces import Discrete, Text

from agentrl.envs.base import Env, Script
from agentrl.envs.gym.spaces import TextSpace
from agentrl.envs.values import text_of
from agentrl.errors import UserError
from agentrl.runtime.extras import missing_extra
from agentrl.tools.running import in_thread
from agentrl.types import JSON, Limits, Message, Observation, Step, Task, ToolCall, call, say
from agentrl.types.seams import ToolSchema

ACT = "act"
NUM_TASKS: Mapping[str, int] = {"train": 2000, "test": 500}
_FIRST_SEED: Mapping[str, int] = {"train": 0, "test": 1_000_000}
_TURNS_WITHOUT_LIMIT = 100
_COLOURED = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0m", re.DOTALL)

GymnasiumEnv = gymnasium.Env[object, object]
Planner = Callable[[object, int | str | None], int | str | None]
"""From an observation, and the action taken before it (None = it is the first), to the best action."""


class _Facts(NamedTuple):
    action_space: gymnasium.Space[object]
    render_modes: tuple[str, ...]


# Every episode creates an instance; its schemas are read before its world is created.
_facts_by_id: dict[tuple[str, str], _Facts] = {}


class WorldMaker(NamedTuple):
    """Makes worlds of one kind. gym_id, arguments: see `GymEnv`."""

    gym_id: str
    arguments: Mapping[str, object]

    def make(self, render_mode: str | None = None) -> GymnasiumEnv:
        """A world that has not begun."""
        spec = copy(_spec(self.gym_id))
        mode = {} if render_mode is None else {"render_mode": render_mode}
        spec.kwargs = {**spec.kwargs, **self.arguments, **mode}
        return gymnasium.make(spec)

    @property
    def facts(self) -> _Facts:
        """What all of them have in common."""
        key = self.gym_id, repr(sorted(self.arguments.items()))
        if key not in _facts_by_id:
            world = self.make()
            _facts_by_id[key] = _Facts(world.action_space, tuple(world.metadata.get("render_modes") or ()))
            world.close()
        return _facts_by_id[key]


class Actions:
    """The actions of a world, and how a model writes them: as calls of `act`, or as text.

    names: of discrete actions, in their order; without them they are numbers.
    space: of all actions. tool: `act`; None = actions are text.

    Raises:
        UserError: they are neither discrete nor text, or there are more or fewer names than actions.
    """

    def __init__(self, gym_id: str, space: gymnasium.Space[object], names: Sequence[str]) -> None:
        self.space, self._names = space, tuple(names)
        self._first = int(space.start) if isinstance(space, Discrete) else 0
        self.tool: ToolSchema | None = None
        if isinstance(space, Text | TextSpace):
            return
        if not isinstance(space, Discrete):
            raise UserError(
                f"{gym_id} takes actions of {space}; only discrete and text actions can be adopted, "
                "so wrap it into one that takes those."
            )
        if names and len(names) != space.n:
            raise UserError(f"{gym_id} has {space.n} actions, got {len(names)} names; name each one.")
        last = int(space.start + space.n) - 1
        definition: dict[str, JSON] = {"type": "integer", "minimum": self._first, "maximum": last}
        choices = f"a number from {space.start} to {last}"
        if names:
            definition = {"type": "string", "enum": list(names)}
            choices = f"one of {', '.join(names)}"
        parameters: dict[str, JSON] = {
            "type": "object",
            "properties": {"action": definition},
            "required": ["action"],
            "additionalProperties": False,
        }
        self.tool = ToolSchema(ACT, f"Do something: {choices}.", parameters)

    def called(self, arguments: Mapping[str, JSON]) -> int | None:
        """The action of a call of `act`; None = there is no such action."""
        action = arguments.get("action")
        if self._names:
            return self._names.index(action) + self._first if action in self._names else None
        is_number = isinstance(action, int) and not isinstance(action, bool)
        return int(str(action)) if is_number and action in self.space else None

    def message(self, action: int | str) -> Message:
        """The turn that takes an action."""
        if isinstance(action, str):
            return say(action)
        argument = self._names[action - self._first] if self._names else action
        return call(ACT, action=argument)


class Playthrough:
    """A world that is played, as text. taken: the actions so far. total: the sum of their rewards."""

    def __init__(self, world: GymnasiumEnv, describe: Callable[[object], str] | None) -> None:
        self._world, self._describe = world, describe
        self.taken: list[int | str] = []
        self.total = 0.0

    def start(self, seed: int) -> str:
        """Begin at a seed; the first observation."""
        observation, _ = self._world.reset(seed=seed)
        self.total, self.taken = 0.0, []
        return self.text_of(observation)

    def take(self, action: int | str) -> tuple[object, SupportsFloat, bool, bool, dict[str, object]]:
        """Take an action; Gymnasium's five values."""
        result = self._world.step(action)
        self.taken.append(action)
        self.total += float(result[1])
        return result

    def text_of(self, observation: object) -> str:
        """The text of an observation; see `describe` of `GymEnv`."""
        if self._describe is not None:
            return self._describe(observation)
        if self._world.render_mode == "ansi":
            return _COLOURED.sub(r"[\1]", str(self._world.render())).strip()
        return text_of(observation)

    def close(self) -> None:
        """Close the world."""
        self._world.close()


class GymEnv(Env):
    """Plays an environment of Gymnasium's. A task is a seed, which fixes the world and all of its randomness.

    gym_id: its id in Gymnasium, after the name of the module that registers it where Gymnasium has to import
        one: `minigrid:BabyAI-Pickup-v0`. gym_kwargs: its arguments.
    actions: names of the discrete actions, in their order.
    rules: the text before the first observation.
    describe: the text of an observation. Without it: the world's own "ansi" rendering, with coloured parts
        in brackets, or else the str() of the observation, with all numbers of its arrays.
    returns: (worst, best). The episode is then rewarded once, when the world terminates, with its return
        scaled from [worst, best] to [0, 1]. A game that did not terminate is worth nothing: where rewards
        can be negative, stopping early would otherwise be rewarded.

    inline: an attribute of the class: its steps take microseconds and need no thread of their own.

    A turn without an action gets a sentence as its answer and is counted as `invalid_moves`. Unless the class
    sets `limits`, max_turns is the number of steps of Gymnasium's own time limit, or 100.

    Raises:
        MissingExtraError: the module belongs to an extra that is not installed.
        UserError: Gymnasium has no such environment, or its actions are neither discrete nor text.
    """

    group = "games"
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
        self._maker = WorldMaker(gym_id, gym_kwargs)
        self._action_names = tuple(actions)
        self._rules = rules
        self._describe = describe
        self._returns = returns
        self._thread = None if self.inline else gym_id
        if type(self).limits is Env.limits:
            steps = _spec(gym_id).max_episode_steps
            self.limits = Limits(max_turns=steps or _TURNS_WITHOUT_LIMIT, max_tokens=None)

    def policy(self, observation: object) -> int | str | None:
        """The best action for an observation; None = no expert (the default)."""
        del observation
        return None

    def planner(self, world: GymnasiumEnv) -> Planner:
        """The expert of one game, which may read the state of `world`; by default `policy`, which cannot."""
        del world
        return lambda observation, _: self.policy(observation)

    @property
    def has_expert(self) -> bool:
        """Whether the class has a policy, a planner, or an expert of its own."""
        cls, base = type(self), GymEnv
        return (
            cls.policy is not base.policy or cls.planner is not base.planner or cls.expert is not base.expert
        )

    def tasks(self, split: str) -> Sequence[Task]:
        """One task per seed; no seed is in two splits."""
        return _tasks(self._rules, split)

    @property
    def tool_schemas(self) -> Sequence[ToolSchema]:
        """The tool `act`, or none where actions are text."""
        return () if self._actions.tool is None else (self._actions.tool,)

    async def reset(self, task: Task, *, seed: int) -> tuple[Observation, Mapping[str, JSON]]:
        """Begin at the task's seed; `seed` has no effect."""
        self.seed_rng(seed)
        first = await in_thread(lambda: self._playthrough.start(_seed(task)), self._thread)
        rules = [message.text for message in task.prompt if message.text]
        return (Message("user", "\n\n".join([*rules, first])),), {}

    async def step(self, action: Message) -> Step:
        """Apply the actions of the calls in their order, until the world ends."""
        return await in_thread(lambda: self._answer(action), self._thread)

    def save_state(self) -> Mapping[str, JSON]:
        """The actions so far: the task's seed fixes all else."""
        return {"actions": list(self._playthrough.taken)}

    async def load_state(self, state: Mapping[str, JSON]) -> None:
        """Take the same actions again."""
        actions = cast(list[int | str], state["actions"])
        await in_thread(lambda: [self._playthrough.take(action) for action in actions], self._thread)

    async def close(self) -> None:
        """Close the world."""
        if "_playthrough" in vars(self):
            self._playthrough.close()

    def expert(self, task: Task) -> Script:
        """Plays `planner` on a world of its own with the same seed, hence the same random outcomes.

        Raises:
            UserError: this environment has no policy.
        """
        if not self.has_expert:
            raise UserError(
                f"{self.id or self.gym_id} has no expert; write its `policy(observation)` method."
            )
        return self.played(task)

    @cached_property
    def _actions(self) -> Actions:
        return Actions(self.gym_id, self._maker.facts.action_space, self._action_names)

    @cached_property
    def _playthrough(self) -> Playthrough:
        is_rendered = self._describe is None and "ansi" in self._maker.facts.render_modes
        return Playthrough(self._maker.make("ansi" if is_rendered else None), self._describe)

    def _answer(self, action: Message) -> Step:
        if self._actions.tool is None:
            text = "".join([action.text, *(tool_call.raw for tool_call in action.tool_calls)])
            if text not in self._actions.space:
                return self._idle(Message("user", f"That is no action; {self._actions.space} is asked for."))
            return self._step_world(lambda answer: Message("user", answer), text)
        if not action.tool_calls:
            return self._idle(
                Message("user", f"Nothing was done; call `{ACT}`. {self._actions.tool.description}")
            )
        done = Step.going()
        for tool_call in action.tool_calls:
            step = self._call(tool_call)
            rewards = [reward for reward in (done.reward, step.reward) if reward is not None]
            observation = (*done.observation, *step.observation)
            done = step._replace(observation=observation, reward=sum(rewards) if rewards else None)
            if done.terminated or done.truncated:
                break
        return done

    def played(self, task: Task, deviate: Callable[[int | str], int | str] | None = None) -> Script:
        """The expert's script. deviate: from the best action to the one that is taken, for demonstrations."""
        world = self._maker.make()
        ended = False
        try:
            observation, _ = world.reset(seed=_seed(task))
            best_action = self.planner(world)
            taken: int | str | None = None
            while not ended:
                action = best_action(observation, taken)
                assert action is not None
                taken = action if deviate is None else deviate(action)
                yield self._actions.message(taken)
                observation, _, terminated, truncated, _ = world.step(taken)
                ended = terminated or truncated
        finally:
            world.close()

    def _call(self, tool_call: ToolCall) -> Step:
        self.counts["tool_calls"] += 1

        def message(text: str) -> Message:
            return Message("tool", text, tool_call_id=tool_call.id, name=tool_call.name)

        if tool_call.arguments is None:
            self.counts["malformed_calls"] += 1
            return self._idle(message(tool_call.error or ""))
        if tool_call.name != ACT:
            self.counts["unknown_tools"] += 1
            return self._idle(message(f"There is no tool {tool_call.name[:40]!r}; there is `{ACT}`."))
        action = self._actions.called(tool_call.arguments)
        if action is None:
            self.counts["rejected_calls"] += 1
            assert self._actions.tool is not None
            return self._idle(message(f"That is no action. {self._actions.tool.description}"))
        return self._step_world(message, action)

    def _idle(self, answer: Message) -> Step:
        self.counts["invalid_moves"] += 1
        return Step.going(answer)

    def _step_world(self, message: Callable[[str], Message], action: int | str) -> Step:
        observation, reward, terminated, truncated, _ = self._playthrough.take(action)
        step_reward: float | None = float(reward)
        if self._returns is not None:
            step_reward = self._share() if terminated else None
        return Step(
            (message(self._playthrough.text_of(observation)),),
            step_reward,
            bool(terminated),
            bool(truncated),
            {},
        )

    def _share(self) -> float:
        assert self._returns is not None
        worst, best = self._returns
        return min(1.0, max(0.0, (self._playthrough.total - worst) / (best - worst)))


def _spec(gym_id: str) -> gymnasium.envs.registration.EnvSpec:
    module, _, name = gym_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        return gymnasium.spec(name)
    except ModuleNotFoundError as error:
        unknown = UserError(f"Gymnasium has no environment `{gym_id}`: {error}")
        raise missing_extra(error, f"the environment {name}") or unknown from None
    except gymnasium.error.Error as error:
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
