"""Settings of the trainer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from agentrl.config import IN_COMMAS, Changes, Needs, Section, Spelling
from agentrl.errors import ConfigError
from agentrl.types import JSON

COLOCATION = ("colocate", "offload_train", "offload_rollout")
"""The settings of engine and trainer that take turns."""
OF_ITERATIONS = ("reset_optimizer_states", "router_replay")
"""Settings of RL's iterations."""
EVERY_VERSION = (
    "an engine that frees its weights (offload_rollout, colocate) needs new ones after every iteration: drop "
    "update_weights_interval, or offload_rollout = false."
)
"""Why an interval of updates is refused."""

ON_GPUS: Final[Mapping[str, int | bool]] = {"bf16": True, "max_tokens_per_gpu": 8192}
"""What is left out, where ranks compute on GPUs: short rows keep a GPU waiting for the next kernel."""

Size = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=0.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


def _optimizer(name: object) -> object:
    """The name `adam` is common for AdamW, too."""
    return "adamw" if name == "adam" else name


class RanksConfig(Section):
    """The ranks of a trainer. Each is a process with a GPU of its own, or with threads of the CPU."""

    actor_num_nodes: Annotated[Size, Changes.SPEED] = 1
    """Machines; more than 1 needs cluster = ray (count)."""
    actor_num_gpus_per_node: Annotated[Size, Changes.SPEED] = 1
    """Ranks of each machine (count). A run of the torch trainer may resume with another number of them."""

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node


def _replays_engines(on: JSON, before: Mapping[str, JSON]) -> Mapping[str, JSON]:
    if on:
        return {"router_replay": "R3"}
    return {"router_replay": None} if before.get("router_replay") == "R3" else {}


def _replays_own(on: JSON, before: Mapping[str, JSON]) -> Mapping[str, JSON]:
    chosen = before.get("router_replay")
    if on:
        return {"router_replay": chosen or "R2"}
    return {"router_replay": None} if chosen == "R2" else {}


def _compiled(patterns: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"{info.field_name} has `{pattern}`, which is no regular expression ({error}); mend it."
            ) from None
    return patterns


Patterns = Annotated[tuple[str, ...], IN_COMMAS, AfterValidator(_compiled)]


