"""The configuration of a run: a tree of sections, each defined in the package that it configures."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import model_validator

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.assembly import cuts
from agentrl.assembly.sections import (
    EPOCHS,
    OF_SFT,
    CheckpointSection,
    EnvSection,
    ModelSection,
    RunSection,
    SftSection,
    WarmStartSection,
)
from agentrl.config import Section, leaves
from agentrl.data.config import COLUMNS, DataConfig
from agentrl.data.eval_sets import sets_of
from agentrl.engine.config import EngineConfig
from agentrl.envs.config import GenerateChoice, LimitChoice, RewardChoice
from agentrl.processes.config import ClusterConfig
from agentrl.records.config import ObserveConfig
from agentrl.rendering.config import RenderingConfig, StopChoice
from agentrl.rollout.config import PLAYS_ONLY, REPLAYS, EvalSection, RolloutConfig
from agentrl.tools.config import ToolChoice
from agentrl.trainer.config import (
    COLOCATION,
    EVERY_VERSION,
    OF_ITERATIONS,
    RanksConfig,
    TrainerConfig,
)
from agentrl.trainer.megatron.config import MegatronConfig

Command = Literal["train", "sft"]


class RunConfig(Section):
    """The configuration of a run. It is written to config.toml; reading that back gives an equal object."""

    command: ClassVar[Command] = "train"
    """The command whose run this is."""
    others: ClassVar[Path | None] = Path(__file__).with_name("other_settings.toml")

    run: RunSection = RunSection()
    env: EnvSection = EnvSection()
    data: DataConfig = DataConfig()
    model: ModelSection = ModelSection()
    sft: SftSection = SftSection()
    warm_start: WarmStartSection = WarmStartSection()
    rendering: RenderingConfig = RenderingConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    layout: MegatronConfig = MegatronConfig()
    cluster: ClusterConfig = ClusterConfig()
    engine: EngineConfig = EngineConfig()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    observe: ObserveConfig = ObserveConfig()

    @property
    def run_name(self) -> str:
        """The run's folder name, derived where it was left out."""
        if self.run.name is not None:
            return self.run.name
        safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in self.env.env)
        return f"{safe}-seed{self.run.seed}"

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about settings that are valid and have a drawback."""
        return (*_untaught(self), *_of_sampling(self), *self.rollout.warnings)

    @property
    def replays_sampling_mask(self) -> bool:
        """Whether logprobs are renormalised over what top-p and top-k kept, derived where it was left out."""
        return cuts.are_replayed(self.rollout, self.engine)

    @property
    def returns_experts(self) -> bool:
        """Whether the engine returns the experts of tokens, derived where it was left out."""
        return cuts.returns_experts(self.rollout, self.trainer)

    @property
    def inactive(self) -> dict[str, str]:
        """Those of all sections, and settings without effect with this command, data, trainer and engine."""
        own = _inactive_data(self) | _inactive_layout(self) | _inactive_recordings(self)
        own |= _inactive_engine(self) | _inactive_cluster(self)
        plays = self.rollout.replay is None
        if self._plays_inline:
            own["num_rollout_workers"] = "with inline, where the run's own process plays; drop that"
        if plays and not self.rollout.off_policy_by:
            own["accept_bias"] = "without max_staleness above 0; raise it"
        if plays and not self.rollout.spans_updates:
            own["mask_offpolicy_in_partial_rollout"] = "without partial_rollout and max_staleness; set both"
        if plays and not (self.algorithm.use_opd or self.rollout.debug_rollout_only):
            own["privileged_context_path"] = "without use_opd; add it"
        return super().inactive | own | self._of_other_command | _of_other_half(self)

    @property
    def _of_other_command(self) -> dict[str, str]:
        return dict.fromkeys(OF_SFT, "without agentrl sft; use that command") | _inactive_epochs(self)

    @property
    def counts_epochs(self) -> bool:
        """Whether the iterations of RL follow from its epochs: passes over the rows of one file."""
        reads_file = isinstance(self.data.prompt_data, str) and self.data.data_source_path is None
        plays = self.command == "train" and self.rollout.replay is None
        return plays and self.sft.has_epochs and reads_file and not self.rollout.has_iterations

    @property
    def num_torch_ranks(self) -> int:
        """Ranks of the torch trainer; a warm start before Megatron has one (count)."""
        return self.layout.world_size if self.trainer.trainer == "torch" else 1

    @property
    def fsdp_size(self) -> int:
        """Ranks of the torch trainer that share one replica, derived where it was left out (count)."""
        return self.trainer.fsdp_size or self.layout.world_size

    @property
    def warm_starts(self) -> bool:
        """Whether the run begins with a warm start."""
        return bool(self.warm_start.warm_start_steps) and not self.rollout.debug_rollout_only

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates: a replay has no engine, and `agentrl rollout` trains nothing."""
        return self.rollout.replay is None and not self.rollout.debug_rollout_only

    @property
    def best_metric(self) -> str | None:
        """The metric whose highest value keeps its checkpoint, derived where it was left out."""
        chosen, sets = self.checkpoint.metric_for_best_model, self.eval.eval_prompt_data
        if chosen is not None or self.command != "train" or not self.evaluates:
            return None if chosen == "none" else chosen
        name = next(iter(sets_of(sets))) if sets is not None else ""
        return f"eval/{name}/sampled" if name else "eval/sampled"

    @property
    def evaluates_beside(self) -> bool:
        """Whether training goes on while an evaluation plays."""
        chosen = self.eval.async_eval
        return self.evaluates and (self.rollout.is_async if chosen is None else chosen)

    @property
    def has_eval_engine(self) -> bool:
        """Whether evaluations have an engine of their own."""
        return self.evaluates_beside and self.eval.eval_engine == "own" and not _inactive_engine(self)

    @property
    def num_players(self) -> int:
        """Processes that play groups, besides the run's own (count)."""
        plays = self.command == "train" and self.rollout.replay is None
        return self.rollout.num_rollout_workers if plays and not self._plays_inline else 0

    @property
    def _plays_inline(self) -> bool:
        return self.run.inline and self.engine.engine == "embedded"

    @model_validator(mode="after")
    def _replicas_come_out_even(self) -> RunConfig:
        ranks, size = self.layout.world_size, self.trainer.fsdp_size
        if self.trainer.trainer == "megatron":
            self.layout.check_ranks()
        elif ranks > 1 and size is not None and ranks % size:
            raise ValueError(
                f"actor_num_nodes x actor_num_gpus_per_node = {ranks} must be a multiple of fsdp_size = "
                f"{size}; change one of them."
            )
        return self

    @model_validator(mode="after")
    def _the_trainer_has_adapters(self) -> RunConfig:
        if self.trainer.lora_rank and self.trainer.trainer == "megatron":
            raise ValueError("trainer = megatron has no adapters: drop lora_rank, or choose trainer = torch.")
        if self.trainer.lora_rank and self.algorithm.ref_update_interval is not None:
            raise ValueError(
                "ref_update_interval moves the reference, which with lora_rank is the network without its "
                "adapters; drop one."
            )
        return self

    @model_validator(mode="after")
    def _adapters_are_published(self) -> RunConfig:
        if self.engine.update_weights_transport != "lora":
            return self
        if not self.trainer.lora_rank:
            raise ValueError("update_weights_transport = lora sends adapters, and none learn: set lora_rank.")
        if self.warm_starts:
            raise ValueError(
                "update_weights_transport = lora sends adapters alone, and a warm start learns all weights: "
                "train from its checkpoint-warm-start (hf_checkpoint), or choose another transport."
            )
        if self.trainer.offloads_rollout:
            raise ValueError(
                "update_weights_transport = lora sends adapters alone, and an engine that frees its weights "
                "needs all of them again: drop offload_rollout and colocate, or choose another transport."
            )
        return self

    @model_validator(mode="after")
    def _ranks_on_ray_are_processes(self) -> RunConfig:
        if self.cluster.cluster == "ray" and self.run.inline:
            raise ValueError(
                "inline = true trains in the run's own process, and cluster = ray in others; drop one."
            )
        return self

    @model_validator(mode="after")
    def _the_engine_serves_the_rollouts(self) -> RunConfig:
        if self.trainer.offloads_rollout and self.rollout.update_weights_interval > 1:
            raise ValueError(EVERY_VERSION)
        _check_sampling(self)
        if not self.rollout.debug_rollout_only:
            has_own_pass = self.algorithm.rescores(is_async=self.rollout.is_async)
            cuts.check_routing(self.rollout, self.trainer, has_own_pass=has_own_pass)
        if self.returns_experts:
            cuts.check_experts(self.engine)
        return self

    @model_validator(mode="after")
    def _the_algorithm_suits_the_rollouts(self) -> RunConfig:
        rollout = self.rollout
        # A journal is checked when it is opened.
        if rollout.num_rollout > 0 and rollout.replay is None and not rollout.debug_rollout_only:
            self.algorithm.check_rollouts(rollout.n_samples_per_prompt, off_policy_by=rollout.off_policy_by)
            if self.algorithm.use_opd:
                self.algorithm.opd.check(
                    rollout.privileged_context_path,
                    rollout.rollout_temperature,
                    is_renormalised=self.replays_sampling_mask,
                )
        if rollout.num_rollout > 0 and not rollout.debug_rollout_only:
            self.algorithm.check_steps(rollout.num_steps_per_rollout * self.algorithm.ppo_epochs)
        return self


