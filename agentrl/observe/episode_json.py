"""Episodes and verdicts as JSON, without loss, for people as much as for programs.

One episode, shortened:

    {"id": "g3-0", "env_id": "HopSearch-v0", "task": {"id": "rl/3", "prompt": [
       {"role": "user", "content": "Where was P born?"}], "answer": "Torek"}, "seed": 7,
     "limits": {"max_turns": 5}, "trajectories": [{"turns": [{"observation": [...],
       "action": {"role": "assistant", "tool_calls": [{"name": "search", "arguments": {"query": "P"}}]},
       "tokens": {"world_ids": [4, 9], "policy_ids": [12, 3], "logprobs": [-0.1, -2.5],
         "versions": [8, 8], "finish": "stop", "matched": 3}}]}],
     "step_rewards": [null, 1.0], "ending": "completed", "counts": {"tool_calls": 1}, "seconds": 0.2}

Author and mask need no arrays of their own: `world_ids` are the world's and mask 0,
`policy_ids` are the policy's and mask 1. A logprob has just the digits that give the same
float32 back. Fields at their defaults are left out of messages, calls, tasks and tokens.
"""

from __future__ import annotations

from typing import NotRequired, TypeAlias, TypedDict

import numpy as np

from agentrl.types import (
    JSON,
    Completion,
    Ending,
    Episode,
    Failure,
    Finish,
    FloatArray,
    Limits,
    Message,
    Restart,
    RewardParts,
    Role,
    Task,
    ToolCall,
    Trajectory,
    Turn,
    TurnTokens,
    Verdict,
)


class ToolCallJSON(TypedDict, total=False):
    """A ToolCall."""

    name: str
    arguments: dict[str, JSON]
    raw: str
    id: str
    error: str


class _RoleJSON(TypedDict):
    role: Role


class MessageJSON(_RoleJSON, total=False):
    """A Message."""

    content: str
    reasoning: str
    tool_calls: list[ToolCallJSON]
    tool_call_id: str
    name: str


class _TaskCoreJSON(TypedDict):
    id: str
    prompt: list[MessageJSON]


class TaskJSON(_TaskCoreJSON, total=False):
    """A Task."""

    answer: str
    metadata: dict[str, JSON]
    split: str


class _TurnTokensCoreJSON(TypedDict):
    world_ids: list[int]
    policy_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: str


class TurnTokensJSON(_TurnTokensCoreJSON, total=False):
    """TurnTokens and their Completion, side by side."""

    matched: str | int
    cached_tokens: int


class _TurnCoreJSON(TypedDict):
    observation: list[MessageJSON]
    action: MessageJSON


class TurnJSON(_TurnCoreJSON, total=False):
    """A Turn."""

    tokens: TurnTokensJSON


class TrajectoryJSON(TypedDict):
    """A Trajectory."""

    turns: list[TurnJSON]
    parent: NotRequired[int]
    reason: NotRequired[str]


class LimitsJSON(TypedDict):
    """Limits."""

    max_turns: int
    max_tokens: int | None
    reset_timeout_s: float | None
    tool_timeout_s: float | None
    step_timeout_s: float | None
    reward_timeout_s: float | None
    episode_timeout_s: float | None
    max_tool_chars: int | None


class FailureJSON(TypedDict):
    """A Failure."""

    stage: str
    kind: str
    detail: str


StepRewardJSON: TypeAlias = float | dict[str, float] | None
"""A step's reward: a number, its named parts, or null where the step was not scored."""


class EpisodeJSON(TypedDict):
    """An Episode."""

    id: str
    env_id: str
    task: TaskJSON
    seed: int
    limits: LimitsJSON
    trajectories: list[TrajectoryJSON]
    step_rewards: list[StepRewardJSON]
    ending: str
    failure: FailureJSON | None
    counts: dict[str, int]
    seconds: float


class VerdictJSON(TypedDict):
    """A Verdict."""

    episode_id: str
    scorer: str
    total: float
    parts: dict[str, float]
    turn_rewards: list[float | None]


def episode_to_json(episode: Episode) -> EpisodeJSON:
    """The episode as plain values."""
    return {
        "id": episode.id,
        "env_id": episode.env_id,
        "task": _task_to_json(episode.task),
        "seed": episode.seed,
        "limits": _limits_to_json(episode.limits),
        "trajectories": [_trajectory_to_json(trajectory) for trajectory in episode.trajectories],
        "step_rewards": [_reward_to_json(reward) for reward in episode.step_rewards],
        "ending": episode.ending.value,
        "failure": _failure_to_json(episode.failure) if episode.failure else None,
        "counts": dict(episode.counts),
        "seconds": episode.seconds,
    }


def episode_from_json(found: EpisodeJSON) -> Episode:
    """The episode that `episode_to_json` wrote.

    Raises:
        KeyError: a field is missing.
        ValueError: a value breaks a promise of the nouns.
    """
    failure = found["failure"]
    return Episode(
        id=found["id"],
        env_id=found["env_id"],
        task=_task_from_json(found["task"]),
        seed=found["seed"],
        limits=Limits(**found["limits"]),
        trajectories=tuple(_trajectory_from_json(trajectory) for trajectory in found["trajectories"]),
        step_rewards=tuple(_reward_from_json(reward) for reward in found["step_rewards"]),
        ending=Ending(found["ending"]),
        failure=None if failure is None else Failure(**failure),
        counts=found["counts"],
        seconds=found["seconds"],
    )


def verdict_to_json(verdict: Verdict) -> VerdictJSON:
    """The verdict as plain values."""
    return {
        "episode_id": verdict.episode_id,
        "scorer": verdict.scorer,
        "total": verdict.total,
        "parts": dict(verdict.parts),
        "turn_rewards": list(verdict.turn_rewards),
    }


