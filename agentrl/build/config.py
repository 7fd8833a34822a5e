"""The whole configuration of a run: a tree of sections, each from the room that it configures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import Field, model_validator

from agentrl.algorithms.config import RECIPES, AlgorithmConfig
from agentrl.config import Section
from agentrl.engine.config import EngineConfig
from agentrl.rendering.config import RenderingConfig
from agentrl.rollout.config import Count, RolloutConfig
from agentrl.tools.config import ToolChoice
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.types import JSON


class RunSection(Section):
    """The run itself."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    """The run's folder below output_dir; left out, the environment's id and the seed."""
    output_dir: str = "runs"
    """Where runs are kept (folder)."""
    seed: int = 0
    """Seeds everything: weights, order of tasks, worlds, sampling."""
    num_threads: Count | None = None
    """Threads that torch computes with (count); left out, 1 for models under 20 million parameters
    (more are slower there), else every core."""
    inline: bool = False
    """Decode and train in the run's own process, where a debugger reaches both (the embedded engine and the
    torch trainer); replies and deadlines then wait for every step."""
    use_tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""


class EnvSection(ToolChoice):
    """The world that is trained in."""

    env: str = "HopSearch-v0"
    """Id of the environment (`agentrl envs list`), or package.module:Class."""
    env_kwargs: dict[str, JSON] = Field(default_factory=dict)
    """Arguments that the environment is made with (a table; as a flag: JSON)."""
    train_split: str = "train"
    """Split whose tasks RL plays."""


class ModelSection(Section):
    """The policy: an existing model, or a fresh small one for this environment."""

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
    def demonstrations(self) -> int:
        """Episodes that the demonstrator plays, derived where it was left out."""
        return self.num_demonstrations or self.warm_start_steps * self.warm_start_batch_size


class EvalSection(Section):
    """Held-out episodes before, during and after training."""

    eval_interval: Count = 10
    """RL iterations between evaluations (count)."""
    eval_split: str = "test"
    """Split that is held out."""
    eval_episodes: Count = 256
    """Episodes in each evaluation, sampled and again greedily (count)."""
    eval_temperature: Annotated[float, Field(ge=0.0)] = 1.0
    """Sampling temperature of the sampled half (0 = greedy, like the other half)."""


class RunConfig(Section):
    """A run, whole. Written beside it as config.toml; reading that back gives an equal object."""

    run: RunSection = RunSection()
    env: EnvSection = EnvSection()
    model: ModelSection = ModelSection()
    warm_start: WarmStartSection = WarmStartSection()
    rendering: RenderingConfig = RenderingConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    megatron: MegatronConfig = MegatronConfig()
    engine: EngineConfig = EngineConfig()
    eval: EvalSection = EvalSection()

    @property
    def run_name(self) -> str:
        """The run's folder name, derived where it was left out."""
        if self.run.name is not None:
            return self.run.name
        safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in self.env.env)
        return f"{safe}-seed{self.run.seed}"

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about settings that are allowed and have a price."""
        rollout = self.rollout
        if rollout.rollout_top_p == 1.0 and rollout.rollout_top_k == 0:
            return ()
        return (
            f"rollout_top_p = {rollout.rollout_top_p:g} and rollout_top_k = {rollout.rollout_top_k} cut the "
            "distribution that is sampled, while logprobs and gradients are the whole policy's: the "
            "gradient is biased towards tokens that the cut kept; 1 and 0 switch both off.",
        )

    @property
    def inactive(self) -> Mapping[str, str]:
        """Settings of a model, a trainer or an engine that this run does not have."""
        return dict([*_of_other_models(self), *_of_other_trainers(self), *_of_other_engines(self)])

    @model_validator(mode="after")
    def _megatron_does_what_is_asked(self) -> RunConfig:
        if self.trainer.trainer == "megatron" and self.trainer.optimizer == "muon":
            raise ValueError("trainer = megatron has no muon: choose adamw, or trainer = torch.")
        return self

    @model_validator(mode="after")
    def _a_group_needs_siblings(self) -> RunConfig:
        size = self.rollout.n_samples_per_prompt
        name = self.algorithm.advantage_estimator
        if RECIPES[name].compares and size < 2 and self.rollout.num_rollout > 0:
            raise ValueError(
                f"n_samples_per_prompt = {size}: advantage_estimator `{name}` compares siblings and needs "
                "groups of at least 2; raise n_samples_per_prompt."
            )
        return self


_SHAPE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("kv_channels", "rotary_base", "vocab_size"),
)
_WARM_START = ("warm_start_batch_size", "warm_start_lr", "warm_start_split", "num_demonstrations")
_SERVERS_OF_THE_POLICY = ("rollout_num_engines", "rollout_num_gpus_per_engine", "sglang_groups", "sglang")
_SERVERS = (
    *("sglang_python", "rollout_health_check_interval", "rollout_health_check_timeout"),
    "rollout_health_check_first_wait",
)


def _of_other_models(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.model.hf_checkpoint is not None:
        yield from dict.fromkeys(_SHAPE, "with hf_checkpoint, whose shape it has; drop that").items()
    if not config.warm_start.warm_start_steps:
        yield from dict.fromkeys(_WARM_START, "without warm_start_steps; add it").items()
    if config.rendering.dialect == "inline":
        yield "chat_format", "with dialect = inline; choose another"


def _of_other_trainers(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.trainer.trainer == "megatron" and config.engine.engine == "sglang":
        yield "inline", "with trainer = megatron and engine = sglang, which are processes; drop it"
    if config.trainer.trainer != "megatron":
        yield from dict.fromkeys(MegatronConfig.model_fields, "without trainer = megatron; choose it").items()
    if config.trainer.lr_decay_style == "constant":
        for name in ("min_lr", "lr_decay_iters"):
            yield name, "without lr_decay_style = linear or cosine; choose one"


def _of_other_engines(config: RunConfig) -> Iterator[tuple[str, str]]:
    engine = config.engine
    starts_servers = engine.engine == "sglang" and engine.sglang_url is None
    if engine.engine != "sglang":
        for name in ("sglang_url", "update_weights_transport", *_SERVERS_OF_THE_POLICY):
            yield name, "without engine = sglang; choose it"
    elif not starts_servers:
        for name in _SERVERS_OF_THE_POLICY:
            yield name, "with sglang_url, whose servers run already; drop that"
    if not starts_servers and not engine.sglang_models:
        for name in _SERVERS:
            yield name, "without servers that the run starts (engine = sglang); choose that"