class TrainerConfig(Section):
    """The optimizer, its schedule, and how much goes through the model at once."""

    trainer: Annotated[Literal["torch", "megatron"], Changes.SPEED] = "torch"
    """Plain torch, whose ranks share the weights of any model, or Megatron-Core and its layouts (RL and SFT;
    a warm start is torch's)."""
    device: Annotated[Literal["cpu", "cuda"], Changes.SPEED] = "cpu"
    """Where the torch trainer computes: cpu, or cuda, a GPU for each rank. Megatron's ranks take GPUs where
    there are some."""
    fsdp_size: Annotated[Size | None, Changes.SPEED] = None
    """Ranks of the torch trainer that share one replica of the weights, of gradients and of the optimizer's
    state (count); left out, all share one; 1: each has a replica. It changes speed and memory."""
    optimizer: Annotated[Literal["adamw", "muon"], BeforeValidator(_optimizer)] = "adamw"
    """adamw (adam is another name for it) for everything, or muon for the 2-D hidden weights and adamw for
    the rest."""
    optimizer_cpu_offload: Annotated[bool, Changes.SPEED] = False
    """Keep AdamW's weights in fp32 and its means in the CPU's memory, and compute its steps there: a GPU has
    8 bytes less for each parameter (Megatron in bf16: 12, those of a rank's share), and gradients and new
    weights travel once a step."""
    reset_optimizer_states: bool = False
    """The optimizers' means, and AdamW's count of steps for them, begin anew in each iteration, with its
    first step; the learning rate goes on."""
    lr: Annotated[float, Field(gt=0.0), Changes.LEARNING] = 2e-4
    """Peak learning rate."""
    min_lr: Annotated[Rate, Changes.LEARNING] = 0.0
    """Learning rate that a decay ends at."""
    lr_warmup_iters: Annotated[int, Field(ge=0)] = 4
    """Optimizer steps over which the learning rate rises linearly to lr (count; 0 = none)."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls from lr to min_lr after the warm-up."""
    lr_decay_iters: Annotated[Annotated[int, Field(ge=1)] | None, Changes.LEARNING] = None
    """Optimizer steps after which min_lr is reached, warm-up included (count); left out, all steps."""
    weight_decay: Rate = 0.0
    """Decoupled weight decay of the weights with two dimensions; norms and biases have none."""
    adam_beta1: Beta = 0.9
    """Decay of AdamW's mean of gradients."""
    adam_beta2: Beta = 0.95
    """Decay of AdamW's mean of squared gradients."""
    adam_eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """Added to the root of AdamW's mean of squared gradients before it divides."""
    clip_grad: Annotated[float, Field(gt=0.0)] = 1.0
    """Largest norm of the whole gradient; a longer one is scaled down to it."""
    max_tokens_per_gpu: Annotated[int, Field(ge=1), Changes.SPEED] = 1024
    """Most tokens that go through the model at once (tokens). It changes speed and memory, never the
    gradient; a longer sample goes through by itself. Left out, a run decides when it begins, as for bf16:
    8192 where ranks get GPUs."""
    bf16: bool = False
    """Multiply matrices in bfloat16; gradients are added up and the optimizer steps in fp32. Megatron
    publishes bfloat16, the torch trainer fp32. Left out, a run decides when it begins: true where ranks get
    GPUs (trainer = megatron, or device = cuda), false on the CPU; its config.toml has what acted."""

    router_replay: Literal["R2", "R3"] | None = None
    """Whose experts count when the policy of a mixture of experts is trained: R3, those that the engine took
    (rollout routing replay), also where logprobs are computed before the first update; R2, those of that
    computation; left out, those that the trainer's routers choose. The weights of their outputs are always
    the trainer's."""
    moe_aux_loss_coeff: Rate = 0.0
    """Weight of a loss that balances the experts of a mixture, as Megatron's seq_aux_loss: of each sequence
    and layer, 1 where all experts get as much; a sum over layers, a mean over sequences. 0 = off."""
    moe_z_loss_coeff: Rate = 0.0
    """Weight of a loss that keeps the logits of routers small: the square of their logsumexp; a sum over
    layers, a mean over tokens. 0 = off."""
    enable_mtp_training: bool = False
    """Train the layers that predict tokens further ahead (multi-token prediction), by which SGLang decodes
    speculatively, and publish them with the policy (trainer = megatron; DeepSeek-V3, GLM-4.5, MiMo). Their
    loss changes no other weight."""
    mtp_loss_scaling_factor: Annotated[float, Field(gt=0.0), Needs("enable_mtp_training")] = 0.2
    """Weight of their loss: a mean cross-entropy over the tokens that the policy learns from, and over
    layers."""
    gradient_checkpointing: Annotated[bool, Changes.SPEED] = False
    """Compute a layer a second time in the backward pass instead of keeping its activations: a third
    slower, a small part of the memory (the torch trainer; Megatron has recompute_granularity)."""
    only_train_params_name_list: Patterns = ()
    """Regular expressions of the parameters that learn, each searched for in their Hugging Face names
    (layers\\.1\\.,norm); left out, all learn. A critic has the same for its trunk."""
    freeze_params_name_list: Patterns = ()
    """Regular expressions of parameters that do not learn (embed_tokens,norm): they get no gradient, and the
    optimizer has no state of them."""
    lora_rank: Annotated[int, Field(ge=1)] | None = None
    """Rank of low-rank adapters, which learn in place of the weights (LoRA; count); None = the weights.
    The reference, if there is one, is the network without them. Engines get the weights with the adapters
    added, and checkpoints the adapters alone, as peft saves them (the torch trainer)."""
    lora_alpha: Annotated[int, Field(ge=1), Needs("lora_rank")] = 32
    """Weight of the adapters: their product is multiplied by lora_alpha / lora_rank."""
    lora_target_modules: Annotated[str, Needs("lora_rank")] = "all-linear"
    """Names of the matrices that get adapters, separated by commas (q_proj,v_proj); all-linear: all but the
    head and experts."""

    colocate: bool = False
    """Engine and trainer take turns on one set of devices: implies offload_rollout and offload_train."""
    offload_rollout: bool | None = None
    """Whether the engine frees its weights and its cache while the trainer works; left out, as colocate."""
    offload_train: bool | None = None
    """Whether the trainer moves its networks and optimizers to the CPU's memory while the engine works (on
    the CPU it returns unused memory); left out, as colocate."""

    spellings: ClassVar[Mapping[str, Spelling]] = {
        "use_rollout_routing_replay": Spelling("Same as router_replay = R3.", _replays_engines),
        "use_routing_replay": Spelling("Same as router_replay = R2, unless that is R3.", _replays_own),
    }

    def of_critic(
        self, lr: float | None, lr_warmup_iters: int | None, weight_decay: float | None
    ) -> TrainerConfig:
        """These settings as a critic learns by them. None = as the policy."""
        own = {"lr": lr, "lr_warmup_iters": lr_warmup_iters, "weight_decay": weight_decay}
        return self.model_copy(update={name: value for name, value in own.items() if value is not None})

    @property
    def lora_scale(self) -> float:
        """What the product of an adapter's matrices is multiplied by; 0 = there are none."""
        return self.lora_alpha / self.lora_rank if self.lora_rank else 0.0

    @property
    def has_router_losses(self) -> bool:
        """Whether a loss of routers is added to that of the algorithm."""
        return self.moe_aux_loss_coeff > 0 or self.moe_z_loss_coeff > 0

    @property
    def published_dtype(self) -> str:
        """The dtype of the weights that an engine gets."""
        return "bfloat16" if self.trainer == "megatron" and self.bf16 else "float32"

    @property
    def all_learn(self) -> bool:
        """Whether every weight learns."""
        return not (self.lora_rank or self.only_train_params_name_list or self.freeze_params_name_list)

    @property
    def offloads_rollout(self) -> bool:
        """`offload_rollout`, derived where it was left out."""
        return self.colocate if self.offload_rollout is None else self.offload_rollout

    @property
    def offloads_train(self) -> bool:
        """`offload_train`, derived where it was left out."""
        return self.colocate if self.offload_train is None else self.offload_train

    @property
    def moves_optimizer_to_cpu(self) -> bool:
        """Whether `optimizer_cpu_offload` is set, and has an effect."""
        return self.optimizer_cpu_offload and "optimizer_cpu_offload" not in self.inactive

    @property
    def with_all_on_device(self) -> TrainerConfig:
        """The same, without `optimizer_cpu_offload`."""
        return self.model_copy(update={"optimizer_cpu_offload": False})

    @property
    def inactive(self) -> dict[str, str]:
        """How the learning rate falls, where it does not; what learns, beside adapters."""
        falls = () if self.lr_decay_style != "constant" else ("min_lr", "lr_decay_iters")
        own = dict.fromkeys(falls, "without lr_decay_style = linear or cosine; choose one")
        patterns = ("only_train_params_name_list", "freeze_params_name_list")
        if self.lora_rank:
            own |= dict.fromkeys(patterns, "with lora_rank, under which adapters alone learn; drop one")
        if self.trainer == "torch" and self.device == "cpu":
            own["optimizer_cpu_offload"] = (
                "with device = cpu, where the optimizer's state is in any case; drop it"
            )
        return own

    @model_validator(mode="after")
    def _steps_on_the_cpu(self) -> TrainerConfig:
        if self.optimizer_cpu_offload and self.optimizer != "adamw":
            raise ValueError(
                "optimizer_cpu_offload has no muon, which multiplies matrices; drop it, or choose adamw."
            )
        return self

    @model_validator(mode="after")
    def _falls(self) -> TrainerConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr ({self.min_lr:g}) must not exceed lr ({self.lr:g}); lower min_lr.")
        return self


def learning_names(config: TrainerConfig, names: Sequence[str], model: str) -> set[str]:
    """Those of a model's parameters that its settings have learn. model: in words.

    Raises:
        ConfigError: a pattern is in the name of no parameter, or nothing is left to learn.
    """
    only, frozen = config.only_train_params_name_list, config.freeze_params_name_list
    if unknown := [pattern for pattern in (*only, *frozen) if not _is_any((pattern,), names)]:
        raise ConfigError(
            f"`{unknown[0]}` is in the name of no parameter of {model}; mend it: "
            f"they are named as {names[0]} and {names[-1]} are."
        )
    learning = {name for name in names if (not only or _is_any(only, [name])) and not _is_any(frozen, [name])}
    if not learning:
        raise ConfigError(f"freeze_params_name_list leaves nothing of {model} to learn; drop some of it.")
    return learning


def _is_any(patterns: Iterable[str], names: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns for name in names)