def verdict_from_json(found: VerdictJSON) -> Verdict:
    """The verdict that `verdict_to_json` wrote.

    Raises:
        KeyError: a field is missing.
        ValueError: the total is not finite.
    """
    return Verdict(
        found["episode_id"], found["scorer"], found["total"], found["parts"], tuple(found["turn_rewards"])
    )


def _trajectory_to_json(trajectory: Trajectory) -> TrajectoryJSON:
    found: TrajectoryJSON = {"turns": [_turn_to_json(turn) for turn in trajectory.turns]}
    if trajectory.parent is not None and trajectory.reason is not None:
        found |= {"parent": trajectory.parent, "reason": trajectory.reason.value}
    return found


def _trajectory_from_json(found: TrajectoryJSON) -> Trajectory:
    turns = tuple(_turn_from_json(turn) for turn in found["turns"])
    reason = found.get("reason")
    return Trajectory(turns, found.get("parent"), None if reason is None else Restart(reason))


def _reward_to_json(reward: float | None) -> StepRewardJSON:
    return dict(reward.parts) if isinstance(reward, RewardParts) else reward


def _reward_from_json(found: StepRewardJSON) -> float | None:
    return RewardParts(found) if isinstance(found, dict) else found


def _failure_to_json(failure: Failure) -> FailureJSON:
    return {"stage": failure.stage, "kind": failure.kind, "detail": failure.detail}


def _limits_to_json(limits: Limits) -> LimitsJSON:
    return {
        "max_turns": limits.max_turns,
        "max_tokens": limits.max_tokens,
        "reset_timeout_s": limits.reset_timeout_s,
        "tool_timeout_s": limits.tool_timeout_s,
        "step_timeout_s": limits.step_timeout_s,
        "reward_timeout_s": limits.reward_timeout_s,
        "episode_timeout_s": limits.episode_timeout_s,
        "max_tool_chars": limits.max_tool_chars,
    }


def _task_to_json(task: Task) -> TaskJSON:
    plain: TaskJSON = {"id": task.id, "prompt": [_message_to_json(m) for m in task.prompt]}
    if task.answer is not None:
        plain["answer"] = task.answer
    if task.metadata:
        plain["metadata"] = dict(task.metadata)
    plain["split"] = task.split
    return plain


def _task_from_json(found: TaskJSON) -> Task:
    prompt = tuple(_message_from_json(message) for message in found["prompt"])
    return Task(found["id"], prompt, found.get("answer"), found.get("metadata", {}), found["split"])


def _message_to_json(message: Message) -> MessageJSON:
    plain: MessageJSON = {"role": message.role}
    if message.content:
        plain["content"] = message.content
    if message.reasoning is not None:
        plain["reasoning"] = message.reasoning
    if message.tool_calls:
        plain["tool_calls"] = [_call_to_json(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _message_from_json(found: MessageJSON) -> Message:
    return Message(
        found["role"],
        found.get("content", ""),
        found.get("reasoning"),
        tuple(_call_from_json(call) for call in found.get("tool_calls", ())),
        found.get("tool_call_id"),
        found.get("name"),
    )


def _call_to_json(call: ToolCall) -> ToolCallJSON:
    plain: ToolCallJSON = {"name": call.name}
    if call.arguments is not None:
        plain["arguments"] = dict(call.arguments)
    if call.raw:
        plain["raw"] = call.raw
    if call.id:
        plain["id"] = call.id
    if call.error is not None:
        plain["error"] = call.error
    return plain


def _call_from_json(found: ToolCallJSON) -> ToolCall:
    return ToolCall(
        found["name"], found.get("arguments"), found.get("raw", ""), found.get("id", ""), found.get("error")
    )


def _turn_to_json(turn: Turn) -> TurnJSON:
    plain: TurnJSON = {
        "observation": [_message_to_json(message) for message in turn.observation],
        "action": _message_to_json(turn.action),
    }
    if turn.tokens is not None:
        plain["tokens"] = _tokens_to_json(turn.tokens)
    return plain


def _turn_from_json(found: TurnJSON) -> Turn:
    tokens = found.get("tokens")
    return Turn(
        tuple(_message_from_json(message) for message in found["observation"]),
        _message_from_json(found["action"]),
        None if tokens is None else _tokens_from_json(tokens),
    )


def _tokens_to_json(tokens: TurnTokens) -> TurnTokensJSON:
    completion = tokens.completion
    plain: TurnTokensJSON = {
        "world_ids": tokens.world_ids.tolist(),
        "policy_ids": completion.token_ids.tolist(),
        "logprobs": _shortest(completion.logprobs),
        "versions": completion.versions.tolist(),
        "finish": completion.finish.value,
    }
    if completion.matched is not None:
        plain["matched"] = completion.matched
    if completion.cached_tokens:
        plain["cached_tokens"] = completion.cached_tokens
    return plain


def _tokens_from_json(found: TurnTokensJSON) -> TurnTokens:
    completion = Completion(
        token_ids=np.asarray(found["policy_ids"], np.int32),
        logprobs=np.asarray(found["logprobs"], np.float32),
        versions=np.asarray(found["versions"], np.int32),
        finish=Finish(found["finish"]),
        matched=found.get("matched"),
        cached_tokens=found.get("cached_tokens", 0),
    )
    return TurnTokens(np.asarray(found["world_ids"], np.int32), completion)


def _shortest(logprobs_T: FloatArray) -> list[float]:
    # Nine significant digits name a float32 without doubt; a float64 would print seventeen.
    return [float(f"{value:.9g}") for value in logprobs_T.tolist()]
