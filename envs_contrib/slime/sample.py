"""slime's record of one rollout, field by field as its functions know it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypedDict, Unpack

from agentrl.types import JSON, Episode, RewardParts, Verdict


class HasRewardKey(Protocol):
    """What of slime's `args` chooses the reward."""

    reward_key: str | None


class _Reply(TypedDict, total=False):
    meta_info: Mapping[str, object] | None
    text: str | None
    update_terminal_info: bool


@dataclass
class Sample:
    """A prompt, its response and what belongs to them. Functions may add attributes of their own.

    tokens: of prompt and response. response_length: of the response, in tokens. loss_mask, rollout_log_probs:
    of the response's tokens; None = all of them are trained, none is known.
    """

    class Status(Enum):
        """How the rollout ended."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, object] | None = None
    response: str = ""
    response_length: int = 0
    label: JSON = None
    reward: object = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Sequence[int] | None = None
    rollout_top_p_token_offsets: Sequence[int] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, JSON] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, JSON] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0

    @property
    def effective_response_length(self) -> int:
        """The number of response tokens that are trained."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: HasRewardKey) -> object:
        """The reward, or the one that `args.reward_key` names."""
        if args.reward_key and isinstance(self.reward, Mapping):
            return self.reward[args.reward_key]
        return self.reward

    def append_response_tokens(
        self,
        args: object = None,
        *,
        tokens: Iterable[int] | None = None,
        log_probs: Iterable[float] | None = None,
        trainable: bool = True,
        **more: Unpack[_Reply],
    ) -> None:
        """Append tokens to the response: sampled ones with their logprobs, or those of a tool without.

        more: text, meta_info of the engine's reply (the status follows from its finish reason, unless
            update_terminal_info is False).

        Raises:
            ValueError: sampled tokens without a logprob for each, or a tool's with some.
        """
        del args
        added = [int(token) for token in tokens or ()]
        logprobs = None if log_probs is None else [float(value) for value in log_probs]
        if trainable and added and (logprobs is None or len(logprobs) != len(added)):
            raise ValueError("tokens that are trained need a logprob each")
        if not trainable and logprobs is not None:
            raise ValueError("tokens that are not trained have no logprobs")
        before = self.response_length
        self.response += more.get("text") or ""
        self.tokens = [*self.tokens, *added]
        self.response_length += len(added)
        mask = [1] * before if self.loss_mask is None else self.loss_mask
        # The list stays the same: functions keep it beside the sample.
        mask += [int(trainable)] * len(added)
        self.loss_mask = mask
        known = [0.0] * before if self.rollout_log_probs is None else self.rollout_log_probs
        self.rollout_log_probs = [*known, *(logprobs or [0.0] * len(added))]
        meta_info = more.get("meta_info")
        if meta_info is not None and more.get("update_terminal_info", True):
            self._end(meta_info)

    def to_dict(self) -> dict[str, object]:
        """All attributes by name."""
        return {**vars(self), "status": self.status.value}

    @staticmethod
    def from_dict(data: Mapping[str, object]) -> Sample:
        """The sample of `to_dict`; unknown names become attributes."""
        sample = Sample()
        for name, value in data.items():
            setattr(sample, name, Sample.Status(value) if name == "status" else value)
        return sample

    def _end(self, meta_info: Mapping[str, object]) -> None:
        reason = meta_info.get("finish_reason")
        kind = reason.get("type") if isinstance(reason, Mapping) else None
        endings = {"stop": Sample.Status.COMPLETED, "length": Sample.Status.TRUNCATED}
        self.status = Sample.Status.ABORTED if kind == "abort" else endings.get(str(kind), self.status)
        if meta_info.get("weight_version") is not None:
            self.weight_versions.append(str(meta_info["weight_version"]))


def sample_of(episode: Episode, verdict: Verdict | None = None, reward_key: str | None = None) -> Sample:
    """A view of what was played and scored: the first trajectory of the verdict's agent.

    verdict: None = there is none yet. reward_key: the reward is a mapping that has this key.
    """
    agent = episode.agents[0] if verdict is None else verdict.agent
    own = [trajectory for trajectory in episode.trajectories if trajectory.agent == agent]
    sample = Sample(
        label=label_of(episode.task.answer, episode.task.metadata),
        metadata=dict(episode.task.metadata),
        reward=None if verdict is None else _reward(verdict, reward_key),
        session_id=episode.id,
        status=_STATUS.get(episode.ending.value, Sample.Status.FAILED),
    )
    for place, turn in enumerate(own[0].turns if own else ()):
        seen = "".join(message.text for message in turn.observation)
        tokens = turn.tokens
        if place == 0:
            sample.prompt = seen
            sample.tokens = [] if tokens is None else tokens.world_ids.tolist()
        elif tokens is not None:
            sample.append_response_tokens(tokens=tokens.world_ids.tolist(), trainable=False, text=seen)
        if tokens is not None:
            sampled = tokens.completion
            ids, logprobs = sampled.token_ids.tolist(), sampled.logprobs.tolist()
            sample.append_response_tokens(tokens=ids, log_probs=logprobs, text=turn.action.text)
    return sample


def label_of(answer: str | None, metadata: Mapping[str, JSON]) -> JSON:
    """The label: a list of answers, an object where the text is one in JSON, or text."""
    if "answers" in metadata:
        return metadata["answers"]
    if answer is not None and answer.startswith("{"):
        try:
            parsed: JSON = json.loads(answer)
            return parsed
        except ValueError:
            return answer
    return answer


_STATUS = {status.value: status for status in Sample.Status}


def _reward(verdict: Verdict, reward_key: str | None) -> object:
    if reward_key is None:
        return verdict.total
    parts = {name.removeprefix("env/"): value for name, value in verdict.parts.items()}
    return {**parts, reward_key: verdict.total}


def grade_of(reward: object, reward_key: str | None) -> float | RewardParts:
    """The reward of a function as agentrl has it: a number, with the others by name as its parts.

    Raises:
        ValueError: it is neither a number nor a mapping with the number `reward_key`.
    """
    if isinstance(reward, Mapping):
        numbers = {
            str(name): float(value) for name, value in reward.items() if isinstance(value, int | float)
        }
        if reward_key is None or reward_key not in numbers:
            raise ValueError(
                f"the reward has the numbers {', '.join(sorted(numbers)) or 'none'}; name one with "
                'args={"reward_key": ...}'
            )
        return RewardParts(numbers, total=numbers[reward_key])
    if isinstance(reward, int | float):
        return float(reward)
    raise ValueError(f"the reward is {reward!r}, not a number")
