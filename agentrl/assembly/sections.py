"""The sections of a run's configuration that no other package has."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from agentrl.config import Changes, Count, Section
from agentrl.data.paths import PathList
from agentrl.envs.config import EnvArguments, GenerateChoice, LimitChoice, OpponentChoice, RewardChoice
from agentrl.rollout.config import check_episodes
from agentrl.tools.config import ToolChoice


class RunSection(Section):
    """The run itself."""

    name: Annotated[
        Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)] | None, Changes.PLACE
    ] = None
    """The run's folder below output_dir; left out, the environment's id and the seed. SFT appends -sft."""
    output_dir: Annotated[str, Changes.PLACE] = "runs"
    """Folder of all runs."""
    seed: int = 0
    """Seed of everything: weights, order of tasks, worlds, sampling."""
    num_threads: Annotated[Count | None, Changes.SPEED] = None
    """Threads of torch (count); left out, 1 for models under 20 million parameters (more are slower there),
    else every core."""
    inline: Annotated[bool, Changes.SPEED] = False
    """Decode and train in the run's own process, for debuggers (the embedded engine and the torch trainer);
    each step then blocks replies and deadlines."""
    use_tensorboard: Annotated[bool, Changes.COURSE] = True
    """Write TensorBoard events in addition to metrics.jsonl."""


class EnvSection(ToolChoice, OpponentChoice, RewardChoice, GenerateChoice, LimitChoice):
    """The environment of the training."""

    env: str = "HopSearch-v0"
    """Id of the environment (`agentrl envs list`), or package.module:Class."""
    env_kwargs: EnvArguments = Field(default_factory=dict)
    """Arguments of the environment's constructor (a table; as a flag: JSON). A secret is the name of an
    environment variable: "$NAME"."""
    train_split: str = "train"
    """Split whose tasks RL plays; of a folder of prompt_data, the split whose files it plays."""


class ModelSection(Section):
    """The policy: an existing model, or a new small one for this environment."""

    hf_checkpoint: str | None = None
    """Hugging Face model directory to start from; left out, a fresh model of the shape below."""
    num_layers: Count = 3
    """Transformer layers of a fresh model (count)."""
    hidden_size: Count = 128
    """Width of a fresh model (dimensions)."""
    ffn_hidden_size: Count = 384
    """Inner width of its feed-forward blocks (dimensions)."""
    num_attention_heads: Count = 2
    """Its attention heads (count)."""
    num_query_groups: Count = 2
    """Its key and value heads (count)."""
    kv_channels: Annotated[int, Field(ge=2, multiple_of=2)] = 64
    """Size of one head (dimensions, an even number)."""
    rotary_base: Annotated[float, Field(gt=0)] = 10_000.0
    """Base of its rotary position encoding."""
    vocab_size: Annotated[int, Field(ge=64)] = 512
    """Most tokens of the tokenizer that is trained for it on the environment's own text (count)."""

    @property
    def inactive(self) -> dict[str, str]:
        """The shape, where an existing model is used."""
        shape = () if self.hf_checkpoint is None else set(ModelSection.model_fields) - {"hf_checkpoint"}
        return dict.fromkeys(shape, "with hf_checkpoint, whose shape it has; drop that")

    @model_validator(mode="after")
    def _heads_share_groups_evenly(self) -> ModelSection:
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_query_groups "
                f"({self.num_query_groups}); change one of them."
            )
        return self


class WarmStartSection(Section):
    """A short supervised start on the environment's demonstrations."""

    warm_start_steps: Annotated[int, Field(ge=0)] = 0
    """Supervised steps before RL (count; 0 = none)."""
    warm_start_batch_size: Count = 64
    """Demonstrations in each of them (count)."""
    warm_start_lr: Annotated[float, Field(gt=0)] = 3e-3
    """Peak learning rate of the warm start; it follows a cosine down to 0."""
    warm_start_split: str = "train"
    """Split whose tasks are demonstrated."""
    num_demonstrations: Count | None = None
    """Episodes that the demonstrator plays; the steps go through them in a shuffled order (count).
    Left out, as many as the steps take, so that none is seen twice."""

    @property
    def inactive(self) -> dict[str, str]:
        """All else, where there is no warm start."""
        others = () if self.warm_start_steps else set(WarmStartSection.model_fields) - {"warm_start_steps"}
        return dict.fromkeys(others, "without warm_start_steps; add it")

    @property
    def demonstrations(self) -> int:
        """Episodes that the demonstrator plays, derived where it was left out."""
        return self.num_demonstrations or self.warm_start_steps * self.warm_start_batch_size

    @model_validator(mode="after")
    def _is_kept(self) -> WarmStartSection:
        check_episodes("a warm start", self.demonstrations, "num_demonstrations or warm_start_steps")
        return self


class EpochChoice(Section):
    """How often data is gone through; RL has it as well."""

    num_epoch: Count = 1
    """How often `agentrl sft` trains on each conversation or episode (count). In `agentrl train`, where
    num_rollout is left out: as many iterations as play each row of prompt_data, one file, that often."""

    @property
    def has_epochs(self) -> bool:
        """Whether it was set."""
        return bool(self.model_fields_set & EpochChoice.model_fields.keys())


class SftSection(EpochChoice):
    """Supervised fine-tuning (`agentrl sft`): on conversations, or on episodes that a run has played."""

    sft_data: PathList = None
    """What is imitated: files of conversations in the formats of prompt_data, or a folder of them; folders of
    runs, or files of their journals (step_000012.jsonl.gz); `path@[0:100]` = some of a path; several as a
    list (as a flag: JSON)."""
    messages_key: str = "messages"
    """Column of the messages, in the form of OpenAI's API; the assistant's are trained, except those with
    weight = 0 or step_loss_mask = 0."""
    tools_key: str | None = None
    """Column of the tool schemas on offer; left out, `tools` where a row has it, else the environment's."""
    min_reward: float | None = None
    """Least reward of an episode that is imitated; left out, every completed episode is."""
    sft_batch_size: Count = 32
    """Conversations or episodes in one optimizer step (count)."""
    sft_lr: Annotated[Annotated[float, Field(gt=0.0)] | None, Changes.LEARNING] = None
    """Peak learning rate of SFT; left out, lr. How it rises and falls is the trainer's."""
    eval_sft_data: PathList = None
    """Held-out conversations or episodes, in the form of sft_data; left out, no loss is measured."""


SFT = "sft"
(EPOCHS,) = EpochChoice.model_fields
OF_SFT = frozenset(SftSection.model_fields) - {EPOCHS}
"""The section of SFT, its setting that RL has, too, and the settings of SFT alone."""


class CheckpointSection(Section):
    """What a run goes on from after an interruption (`agentrl train RUN --resume`; sft likewise)."""

    save_interval: Annotated[Count, Changes.COURSE] = 10
    """RL iterations, or optimizer steps of SFT, between checkpoints (count); one is also written when the run
    ends or is stopped."""
    save_total_limit: Annotated[Count, Changes.COURSE] = 2
    """The newest checkpoints that are kept (count)."""
    metric_for_best_model: Annotated[str | None, Changes.COURSE] = None
    """Metric of evaluations, such as eval/greedy, whose highest value keeps its checkpoint, and its model
    where the last one is worse; left out, the sampled score of the (first) held-out set; none = no metric."""
    max_restarts: Annotated[int, Field(ge=0), Changes.COURSE] = 0
    """How often a run whose engine or trainer has died resumes by itself from its last checkpoint (count)."""