_OF_PLAYING = {"num_cpus_per_server", "num_cpus_per_rollout_worker"}
"""Settings of the cluster that have no effect where nothing is played."""


def _of_other_half(config: RunConfig) -> dict[str, str]:
    """The settings of playing, or of training, where a run of RL leaves that out."""
    if config.command != "train":
        return {}
    if config.rollout.replay is not None:
        return dict.fromkeys(_playing(config), REPLAYS)
    return dict.fromkeys(_training(config), PLAYS_ONLY)


def _playing(config: RunConfig) -> set[str]:
    """The settings of other sections that have no effect on a replay."""
    names = {*EvalSection.model_fields, *COLOCATION, "metric_for_best_model", "rollout_max_prompt_len"}
    # The length of an episode divides its loss, and arguments of the environment name models.
    names |= set(EngineConfig.model_fields) - {"max_context_len", "sglang_models"}
    names |= {"opponents", *RewardChoice.model_fields, *GenerateChoice.model_fields, *_OF_PLAYING}
    names |= {*StopChoice.model_fields, "profile_engine_step"}
    is_fresh = config.model.hf_checkpoint is None
    if not (is_fresh and config.data.gives_prompts):
        # No tokenizer is trained on the prompts.
        names |= {*DataConfig.model_fields, "train_split"}
    if not config.warm_starts:
        names |= {*LimitChoice.model_fields, "max_turns"}
    if not (config.warm_starts or is_fresh):
        names |= {*ToolChoice.model_fields, *RenderingConfig.model_fields}
    return names


