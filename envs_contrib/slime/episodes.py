"""Episodes that a generate function of slime plays, and the rewards that it gives."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from agentrl.envs import EpisodeInPlay, Generate
from agentrl.errors import StageError
from agentrl.types import AGENT, Episode, Message, Observation, RewardParts
from envs_contrib.slime.loading import Arguments, Function, called, loaded
from envs_contrib.slime.policy import HOST, PORT, EngineOfEpisode, in_play
from envs_contrib.slime.sample import Sample, grade_of, label_of, sample_of

Samples: TypeAlias = Literal["trajectories", "rollouts"]
"""What several samples of one call of a generate function are."""


def generate_of(
    generate: Function | str,
    reward: Function | str | None = None,
    *,
    args: Mapping[str, object] | None = None,
    samples: Samples = "trajectories",
) -> Generate:
    """A generate function of agentrl that plays by one of slime.

    Args:
        generate: `async (args, sample, sampling_params) -> sample`, or several samples; or its path.
        reward: `async (args, sample) -> reward`, or its path; it gets a list where there are several samples.
            None = the sample's own reward where `generate` has set one, otherwise that of the environment for
            the response.
        args: what `args` holds beside the settings of the run, such as `reward_key`. Where
            `apply_chat_template` is False, the sample's prompt is that of the data.
        samples: what several samples of one call are: trajectories of one rollout with one reward, or
            rollouts, each with a reward of its own, which is compared with that of the sample in the same
            place of each sibling.

    Raises (when it plays):
        StageError: the function failed, gave the sample up, or changed tokens that the policy sampled.
    """

    async def slime_generate(episode: EpisodeInPlay) -> None:
        play, pay = loaded(generate), None if reward is None else loaded(reward)
        observation = await episode.reset()
        prompt_ids = await episode.tokens.render(observation)
        engine = EngineOfEpisode(episode)
        prompt = str(engine.tokenizer.decode(prompt_ids))
        engine.learn(prompt, prompt_ids)
        token = in_play.set(engine)
        try:
            known = _arguments(episode, engine, args or {})
            begun = _sample(episode, prompt if known.apply_chat_template else _untemplated(observation))
            played = await _generated(play, known, begun, engine)
            agents = _agents(len(played), samples)
            for agent, sample in zip(agents, played, strict=True):
                _keep(episode, sample, agent)
            await _rewarded(episode, played, pay, known, agents)
        finally:
            in_play.reset(token)

    return slime_generate


def group_reward_of(
    reward: Function | str, *, args: Mapping[str, object] | None = None
) -> Callable[[Sequence[Episode]], Awaitable[list[float]]]:
    """A `group_reward` of agentrl by a reward of slime for all siblings: `async (args, samples) -> rewards`.

    args: as for `generate_of`.
    """
    known = Arguments.of(args)

    async def slime_group_reward(siblings: Sequence[Episode]) -> list[float]:
        samples = [sample_of(episode, None) for episode in siblings]
        rewards = await called(loaded(reward), known, samples)
        return [float(_grade(value, known)) for value in _values(rewards, len(samples))]

    return slime_group_reward


def _arguments(episode: EpisodeInPlay, engine: EngineOfEpisode, given: Mapping[str, object]) -> Arguments:
    own = engine.sampling_params
    return Arguments.of(
        given,
        hf_checkpoint=getattr(engine.tokenizer, "name_or_path", ""),
        sglang_router_ip=HOST,
        sglang_router_port=PORT,
        rollout_max_context_len=episode.limits.max_tokens,
        rollout_max_response_len=own["max_new_tokens"],
        rollout_temperature=own["temperature"],
        rollout_top_p=own["top_p"],
        rollout_top_k=own["top_k"],
        rollout_stop=own["stop"],
        rollout_stop_token_ids=own["stop_token_ids"],
        rollout_skip_special_tokens=False,
        partial_rollout=False,
        mask_offpolicy_in_partial_rollout=False,
        use_rollout_routing_replay=False,
        group_rm=False,
        ci_test=False,
        apply_chat_template=True,
    )


def _untemplated(observation: Observation) -> str | list[dict[str, str]]:
    """The prompt as the data has it: a text, or messages."""
    if len(observation) == 1:
        return observation[0].text
    return [{"role": message.role, "content": message.text} for message in observation]


def _sample(episode: EpisodeInPlay, prompt: str | list[dict[str, str]]) -> Sample:
    task = episode.task
    number = zlib.crc32(episode.id.encode())
    return Sample(
        group_index=zlib.crc32(task.id.encode()),
        index=number,
        prompt=prompt,
        label=label_of(task.answer, task.metadata),
        metadata=dict(task.metadata),
        session_id=episode.id,
    )


async def _generated(
    generate: Function, known: Arguments, sample: Sample, engine: EngineOfEpisode
) -> list[Sample]:
    params = engine.sampling_params
    wants = "evaluation" in inspect.signature(generate).parameters
    more: dict[str, object] = {"evaluation": False} if wants else {}
    returned = await called(generate, known, sample, params, **more)
    samples = list(returned) if isinstance(returned, Sequence) else [returned]
    kept = [each for each in samples if isinstance(each, Sample)]
    if not samples or len(kept) != len(samples):
        raise _invalid(
            f"a generate function of slime returns a Sample, or a list of them, not {repr(returned)[:80]}"
        )
    for each in kept:
        if each.status in (Sample.Status.ABORTED, Sample.Status.FAILED) and not engine.was_aborted:
            raise StageError(
                "generate", "given_up", f"it returned a sample with the status {each.status.value}"
            )
    return [] if engine.was_aborted else kept


def _agents(number: int, samples: Samples) -> list[str | None]:
    """The agent of each of the samples of an episode; None = the environment's."""
    if samples == "trajectories":
        return [None] * number
    return [f"{AGENT}_{place}" if place else None for place in range(number)]


