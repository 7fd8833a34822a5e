"""Settings of the rollout phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from agentrl.config import Changes, Count, ImportPath, Needs, Section, Spelling, renamed
from agentrl.data.eval_config import in_file_as
from agentrl.data.eval_sets import EvalPaths, EvalSet
from agentrl.types import JSON

MAX_EPISODES = 1_000_000
"""Of a batch or an evaluation: they stay in memory up to its end, some kilobytes each (count)."""

REPLAYS = "with replay, whose journal has the episodes; drop that"
"""Why a setting of playing, or of evaluations, has no effect."""
PLAYS_ONLY = "with debug_rollout_only (`agentrl rollout`), which trains nothing; drop that"
"""Why a setting of training, or of evaluations, has no effect."""
_IDLE_GROUPS, _MIN_IDLE_ROLLOUTS = 640, 20
_OF_PLAYING = (
    *("rollout_batch_size", "n_samples_per_prompt", "global_batch_size"),
    *("rollout_temperature", "rollout_top_p", "rollout_top_k", "rollout_max_response_len"),
    *("replay_sampling_mask", "return_routed_experts"),
    *("shuffle_rewards", "max_episode_retries", "group_timeout_s"),
    *("dynamic_sampling_filter_path", "max_num_gen_batches"),
    *("over_sampling_batch_size", "buffer_filter_path", "max_staleness", "partial_rollout"),
    *("staleness_policy", "staleness_window", "async_buffer_size", "privileged_context_path"),
    *("custom_reward_post_process_path", "rollout_function_path"),
    *("custom_update_weight_post_write_path", "num_rollout_workers"),
)


class BatchSection(Section):
    """How many episodes an iteration plays, and how they are split into optimizer steps."""

    num_rollout: Annotated[int, Field(ge=0), Changes.COURSE] = 40
    """RL iterations: each plays a batch of episodes and trains on it (count); left out, as many as num_epoch
    asks for, where that is set."""
    rollout_batch_size: Count | None = None
    """Prompts in each iteration (count); left out, it follows from the batch identity, else 32."""
    n_samples_per_prompt: Count = 16
    """Episodes of each prompt: the size of a group (count)."""
    num_steps_per_rollout: Count = 1
    """Optimizer steps that each iteration's episodes are split into (count)."""
    global_batch_size: Count | None = None
    """Episodes in one optimizer step (count); left out, it follows from the batch identity."""

    @property
    def has_iterations(self) -> bool:
        """Whether their number was set."""
        return "num_rollout" in self.model_fields_set

    @staticmethod
    def iterations(number: int) -> dict[str, JSON]:
        """The setting of their number."""
        return {"num_rollout": number}

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

    @model_validator(mode="after")
    def _batch_identity(self) -> Self:
        played = self.prompts * self.n_samples_per_prompt
        check_episodes("a batch", played, "rollout_batch_size or n_samples_per_prompt")
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


class SamplingSection(Section):
    """How tokens are sampled, and how many of them an episode may have."""

    rollout_temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Sampling temperature of training episodes (1 = the policy itself)."""
    rollout_top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling (probability mass; 1 = off); see replay_sampling_mask."""
    rollout_top_k: Annotated[int, Field(ge=0)] = 0
    """Sample among the k likeliest tokens (count; 0 = off); see replay_sampling_mask."""
    replay_sampling_mask: bool | None = None
    """Whether the engine returns the token ids that rollout_top_p and rollout_top_k kept, and the logprobs of
    engine and trainer are renormalised over them, so that the gradient is that of the sampled policy; SGLang
    needs rollout_top_k of at most 128. Left out, on where something is cut and the engine can."""
    return_routed_experts: bool | None = None
    """Whether the engine of a mixture of experts returns those that each token went through: router_replay =
    R3 replays them, and without it the run says how many tokens the trainer would send to others. Left out,
    on with router_replay = R3."""
    rollout_max_response_len: Count | None = None
    """Most tokens in one turn of the model (tokens); left out, the episode's own limit holds."""
    rollout_max_context_len: Count | None = None
    """Most tokens in an episode, prompt included (tokens); left out, the environment's own limit."""
    max_turns: Count | None = None
    """Most turns of the model in an episode (count); left out, the environment's own limit."""