def _training(config: RunConfig) -> set[str]:
    """The settings of other sections that have no effect where nothing is trained."""
    if not config.rollout.debug_rollout_only:
        return set()
    names = {*EvalSection.model_fields, "metric_for_best_model", *WarmStartSection.model_fields}
    names |= {*TrainerConfig.model_fields, *MegatronConfig.model_fields, *ClusterConfig.model_fields}
    names |= {"profile_step", "memory_snapshot_step"}
    names |= {name for name, (section, _) in leaves(RunConfig).items() if section == "algorithm"}
    return names


def _untaught(config: RunConfig) -> tuple[str, ...]:
    trains = (
        config.command == "train" and config.rollout.num_rollout and not config.rollout.debug_rollout_only
    )
    has_model = config.model.hf_checkpoint is not None or config.warm_starts or config.algorithm.use_opd
    if has_model or not trains or config.rollout.replay is not None:
        return ()
    return (
        "the model is new and has no warm start: it writes noise, which earns nothing, so nothing is "
        "learned; set warm_start_steps (such as 250), or hf_checkpoint.",
    )


def _publishes(config: RunConfig) -> bool:
    """Whether an engine gets what is learned."""
    rollout = config.rollout
    return config.command == "train" and rollout.replay is None and not rollout.debug_rollout_only