def _keep(episode: EpisodeInPlay, sample: Sample, agent: str | None) -> None:
    length = sample.response_length
    mask = [1] * length if sample.loss_mask is None else list(sample.loss_mask)
    if len(mask) != length or length > len(sample.tokens):
        raise _invalid(
            f"the sample has {len(sample.tokens)} tokens, a response of {length}, a loss mask of {len(mask)}"
        )
    flags = [False] * (len(sample.tokens) - length) + [
        bool(flag) and not sample.remove_sample for flag in mask
    ]
    episode.keep(sample.tokens, flags, agent=agent)


async def _rewarded(
    episode: EpisodeInPlay,
    samples: Sequence[Sample],
    reward: Function | None,
    known: Arguments,
    agents: Sequence[str | None],
) -> None:
    if not samples:
        return
    if known.group_rm:
        # The siblings are rewarded together, by `group_reward_of`.
        episode.finish(0.0, truncated=_is_truncated(samples))
        return
    missing = [sample for sample in samples if sample.reward is None]
    if missing and reward is not None:
        if len(samples) == 1:
            missing[0].reward = await called(reward, known, missing[0])
        else:
            values = _values(await called(reward, known, missing), len(missing))
            for sample, value in zip(missing, values, strict=True):
                sample.reward = value
    if any(sample.reward is None for sample in samples):
        await episode.step(Message("assistant", samples[-1].response))
        return
    grades = [_grade(sample.reward, known) for sample in samples]
    if any(agents):
        own = {agent or AGENT: grade for agent, grade in zip(agents, grades, strict=True)}
        episode.finish(own, truncated=_is_truncated(samples))
        return
    if len({float(grade) for grade in grades}) > 1:
        raise StageError(
            "reward",
            "invalid",
            'the samples of one episode have different rewards; with samples = "rollouts" each has its own',
        )
    episode.finish(grades[0], truncated=_is_truncated(samples))


def _is_truncated(samples: Sequence[Sample]) -> bool:
    return any(sample.status is Sample.Status.TRUNCATED for sample in samples)


def _values(rewards: object, number: int) -> list[object]:
    values = list(rewards) if isinstance(rewards, Sequence) else []
    if len(values) != number:
        raise StageError(
            "reward", "invalid", f"a reward of {number} samples returns as many, not {repr(rewards)[:80]}"
        )
    return values


def _grade(value: object, known: Arguments) -> float | RewardParts:
    try:
        return grade_of(value, known.reward_key)
    except ValueError as error:
        raise StageError("reward", "invalid", str(error)) from error


def _invalid(detail: str) -> StageError:
    return StageError("generate", "invalid", detail)