class GroupSection(Section):
    """What becomes of a group: when it is played again, when it ends, and which ones are trained."""

    shuffle_rewards: bool = False
    """Control experiment: every episode gets the reward of a random sibling, so nothing can be learned."""
    max_episode_retries: Annotated[int, Field(ge=0), Changes.COURSE] = 2
    """How often a failed episode is played again before its group is dropped (count)."""
    group_timeout_s: Annotated[Annotated[float, Field(gt=0.0)] | None, Changes.COURSE] = None
    """Time that a group may take (seconds): its episodes that are still in play end there, truncated, and are
    scored and trained with their siblings, so that a straggler holds up nobody; the time in which a colocated
    engine has released its memory is not counted; left out, only the limits of each episode hold."""
    rollout_function_path: ImportPath | None = None
    """Async function that plays a batch in its own way (package.module:name): it draws prompts, has them
    played, and returns the groups of the batch."""
    dynamic_sampling_filter_path: ImportPath | None = None
    """Function that drops a group, so that another one is played for it (package.module:name), such as
    agentrl.algorithms.filters:zero_std; left out, every complete group is in the batch."""
    max_num_gen_batches: Annotated[Count, Needs("dynamic_sampling_filter_path")] = 10
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
    custom_reward_post_process_path: ImportPath | None = None
    """Function that changes the scores of a whole batch before advantages are computed from them
    (package.module:name); metrics and journal keep those before, too."""
    custom_convert_samples_to_train_data_path: ImportPath | None = None
    """Function that takes single tokens of a batch out of the loss, or adds numbers to them that a loss reads
    (package.module:name)."""
    custom_rollout_log_function_path: ImportPath | None = None
    """Function from the groups of an iteration to metrics of your own (package.module:name)."""
    custom_update_weight_post_write_path: ImportPath | None = None
    """Function that is called when the engine serves new weights (package.module:name)."""
    privileged_context_path: ImportPath | None = None
    """Function whose text the prompts of a teacher have and those of the policy have not
    (package.module:name), such as agentrl.algorithms.distillation:answer (use_opd); left out, both read the
    same."""