def _check_sampling(config: RunConfig) -> None:
    cuts.check(config.rollout, config.engine)
    if not config.rollout.debug_rollout_only:
        cuts.check_drafts(config.trainer, config.engine, plays=_publishes(config))


def _of_sampling(config: RunConfig) -> tuple[str, ...]:
    cut = cuts.warnings(config.rollout, config.engine)
    return (*cut, *(cuts.drafts_told(config.trainer, config.engine) if _publishes(config) else ()))


def _inactive_epochs(config: RunConfig) -> dict[str, str]:
    if config.counts_epochs:
        return {}
    if config.rollout.has_iterations:
        return {EPOCHS: "with num_rollout, which counts iterations; drop that"}
    return {EPOCHS: "without one file of prompt_data, whose rows it counts; name that"}


def _inactive_data(config: RunConfig) -> dict[str, str]:
    data, inactive = config.data, {}
    if data.data_source_path is not None:
        names = ("prompt_data", "rollout_shuffle", "train_split")
        inactive = dict.fromkeys(names, "with data_source_path, which gives the prompts; drop that")
    reads_files = data.prompt_data is not None and not inactive
    if not (reads_files or config.eval.eval_prompt_data is not None):
        inactive |= dict.fromkeys(COLUMNS, "without prompt_data or eval_prompt_data; add one")
    return inactive


def _inactive_layout(config: RunConfig) -> dict[str, str]:
    if config.trainer.trainer != "megatron":
        own = MegatronConfig.model_fields.keys() - RanksConfig.model_fields.keys()
        shares = {} if config.layout.world_size > 1 else {"fsdp_size": "with one rank; take several"}
        return dict.fromkeys(own, "without trainer = megatron; choose it") | shares
    takes_gpus = {"device": "with trainer = megatron, whose ranks take GPUs where there are some; drop that"}
    takes_gpus |= {"fsdp_size": "with trainer = megatron, which has a layout; drop that"}
    processes = "with trainer = megatron and engine = sglang, which are processes; drop it"
    return takes_gpus | ({"inline": processes} if config.engine.engine == "sglang" else {})


def _inactive_cluster(config: RunConfig) -> dict[str, str]:
    if config.cluster.cluster == "local":
        return {}
    reasons: dict[str, str] = {}
    if config.trainer.trainer != "megatron" and config.trainer.device == "cpu":
        reasons["num_gpus_per_rank"] = "without trainer = megatron or device = cuda; choose one"
    serves_policy = config.engine.engine == "sglang" and config.engine.sglang_url is None
    if not (serves_policy or config.engine.sglang_models):
        reasons["num_cpus_per_server"] = config.engine.without_servers
    if not config.num_players:
        reasons["num_cpus_per_rollout_worker"] = "without num_rollout_workers; set it"
    return reasons


def _inactive_engine(config: RunConfig) -> dict[str, str]:
    """An engine of evaluations alone, where the weights of the other stay, or none can start."""
    if not config.evaluates_beside:
        return {"eval_engine": "without async_eval or max_staleness above 0; set one"}
    if config.engine.sglang_url is not None:
        return {"eval_engine": "with sglang_url, whose servers are the only engine; drop that"}
    return {}


