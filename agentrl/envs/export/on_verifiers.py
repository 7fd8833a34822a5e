"""An environment here as one of verifiers 0.3: `load` is what an exported package returns.

verifiers plays it with its own loop, clients and evaluation. What happens in an episode, and its score, are
those of `play`. verifiers 0.4 has no environments of this kind any more (`verifiers.MultiTurnEnv`): its
tasksets are in `on_tasksets`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import verifiers as vf
from datasets import Dataset
from verifiers.types import Messages, State, Tool, TrajectoryStep
from verifiers.utils.message_utils import normalize_messages

from agentrl.engine.chat.agent import Transcript, openai_content
from agentrl.engine.chat.wire import ChatReply, read_reply
from agentrl.envs.export.driven import DrivenEpisode
from agentrl.envs.export.world import ExportedWorld
from agentrl.errors import StageError
from agentrl.types import JSON, Observation, Restart, Task

_EPISODE, _TRANSCRIPT, _SCORE = "agentrl_episode", "agentrl_transcript", "agentrl_score"


def load(
    env_id: str, *, split: str = "", eval_split: str = "", seed: int = 0, **kwargs: JSON
) -> vf.Environment:
    """An environment of verifiers.

    env_id: of an environment here. split, eval_split: the tasks of its two data sets; "" = those to train and
    to test on. seed: a task has one world, whose seed is this plus the number of the task. kwargs: arguments
    of the environment.

    Raises:
        UserError: there is no such environment, argument or split.
    """
    world = ExportedWorld(env_id, kwargs)
    train, test = split or world.splits[0], eval_split or world.splits[1]
    return ExportedEnv(world, {train: world.tasks(train)}, {test: world.tasks(test)}, seed)


class ExportedEnv(vf.MultiTurnEnv):
    """Its rollouts are episodes. The parts of a score are the state column `parts`."""

    def __init__(
        self,
        world: ExportedWorld,
        train: Mapping[str, Sequence[Task]],
        test: Mapping[str, Sequence[Task]],
        seed: int,
    ) -> None:
        self._world, self._tasks, self._seed = world, {**train, **test}, seed
        rubric = vf.Rubric(funcs=[score])
        super().__init__(dataset=_rows(train), eval_dataset=_rows(test), rubric=rubric, env_id=world.env_id)

    async def setup_state(self, state: State) -> State:
        """Begin the episode; its first observation is the prompt."""
        number = state["info"]["number"]
        task = self._tasks[state["info"]["split"]][number]
        state[_TRANSCRIPT] = Transcript()
        episode = state[_EPISODE] = DrivenEpisode(self._world.make(), task, seed=self._seed + number)
        with _as_theirs():
            observation = await episode.begin()
        state["prompt"] = self._shown(state, observation)[0]
        return state

    async def get_prompt_messages(self, state: State) -> Messages:
        """The conversation with the world's answer to the last turn; another one where it is rewritten."""
        if not state["trajectory"]:
            return state["prompt"]
        last = state["trajectory"][-1]
        reply = _reply(last)
        state[_TRANSCRIPT].add_turn(reply.body, [call.id for call in reply.message.tool_calls])
        with _as_theirs():
            observation = await state[_EPISODE].act(reply.message, reply.finish)
        messages, restart = self._shown(state, observation)
        return messages if restart is not None else [*last["prompt"], *last["completion"], *messages]

    async def env_response(self, messages: Messages, state: State, **kwargs: object) -> Messages:
        """`get_prompt_messages` does it."""
        raise NotImplementedError

    @vf.cleanup
    async def end_episode(self, state: State) -> None:
        """End the episode, cut it where verifiers has stopped it, and score it."""
        episode = state.get(_EPISODE)
        if episode is None:
            return
        try:
            verdict = await episode.end()
        except StageError as error:
            state["error"] = state["error"] or vf.InfraError(str(error))
        else:
            state[_SCORE], state["parts"] = verdict.total, dict(verdict.parts)

    def _shown(self, state: State, observation: Observation | None) -> tuple[Messages, Restart | None]:
        """The messages of an observation; without one, the rollout is marked as ended."""
        if observation is None:
            state["final_env_response"] = []
            return [], None
        transcript = state[_TRANSCRIPT]
        num_before = len(transcript.messages)
        restart = transcript.add_observation(observation)
        state["tool_defs"] = [
            Tool(name=tool.name, description=tool.description, parameters=dict(tool.parameters))
            for tool in state[_EPISODE].tools
        ]
        messages = transcript.messages if restart is not None else transcript.messages[num_before:]
        return normalize_messages(list(messages)), restart


def score(state: State) -> float:
    """The total of the episode's verdict. A failed episode has none: verifiers has its error."""
    return float(state.get(_SCORE, 0.0))


def _rows(tasks: Mapping[str, Sequence[Task]]) -> Callable[[], Dataset]:
    def build() -> Dataset:
        return Dataset.from_list(
            [
                {
                    # What is shown is the first observation; rows without a prompt are refused.
                    "prompt": [
                        {"role": message.role, "content": openai_content(message)} for message in task.prompt
                    ]
                    or [{"role": "user", "content": task.id}],
                    "answer": task.answer or "",
                    "info": {"split": split, "number": number},
                }
                for split, listed in tasks.items()
                for number, task in enumerate(listed)
            ]
        )

    return build


def _reply(step: TrajectoryStep) -> ChatReply:
    """A turn, read as the reply of an endpoint is."""
    said = step["completion"][-1].model_dump()
    calls = [
        {"id": call["id"], "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in said.get("tool_calls") or ()
    ]
    message = {**{name: said.get(name) for name in ("content", "reasoning_content")}, "tool_calls": calls}
    reason = "length" if step["is_truncated"] else "stop"
    return read_reply(json.dumps({"choices": [{"message": message, "finish_reason": reason}]}).encode())


@contextmanager
def _as_theirs() -> Iterator[None]:
    try:
        yield
    except StageError as error:
        raise vf.InfraError(str(error)) from error