class StalenessSection(Section):
    """How far playing may be ahead of training."""

    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Versions of the weights that groups may start ahead of their training (versions): 0 = synchronous, each
    batch is played by the weights that it is trained from; above, playing and training overlap."""
    staleness_policy: Literal["window", "strict", "ready_first"] = "window"
    """Which complete groups are trained next: the oldest, where those of a window may pass one that is still
    in flight; strictly in the order of start; or the first to end, dropping what became too old, which trains
    long episodes less often."""
    staleness_window: Count | None = None
    """Groups, counted from the oldest in flight, that may be trained next (count): a wider one waits less for
    a straggler, and each rollout_batch_size beyond 1 adds a version to the staleness; left out,
    rollout_batch_size, or over_sampling_batch_size where that is set."""
    async_buffer_size: Count | None = None
    """Complete groups that may wait before no further group starts (count); left out, only max_staleness
    limits them."""
    update_weights_interval: Count = 1
    """Iterations for each version of the weights that is sent to the engine (count)."""
    partial_rollout: bool | None = None
    """Episodes in flight go on across an update of the weights; off: an update waits until none is in
    flight. Left out, on above max_staleness 0; at 0 it lets the groups that are left of an over-sampled batch
    go on into the next one."""

    data_buffer_size: Annotated[int, Field(ge=0)] = 0
    """Groups of earlier batches that are kept to be trained on once more (count; 0 = none)."""
    data_buffer_groups: Annotated[int, Field(ge=0)] = 0
    """Groups of the data buffer that each batch trains on beside its own, off-policy (count); they leave the
    buffer."""
    data_buffer_filter_path: ImportPath | None = None
    """Function that chooses them (package.module:name), such as agentrl.algorithms.filters:highest_std; left
    out, the oldest."""

    @property
    def is_async(self) -> bool:
        """Whether groups are in flight while others are trained."""
        return self.max_staleness > 0 or (self.partial_rollout or False)

    @property
    def off_policy_by(self) -> str:
        """The setting by which tokens may be older than the weights that train them; "" = they are not."""
        reuses = f"data_buffer_groups = {self.data_buffer_groups}" if self.data_buffer_groups else ""
        return self.plays_off_policy_by or reuses

    @property
    def plays_off_policy_by(self) -> str:
        """The same of tokens that are trained on for the first time."""
        if self.max_staleness > 0:
            return f"max_staleness = {self.max_staleness}"
        if self.update_weights_interval > 1:
            return f"update_weights_interval = {self.update_weights_interval}"
        return "partial_rollout" if self.is_async else ""

    @property
    def spans_updates(self) -> bool:
        """Whether episodes go on across an update of the weights."""
        return self.is_async and self.partial_rollout is not False


class RolloutConfig(StalenessSection, GroupSection, SamplingSection, BatchSection):
    """How many episodes are played, and how they are sampled."""

    max_idle_rollouts: Annotated[Annotated[int, Field(ge=0)] | None, Changes.COURSE] = None
    """RL iterations in a row that train on nothing, since siblings earn the same and less than the expert,
    before the run ends with a sentence (count; 0 = never); left out, as many as play 640 groups, at least
    20."""
    num_rollout_workers: Annotated[int, Field(ge=0), Changes.SPEED] = 0
    """Processes that play the groups, with environments, tools and rewards of their own (count; 0 = the run's
    own process plays): for environments that compute. Each loads the tokenizer, and opens its own connections
    and opponents."""
    replay: Annotated[str | None, Changes.COURSE] = None
    """Folder of a run whose journalled episodes are trained on, in place of playing: no engine is started,
    and nothing is evaluated. Steps beyond those in the journal are left out."""
    debug_rollout_only: bool = False
    """Play and journal the episodes, and train on nothing (`agentrl rollout`)."""

    spellings: ClassVar[Mapping[str, Spelling]] = {"load_debug_rollout_data": renamed("replay")}

    @property
    def without_effect(self) -> Mapping[str, str]:
        """The choice among groups where none are left over, or in flight between two batches."""
        unused: dict[str, str] = {}
        if self.rollout_function_path is not None:
            why = "with rollout_function_path, which starts the groups of a batch itself; drop one"
            unused |= dict.fromkeys(("over_sampling_batch_size", "max_staleness", "partial_rollout"), why)
        if self.over_sampling_batch_size is None:
            unused["buffer_filter_path"] = "without over_sampling_batch_size; add it"
        elif self.is_async:
            unused["buffer_filter_path"] = "where groups go on across batches; drop max_staleness"
        if not self.cuts:
            unused["replay_sampling_mask"] = "without rollout_top_p below 1 or rollout_top_k; set one"
        return unused | self._unused_staleness

    @property
    def _unused_staleness(self) -> dict[str, str]:
        """What is chosen among groups in flight, where none is in flight between two batches."""
        unused = {}
        if self.max_staleness == 0 and self.over_sampling_batch_size is None:
            unused["partial_rollout"] = "without max_staleness or over_sampling_batch_size; add one"
        if not self.data_buffer_groups:
            why = "without data_buffer_groups; set it"
            unused |= dict.fromkeys(("data_buffer_size", "data_buffer_filter_path"), why)
        if not self.is_async:
            why = "without max_staleness above 0; raise it"
            unused |= dict.fromkeys(("staleness_policy", "staleness_window", "async_buffer_size"), why)
        elif self.staleness_policy != "window":
            unused["staleness_window"] = "without staleness_policy = window; choose it"
        return unused

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about settings of playing that are valid and have a drawback."""
        if self.replay is not None:
            return ()
        warnings = []
        if self.over_sampling_batch_size is not None and self.buffer_filter_path is None:
            instead = (
                "without it a batch takes the oldest groups."
                if self.is_async
                else "buffer_filter_path chooses among all groups instead."
            )
            warnings.append(
                "over_sampling_batch_size takes the groups that end first, so two runs of one seed differ, "
                f"and a run that resumes is not bit-equal to one that was never interrupted; {instead}"
            )
        return tuple(warnings)

    @property
    def cuts(self) -> bool:
        """Whether episodes that are played are sampled from a part of the vocabulary."""
        return self.replay is None and (self.rollout_top_p < 1.0 or self.rollout_top_k > 0)

    @property
    def idle_limit(self) -> int:
        """`max_idle_rollouts` (0 = never), derived where it was left out.

        The policy stays as it is meanwhile. Were one group in a hundred to have a signal, none of 640 would
        with a probability of 0.2%.
        """
        if self.max_idle_rollouts is not None:
            return self.max_idle_rollouts
        return max(_MIN_IDLE_ROLLOUTS, -(-_IDLE_GROUPS // self.prompts))

    @property
    def inactive(self) -> dict[str, str]:
        """How episodes are played, where they are read; and how they are split, where nothing is trained."""
        if self.replay is not None:
            return dict.fromkeys(_OF_PLAYING, REPLAYS)
        if not self.debug_rollout_only:
            return {}
        is_derived = self.rollout_batch_size is None and self.global_batch_size is not None
        split = () if is_derived else ("num_steps_per_rollout", "global_batch_size")
        functions = (
            *("rollout_sample_filter_path", "custom_reward_post_process_path"),
            *("custom_convert_samples_to_train_data_path", "custom_update_weight_post_write_path"),
        )
        buffer = ("data_buffer_size", "data_buffer_groups", "data_buffer_filter_path")
        of_training = ("max_idle_rollouts", "update_weights_interval", *buffer)
        return dict.fromkeys((*split, *functions, *of_training), PLAYS_ONLY)

    @model_validator(mode="after")
    def _plays_or_trains(self) -> Self:
        if self.replay is not None and self.debug_rollout_only:
            raise ValueError(
                "replay trains without playing, and debug_rollout_only plays without training; drop one of "
                "them."
            )
        return self

    @model_validator(mode="after")
    def _the_buffer_holds_what_is_taken(self) -> Self:
        if self.data_buffer_size < self.data_buffer_groups:
            raise ValueError(
                f"data_buffer_size ({self.data_buffer_size}) must be at least data_buffer_groups "
                f"({self.data_buffer_groups}), the groups that a batch takes of it; raise it."
            )
        return self

    @model_validator(mode="after")
    def _over_sampling_fills_a_batch(self) -> Self:
        size = self.over_sampling_batch_size
        number = (size or 0) * self.n_samples_per_prompt
        check_episodes("a batch", number, "over_sampling_batch_size or n_samples_per_prompt")
        if size is not None and size < self.prompts:
            raise ValueError(
                f"over_sampling_batch_size ({size}) must be at least rollout_batch_size ({self.prompts}): "
                "a batch is taken from the prompts that start at a time; raise it."
            )
        return self


def check_episodes(what: str, number: int, settings: str) -> None:
    """Check that so many episodes can be kept.

    Raises:
        ValueError: they cannot.
    """
    if number > MAX_EPISODES:
        raise ValueError(
            f"{what} of {number:,} episodes is more than the {MAX_EPISODES:,} that are kept until its end; "
            f"lower {settings}."
        )


CUTS = ("eval_top_p", "eval_top_k")
"""The settings that cut the distribution which evaluations sample from."""


class EvalSampling(Section):
    """How evaluations sample, in a run and in `agentrl eval`."""

    n_samples_per_eval_prompt: Count = 1
    """Sampled episodes of each prompt (count); above 1, pass@k is measured, too."""
    eval_top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Nucleus sampling in evaluations (probability mass; 1 = off); left out, rollout_top_p in a run, or 1."""
    eval_top_k: Annotated[int, Field(ge=0)] | None = None
    """Sample among the k likeliest tokens in evaluations (count; 0 = off); left out, rollout_top_k in a run,
    or 0."""
    eval_max_response_len: Count | None = None
    """Most tokens in one turn of the model in evaluations (tokens); left out, rollout_max_response_len in a
    run, else the episode's own limit."""


class EvalSection(EvalSampling):
    """Held-out episodes before, during and after training."""

    spellings: ClassVar[Mapping[str, Spelling]] = {"eval_config": in_file_as("eval_prompt_data")}

    eval_interval: Annotated[Count, Changes.COURSE] = 10
    """RL iterations, or optimizer steps of SFT, between evaluations (count)."""
    eval_prompt_data: EvalPaths = None
    """Prompts to evaluate on in place of the environment's held-out split, in the form of prompt_data; or
    several sets, each with metrics of its own: a table of name and path (as a flag: NAME PATH NAME PATH), or
    of name and the settings of that set, `path` among them."""
    eval_split: str = "test"
    """The held-out split; of a folder of eval_prompt_data, the split whose files are played."""
    eval_episodes: Annotated[Count, Changes.COURSE] = 256
    """Prompts in each evaluation, of data at most the rows of each set (count): each is played once greedily,
    and n_samples_per_eval_prompt times sampled."""
    eval_temperature: Annotated[float, Field(ge=0.0)] = 1.0
    """Sampling temperature of the sampled half (0 = greedy, like the other half)."""
    skip_eval_before_train: bool = False
    """Begin without the evaluation of the model as it is, before and after a warm start."""
    eval_function_path: ImportPath | None = None
    """Async function that plays each evaluation of a run in its own way, and returns metrics of its own
    (package.module:name); left out, each set is played, sampled and greedily."""
    async_eval: Annotated[bool | None, Changes.COURSE] = None
    """Training goes on while an evaluation between two iterations plays. One that is due meanwhile begins
    when that one has ended, with the weights of then. Left out, on where groups go on across batches
    (max_staleness)."""
    eval_engine: Annotated[Literal["shared", "own"], Changes.COURSE] = "shared"
    """Engine that evaluations play on: that of training, whose weights may change meanwhile (metrics and
    reports have the share of each version); or a second one of the same kind, with as much memory and as many
    GPUs, which gets the weights of the evaluated version only."""

    def of_set(self, own: EvalSet) -> EvalSection:
        """These settings as a set of prompts is played that has some of its own."""
        found = {"eval_episodes": own.num_prompts, "eval_temperature": own.temperature}
        chosen = {name: value for name, value in found.items() if value is not None}
        return self.model_copy(update={**chosen, **own.sampling})

    @property
    def without_effect(self) -> Mapping[str, str]:
        """The cut of a distribution, where the likeliest token is taken."""
        greedy = "with eval_temperature = 0, which takes the likeliest token; raise it"
        return dict.fromkeys(CUTS, greedy) if self.eval_temperature == 0.0 else {}

    @model_validator(mode="after")
    def _is_kept(self) -> EvalSection:
        number = self.eval_episodes * self.n_samples_per_eval_prompt
        check_episodes("an evaluation", number, "eval_episodes or n_samples_per_eval_prompt")
        return self