def _inactive_recordings(config: RunConfig) -> dict[str, str]:
    """Recordings of steps that the run does not have."""
    steps, observe = config.rollout.num_rollout, config.observe
    names = ("profile_step", "memory_snapshot_step", "profile_engine_step")
    missing = [name for name in names if (getattr(observe, name) or 1) > steps]
    inactive = dict.fromkeys(missing, f"with num_rollout = {steps}, which is fewer steps; raise it")
    if config.engine.engine != "sglang":
        inactive["profile_engine_step"] = "without engine = sglang; choose it"
    return inactive


_WITH_ENV = ("env_kwargs", "tools", "tool_kwargs")
SFT_SETTINGS = frozenset(
    {
        *(*RunSection.model_fields, *ModelSection.model_fields),
        *(*SftSection.model_fields, *(RenderingConfig.model_fields.keys() - StopChoice.model_fields)),
        *({*TrainerConfig.model_fields, *MegatronConfig.model_fields} - {*COLOCATION, *OF_ITERATIONS}),
        *(ClusterConfig.model_fields.keys() - _OF_PLAYING),
        *("env", *_WITH_ENV, "rollout_max_context_len"),
        *("use_wandb", "wandb_project", "wandb_group", "wandb_mode", "log_model_config"),
        *("use_prometheus", "prometheus_host", "prometheus_port"),
        *("eval_interval", "save_interval", "save_total_limit", "max_restarts"),
    }
)
"""The settings that have an effect in `agentrl sft`."""


class SftConfig(RunConfig):
    """A run's configuration as `agentrl sft` reads it: one file serves SFT and RL."""

    command: ClassVar[Command] = "sft"

    @property
    def has_env(self) -> bool:
        """Whether an environment gives the dialect and the tools; there is none by default."""
        return "env" in self.env.model_fields_set

    @property
    def run_name(self) -> str:
        """That of the run that may follow, and -sft."""
        name = super().run_name if self.has_env or self.run.name is not None else f"seed{self.run.seed}"
        return name if name.endswith("-sft") else f"{name}-sft"

    @property
    def sft_trainer(self) -> TrainerConfig:
        """The trainer's settings, with the learning rate of SFT."""
        return self.trainer.model_copy(update={"lr": self.sft.sft_lr or self.trainer.lr})

    @property
    def inactive(self) -> dict[str, str]:
        """Settings of RL, and those of SFT without effect under the others."""
        own = super().inactive
        if not self.has_env:
            own |= dict.fromkeys(("env", *_WITH_ENV), "without env; name it")
        if self.sft.sft_lr is not None:
            own["lr"] = "with sft_lr; drop that"
        if self.trainer.trainer == "megatron":
            own["inline"] = "with trainer = megatron, whose ranks are processes; drop it"
        return own

    @property
    def _of_other_command(self) -> dict[str, str]:
        others = leaves(RunConfig).keys() - SFT_SETTINGS
        return dict.fromkeys(sorted(others), "with agentrl sft; use agentrl train")

    @model_validator(mode="after")
    def _sft_falls(self) -> SftConfig:
        if self.sft_trainer.lr < self.trainer.min_lr:
            raise ValueError(
                f"min_lr ({self.trainer.min_lr:g}) must not exceed sft_lr ({self.sft_trainer.lr:g}); lower "
                "min_lr."
            )
        return self


class OpenRunConfig(RunConfig):
    """A run's configuration where the loop is the caller's, who decides what `agentrl train` does between
    two iterations."""

    @property
    def inactive(self) -> dict[str, str]:
        """Settings of that loop, too."""
        return super().inactive | {
            name: f"where the loop is yours: it calls `{call}`; use agentrl train" for name, call in _CALLED
        }


_CALLED = (
    ("eval_interval", "evaluate"),
    ("skip_eval_before_train", "evaluate"),
    ("async_eval", "evaluate"),
    ("save_interval", "save"),
    ("max_restarts", "open_run"),
)
