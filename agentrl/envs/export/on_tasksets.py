"""An environment here as a taskset of verifiers 0.4 (`verifiers.v1`): an exported package has these classes.

    EpisodeTaskset    its tasks; the package's own class names the environment
    EpisodeHarness    plays an episode in the process of the evaluation; what the model says goes through
                      verifiers, which records its tokens
    EpisodeEnv        no sandbox is made for a run: environments here bring their own

What happens in an episode, and its score, are those of `play`. A failed one is an error of its trace: never a
reward of 0. The command `eval` of 0.3 takes the same classes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import verifiers.v1 as vf
from pydantic import Field
from typing_extensions import override

from agentrl.engine.chat.agent import ChatAgent, openai_content
from agentrl.engine.chat.endpoint import ChatEndpoint
from agentrl.engine.chat.settings import ChatSettings
from agentrl.envs.export.driven import DrivenEpisode
from agentrl.envs.export.world import ExportedWorld
from agentrl.errors import EndpointError, UserError
from agentrl.types import JSON, Task

if TYPE_CHECKING:
    from verifiers import Environment

_TURN_S = 86_400.0
"""Longest wait for a turn (seconds): verifiers has its own deadlines, which cancel it."""


class EpisodeState(vf.State):
    """What a rollout leaves: the score of its episode, None = none was played, and its parts by name."""

    score: float | None = None
    parts: dict[str, float] = Field(default_factory=dict)


class EpisodeData(vf.TaskData):
    """A task and its world.

    env_id, arguments: of the environment. split, number: of the task in it. seed: of the world.
    """

    env_id: str
    arguments: dict[str, JSON]
    split: str
    number: int
    seed: int


class EpisodeTask(vf.Task[EpisodeData, EpisodeState]):
    """Scored by its environment; the parts are metrics."""

    @vf.reward
    async def total(self, trace: vf.Trace) -> float:
        """The total of the episode's verdict.

        Raises:
            UserError: another harness has played.
        """
        if trace.state.score is None:
            raise UserError("no episode was played; leave the harness to the package of the taskset.")
        return float(trace.state.score)

    @vf.metric
    async def parts(self, trace: vf.Trace) -> Mapping[str, float]:
        """The parts of the verdict, unweighted."""
        return dict(trace.state.parts)


class EpisodeConfig(vf.TasksetConfig):
    """split: whose tasks are played. seed: a task has one world, whose seed is this plus its number.

    arguments: of the environment, instead of those of the package.
    """

    split: str = ""
    seed: int = 0
    arguments: dict[str, JSON] = Field(default_factory=dict)


class EpisodeTaskset(vf.Taskset[EpisodeTask, EpisodeConfig]):
    """A subclass sets the environment.

    env_id: of an environment here. env_kwargs: its arguments.

    Raises:
        UserError: a system prompt is given, which would change nothing; from load(): there is no such
            environment, argument or split.
    """

    env_id: ClassVar[str] = ""
    env_kwargs: ClassVar[Mapping[str, JSON]] = {}

    def __init__(self, config: EpisodeConfig) -> None:
        super().__init__(config)
        if config.system_prompt is not None:
            raise UserError("the environment says what the model reads; leave system_prompt out.")

    @classmethod
    def load_environment(
        cls, split: str = "", eval_split: str = "", seed: int = 0, **kwargs: JSON
    ) -> Environment:
        """The environment of verifiers 0.3, which looks for a function of this name in the package."""
        from agentrl.envs.export.on_verifiers import load

        arguments = {**cls.env_kwargs, **kwargs}
        return load(cls.env_id, split=split, eval_split=eval_split, seed=seed, **arguments)

    @override
    def load(self) -> Iterator[EpisodeTask]:
        """The tasks of the split, in their order; without one, those of the training split."""
        arguments = {**self.env_kwargs, **self.config.arguments}
        world = _world(self.env_id, json.dumps(arguments))
        split = self.config.split or world.splits[0]
        for number, task in enumerate(_tasks(world, split)):
            data = EpisodeData(
                id=task.id,
                prompt=_listed(task),
                env_id=self.env_id,
                arguments=arguments,
                split=split,
                number=number,
                seed=self.config.seed + number,
            )
            yield EpisodeTask(data, self.config.task)


class EpisodeHarness(vf.Harness[vf.HarnessConfig]):
    """Plays the episode of a task. A limit of verifiers cuts it: it is scored as it is."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    @override
    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: EpisodeData,
    ) -> vf.ProgramResult:
        """Play it, and leave its score in the state.

        Raises:
            EndpointError: the model's endpoint failed.
            StageError: the world or a reward failed.
        """
        del runtime, mcp_urls
        world = _world(data.env_id, json.dumps(data.arguments))
        task = _tasks(world, data.split)[data.number]
        # verifiers decides how it samples.
        settings = ChatSettings(ctx.model, omit=("temperature", "seed"))
        connection = ChatEndpoint(url=endpoint, key=secret, timeout_s=_TURN_S)
        episode = DrivenEpisode(world.make(), task, seed=data.seed)
        async with connection.connected() as client:
            agent = ChatAgent(client, settings)
            try:
                await _played(episode, agent, trace)
            finally:
                # Also where a deadline of verifiers has cancelled the turn.
                verdict = await episode.end()
                trace.state.score, trace.state.parts = verdict.total, dict(verdict.parts)
        return vf.ProgramResult(0, "", "")


class EpisodeEnvConfig(vf.EnvConfig):
    """agent: who plays, in the process of the evaluation."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class EpisodeEnv(vf.Env[EpisodeEnvConfig]):
    """One agent plays the task."""

    @override
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Play it."""
        await agents.agent.run(task)


async def _played(episode: DrivenEpisode, agent: ChatAgent, trace: vf.Trace) -> None:
    observation = await episode.begin()
    while observation is not None:
        try:
            act = await agent.act(observation, tools=episode.tools, session=episode.session)
        except EndpointError:
            if trace.stop_condition is None:
                raise
            return
        observation = await episode.act(act.message, act.finish)


def _listed(task: Task) -> JSON:
    """What a listing shows of a task; its episode shows the first observation."""
    messages: list[JSON] = [
        {"role": message.role, "content": openai_content(message)}
        for message in task.prompt
        if message.role in ("system", "user")
    ]
    # Tasks without a prompt are refused.
    return messages or task.id


@lru_cache(maxsize=16)
def _world(env_id: str, arguments: str) -> ExportedWorld:
    return ExportedWorld(env_id, json.loads(arguments))


@lru_cache(maxsize=16)
def _tasks(world: ExportedWorld, split: str) -> Sequence[Task]:
    return world.tasks(split)
