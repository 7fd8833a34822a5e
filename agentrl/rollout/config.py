"""Settings of the rollout phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from agentrl.config import ImportPath, Section, Spelling, renamed

Count = Annotated[int, Field(ge=1)]

REPLAYS = "with replay, whose journal has the episodes; drop that"
"""Why a setting of playing, or of evaluations, has no effect."""
PLAYS_ONLY = "with debug_rollout_only (`agentrl rollout`), which trains nothing; drop that"
"""Why a setting of training, or of evaluations, has no effect."""
_OF_PLAYING = (
    *("rollout_batch_size", "n_samples_per_prompt", "global_batch_size"),
    *("rollout_temperature", "rollout_top_p", "rollout_top_k", "rollout_max_response_len"),
    *("shuffle_rewards", "max_episode_retries", "dynamic_sampling_filter_path", "max_num_gen_batches"),
    *("over_sampling_batch_size", "buffer_filter_path"),
)


class RolloutConfig(Section):
    """How many episodes are played, and how they are sampled."""

    num_rollout: Annotated[int, Field(ge=0)] = 40
    """RL iterations: each plays a batch of episodes and trains on it (count)."""
    rollout_batch_size: Count | None = None
    """Prompts in each iteration (count); left out, it follows from the batch identity, else 32."""
    n_samples_per_prompt: Count = 16
    """Episodes of each prompt: the size of a group (count)."""
    num_steps_per_rollout: Count = 1
    """Optimizer steps that each iteration's episodes are split into (count)."""
    global_batch_size: Count | None = None
    """Episodes in one optimizer step (count); left out, it follows from the batch identity."""
    rollout_temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Sampling temperature of training episodes (1 = the policy itself)."""
    rollout_top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling (probability mass; 1 = off). Below 1 the trained policy is not the sampled one."""
    rollout_top_k: Annotated[int, Field(ge=0)] = 0
    """Sample among the k likeliest tokens (count; 0 = off). Above 0 the same bias as top-p."""
    rollout_max_response_len: Count | None = None
    """Most tokens in one turn of the model (tokens); left out, the episode's own limit holds."""
    rollout_max_context_len: Count | None = None
    """Most tokens in an episode, prompt included (tokens); left out, the environment's own limit."""
    max_turns: Count | None = None
    """Most turns of the model in an episode (count); left out, the environment's own limit."""
    shuffle_rewards: bool = False
    """Control experiment: every episode gets the reward of a random sibling, so nothing can be learned."""
    max_episode_retries: Annotated[int, Field(ge=0)] = 2
    """How often a failed episode is played again before its group is dropped (count)."""

    dynamic_sampling_filter_path: ImportPath | None = None
    """Function that drops a group, so that another one is played for it (package.module:name), such as
    agentrl.algorithms.filters:zero_std; left out, every complete group is in the batch."""
    max_num_gen_batches: Count = 10
    """Batches of groups that are played for one batch of groups that the filter keeps, before the run stops
    with a sentence (count); of over_sampling_batch_size groups where that is set."""
    over_sampling_batch_size: Count | None = None
    """Prompts that start at a time (count), at least rollout_batch_size: a batch takes the groups that end
    first and drops the rest, so a resumed run is not bit-equal; left out, every group is waited for."""
    buffer_filter_path: ImportPath | None = None
    """Function that chooses the groups of an over-sampled batch when all have ended (package.module:name),
    such as agentrl.algorithms.filters:highest_std; left out, the first to end."""
    rollout_sample_filter_path: ImportPath | None = None
    """Function that takes single rollouts of a batch out of the loss (package.module:name), such as
    agentrl.algorithms.filters:truncated; they still count in the baselines."""

    replay: str | None = None
    """Folder of a run whose journalled episodes are trained on, in place of playing: no engine is started,
    and nothing is evaluated. Steps beyond those in the journal are left out."""
    debug_rollout_only: bool = False
    """Play and journal the episodes, and train on nothing (`agentrl rollout`)."""

    spellings: ClassVar[Mapping[str, Spelling]] = {"load_debug_rollout_data": renamed("replay")}

    @property
    def without_effect(self) -> Mapping[str, str]:
        """The limit of a filter without one, and the choice among groups where none are left over."""
        unused = {}
        if self.dynamic_sampling_filter_path is None:
            unused["max_num_gen_batches"] = "without dynamic_sampling_filter_path; add it"
        if self.over_sampling_batch_size is None:
            unused["buffer_filter_path"] = "without over_sampling_batch_size; add it"
        return unused

    @property
    def prompts(self) -> int:
        """Prompts in each iteration, derived where it was left out."""
        if self.rollout_batch_size is not None:
            return self.rollout_batch_size
        if self.global_batch_size is not None:
            return self.global_batch_size * self.num_steps_per_rollout // self.n_samples_per_prompt
        return 32

    @property
    def episodes_per_step(self) -> int:
        """Episodes in one optimizer step, derived where it was left out."""
        return self.prompts * self.n_samples_per_prompt // self.num_steps_per_rollout

    @property
    def inactive(self) -> dict[str, str]:
        """How episodes are played, where they are read; and how they are split, where nothing is trained."""
        if self.replay is not None:
            return dict.fromkeys(_OF_PLAYING, REPLAYS)
        if not self.debug_rollout_only:
            return {}
        is_derived = self.rollout_batch_size is None and self.global_batch_size is not None
        split = () if is_derived else ("num_steps_per_rollout", "global_batch_size")
        return dict.fromkeys((*split, "rollout_sample_filter_path"), PLAYS_ONLY)

    @model_validator(mode="after")
    def _plays_or_trains(self) -> RolloutConfig:
        if self.replay is not None and self.debug_rollout_only:
            raise ValueError(
                "replay trains without playing, and debug_rollout_only plays without training; drop one of "
                "them."
            )
        return self

    @model_validator(mode="after")
    def _batch_identity(self) -> RolloutConfig:
        played = self.prompts * self.n_samples_per_prompt
        step = self.global_batch_size or self.episodes_per_step
        trained = step * self.num_steps_per_rollout
        if played != trained or played == 0:
            raise ValueError(
                f"rollout_batch_size ({self.prompts}) x n_samples_per_prompt ({self.n_samples_per_prompt})"
                f" = {played} must equal global_batch_size ({step}) x num_steps_per_rollout"
                f" ({self.num_steps_per_rollout}) = {trained}; change one of the four, or leave one of the"
                " two batch sizes out and it is derived."
            )
        return self

    @model_validator(mode="after")
    def _over_sampling_fills_a_batch(self) -> RolloutConfig:
        size = self.over_sampling_batch_size
        if size is not None and size < self.prompts:
            raise ValueError(
                f"over_sampling_batch_size ({size}) must be at least rollout_batch_size ({self.prompts}): "
                "a batch is taken from the prompts that start at a time; raise it."
            )
        return self


class EvalSampling(Section):
    """How evaluations sample, in a run and in `agentrl eval`."""

    n_samples_per_eval_prompt: Count = 1
    """Sampled episodes of each prompt (count); above 1, pass@k is measured, too."""
    eval_top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Nucleus sampling in evaluations (probability mass; 1 = off); left out, rollout_top_p in a run, or 1."""
    eval_max_response_len: Count | None = None
    """Most tokens in one turn of the model in evaluations (tokens); left out, rollout_max_response_len in a
    run, else the episode's own limit."""
