"""Environments of several agents, which act in turns or at the same time; and a view of one agent as an
environment of one."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar, TypeAlias, cast

from agentrl.envs.agents import ScriptedAgent
from agentrl.envs.base import AnyScript, BaseEnv, Env, Script, corpus_of
from agentrl.envs.boundary import acting_in, call_close, call_joint_reset, call_joint_step
from agentrl.envs.declarations import Conversions, as_names
from agentrl.errors import StageError, UserError, did_you_mean
from agentrl.types import (
    JSON,
    JointStep,
    Message,
    Observation,
    Step,
    Task,
    ToolStats,
    added,
)
from agentrl.types.seams import Session, ToolSchema


class MultiAgentEnv(BaseEnv):
    """One episode of an environment with several agents; `BaseEnv` lists what else a subclass sets.

    possible_agents: the names of all agents, in a fixed order; each is a role of its own, and siblings are
        compared within a role.
    scripted_agents: those that are a part of the world, such as a user: their `opponent` scripts play them,
        unless `opponents` names another player.
    acting: the agents whose turn it is; reset() and step() set it. A single one makes a game in turns
        (PettingZoo's AEC), several act at the same time (its parallel API).

        class Guess(MultiAgentEnv):
            possible_agents = ("thinker", "guesser")

            async def reset(self, task, *, seed):
                self.acting = ("thinker",)
                return {"thinker": task.prompt}, {}

            async def step(self, actions):
                if self.acting == ("thinker",):
                    self.acting = ("guesser",)
                    return JointStep.going({"guesser": (Message("user", actions["thinker"].text),)})
                right = float(actions["guesser"].text == self.number)
                return JointStep.finished({"thinker": right, "guesser": right})
    """

    _conversions: ClassVar[Conversions] = {
        **BaseEnv._conversions,
        "possible_agents": as_names,
        "scripted_agents": as_names,
    }

    group = "agents"
    scripted_agents: Sequence[str] = ()
    acting: Collection[str] = ()

    @property
    @abstractmethod
    def possible_agents(self) -> Sequence[str]:
        """The names of all agents, in a fixed order; a subclass may set a plain attribute."""

    def tools_of(self, agent: str) -> Sequence[ToolSchema]:
        """The tools on offer to one agent; read after reset."""
        del agent
        return ()

    @property
    def tool_schemas(self) -> Sequence[ToolSchema]:
        """The tools on offer to any agent, each once."""
        every = {tool.name: tool for agent in self.possible_agents for tool in self.tools_of(agent)}
        return tuple(every.values())

    @abstractmethod
    async def reset(self, task: Task, *, seed: int) -> tuple[Mapping[str, Observation], Mapping[str, JSON]]:
        """Begin `task`; return the complete first prompt of every agent that acts now. Set `acting`.

        The episode loop has called seed_rng(seed) before.
        """

    @abstractmethod
    async def step(self, actions: Mapping[str, Message]) -> JointStep:
        """Answer one message of each agent whose turn it was, and set `acting`.

        An observation of an agent whose turn it is not is delivered with its next turn.
        """

    def save_records(self) -> dict[str, JSON] | None:
        """Also whose turn it is."""
        records = super().save_records()
        return None if records is None else {**records, "acting": list(acting_in(self))}

    def load_records(self, records: Mapping[str, JSON]) -> None:
        """Also whose turn it is."""
        super().load_records(records)
        self.acting = tuple(cast(list[str], records["acting"]))

    def expert_score_of(self, agent: str) -> float:
        """The mean score of an agent's expert against the `opponent` scripts of the others."""
        del agent
        return self.expert_score

    def chance_score_of(self, agent: str) -> float:
        """The mean score of an agent without any knowledge of the task."""
        del agent
        return self.chance_score

    @property
    def has_expert(self) -> bool:
        """Whether it has an expert, without making one."""
        return type(self).expert is not MultiAgentEnv.expert

    def expert(self, task: Task, agent: str, prompt: str) -> Script:
        """A script that plays one agent well: the gold policy of checks and demonstrations.

        prompt: the text that the agent reads before its first turn.

        Raises:
            UserError: this environment has none.
        """
        del task, prompt
        name = self.id or type(self).__name__
        raise UserError(f"{name} has no expert for {agent}; write its `expert(task, agent, prompt)` method.")

    def demonstrator(self, task: Task, agent: str, prompt: str, rng: random.Random) -> Script:
        """A script whose turns a warm start imitates: the expert; a subclass may add noise from `rng`."""
        del rng
        return self.expert(task, agent, prompt)

    def opponent(self, task: Task, agent: str, prompt: str, rng: random.Random) -> Script:
        """A script that plays one agent against, or with, agents of a model: by default the demonstrator."""
        return self.demonstrator(task, agent, prompt, rng)

    def scripted(self, task: Task, agent: str, rng: random.Random) -> ScriptedAgent:
        """The `opponent` script of an agent as an agent."""
        return ScriptedAgent(lambda prompt: self.opponent(task, agent, prompt, rng))


AnyEnv: TypeAlias = Env | MultiAgentEnv
"""An environment of one agent, or of several."""


class AgentView(Env):
    """One agent of an environment of several, as an environment of one: `opponent` scripts play the others.

    Checks, Gymnasium and all else that takes one agent then accept an environment of several.

    Raises:
        UserError: the environment has no agent of that name.
    """

    def __init__(self, env: MultiAgentEnv, agent: str) -> None:
        super().__init__()
        env.convert_attributes()
        check_agent(env, agent)
        self._env, self._agent = env, agent
        self._others: dict[str, ScriptedAgent] = {}
        self._unseen: dict[str, list[Message]] = {}
        self.id, self.limits, self.dialect = env.id, env.limits, env.dialect
        self.splits, self.breakdown, self.rewards = env.splits, env.breakdown, env.rewards
        self.expert_score, self.chance_score = env.expert_score_of(agent), env.chance_score_of(agent)
        self._prompt = ""
        # A reward from before the agent's first turn, which is added to that of its first step.
        self._early: float | None = None
        self.counts = env.counts

    def tasks(self, split: str) -> Sequence[Task]:
        """Those of the environment."""
        return self._env.tasks(split)

    @property
    def tool_schemas(self) -> Sequence[ToolSchema]:
        """The agent's tools."""
        return self._env.tools_of(self._agent)

    @property
    def tool_stats(self) -> Mapping[str, ToolStats]:
        """Those of the environment."""
        return self._env.tool_stats

    async def reset(self, task: Task, *, seed: int) -> tuple[Observation, Mapping[str, JSON]]:
        """Begin `task` and let the others act until it is the agent's turn.

        Raises:
            StageError: the others end the episode before that.
        """
        observations, info = await call_joint_reset(self._env, task, seed=seed)
        self._others = {
            name: self._env.scripted(task, name, random.Random(f"{seed}/{name}"))
            for name in self._env.possible_agents
            if name != self._agent
        }
        self._unseen = {}
        step = await self._until_turn(JointStep.going(observations), {})
        if step.terminated or step.truncated:
            raise StageError("reset", "invalid", f"the episode ends before the first turn of {self._agent}")
        self._prompt = "\n".join(message.text for message in step.observation)
        self._early = step.reward
        return step.observation, info

    async def step(self, action: Message) -> Step:
        """Answer the agent, after the others have acted up to its next turn."""
        step = await self._until_turn(await self._joint({self._agent: action}), {})
        early, self._early = self._early, None
        return step._replace(reward=added([early, step.reward]))

    async def close(self) -> None:
        """Close the environment and the scripts of the others."""
        for name, other in self._others.items():
            await other.close(name)
        await call_close(self._env)

    @property
    def has_expert(self) -> bool:
        """Whether the environment has one."""
        return self._env.has_expert

    def expert(self, task: Task) -> Script:
        """The expert of the agent; start it after reset().

        Raises:
            UserError: the environment has none.
        """
        if not self._env.has_expert:
            return self._env.expert(task, self._agent, "")
        return self._with_prompt(lambda prompt: self._env.expert(task, self._agent, prompt))

    def demonstrator(self, task: Task, rng: random.Random) -> Script:
        """The demonstrator of the agent; start it after reset()."""
        return self._with_prompt(lambda prompt: self._env.demonstrator(task, self._agent, prompt, rng))

    def _with_prompt(self, script: Callable[[str], AnyScript]) -> Script:
        async def begun() -> AnyScript:
            return script(self._prompt)

        # It is played as any other form of a script.
        return cast(Script, begun())

    def corpus(self) -> Sequence[str]:
        """Those of the environment."""
        return list(corpus_of(self._env))

    async def _joint(self, actions: dict[str, Message]) -> JointStep:
        for name in acting_in(self._env):
            if name != self._agent:
                session = Session(name, 0, None)
                observation = tuple(self._unseen.pop(name, []))
                act = await self._others[name].act(
                    observation, tools=self._env.tools_of(name), session=session
                )
                actions[name] = act.message
        return await call_joint_step(self._env, actions)

    async def _until_turn(self, step: JointStep, info: Mapping[str, JSON]) -> Step:
        rewards: list[float | None] = []
        while True:
            for name, observation in step.observations.items():
                self._unseen.setdefault(name, []).extend(observation)
            rewards.append(step.reward.get(self._agent) if isinstance(step.reward, Mapping) else step.reward)
            if step.terminated or step.truncated or self._agent in acting_in(self._env):
                observed = tuple(self._unseen.pop(self._agent, []))
                return Step(observed, added(rewards), step.terminated, step.truncated, step.info or info)
            step = await self._joint({})


def one_agent_of(make_env: Callable[[], AnyEnv], agent: str | None) -> Callable[[], Env]:
    """Makes environments of one agent: of an environment of several, an `AgentView`.

    agent: who acts there; None = the first.
    """

    def make() -> Env:
        env = make_env()
        if isinstance(env, Env):
            return env
        return AgentView(env, agent or env.possible_agents[0])

    return make


def check_agent(env: MultiAgentEnv, agent: str) -> None:
    """Check that an environment has an agent of that name.

    Raises:
        UserError: it has none.
    """
    if agent not in env.possible_agents:
        near = did_you_mean(agent, env.possible_agents)
        raise UserError(f"{env.id} has no agent `{agent}`.{near} It has {', '.join(env.possible_agents)}.")
