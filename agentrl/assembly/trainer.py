"""From the configuration to the trainers: their plans and their ranks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedConfig

from agentrl.assembly import hooks
from agentrl.assembly.config import RunConfig
from agentrl.assembly.memory import check_machine, learned_memory
from agentrl.assembly.model import expert_layers_of, threads_for
from agentrl.assembly.places import LocalPlaces, ProcessPlaces
from agentrl.errors import ConfigError
from agentrl.losses import Loss, ValueLoss, sft_loss
from agentrl.processes.gpus import check_gpus, in_words, num_gpus
from agentrl.runtime.activity import STARTS_RANKS, working
from agentrl.runtime.extras import require
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.launch.inline import InlineRank
from agentrl.trainer.megatron import plan as megatron
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.files.checkpoint import CheckpointReader
from agentrl.trainer.megatron.model.shape import check_layout, check_replay, learning_of, shape_of
from agentrl.trainer.plan import Learning, Plan
from agentrl.trainer.ranks import RankTrainer
from agentrl.trainer.snapshots import Ranks
from agentrl.trainer.torch import plan as torch_plan
from agentrl.types import ScoreRole
from agentrl.types.seams import Trainer
from agentrl.weights.hf.quantized import quantized_model, scheme_of
from agentrl.weights.hf.source import ModelSource, open_source, open_tokenizer


@dataclass(slots=True)
class TrainerFactory:
    """Builds the trainers of a run, one after the other, on ranks that end with it.

    folder: for the output of the ranks. places: of each rank. The warm start and RL share the torch trainer's
    ranks; with `inline` the only one is this process.
    """

    config: RunConfig
    folder: Path
    places: ProcessPlaces = field(default_factory=LocalPlaces)
    _torch: Ranks | None = None
    _megatron: Ranks | None = None
    _early: asyncio.Task[RankTrainer] | None = None
    _importing: asyncio.Task[None] | None = None
    _started: list[Ranks] = field(default_factory=list)

    @property
    def where(self) -> dict[str, str]:
        """Where each rank runs that has been started."""
        ranks = [where for started in self._started for where in started.where]
        return {f"rank {number}": where for number, where in enumerate(ranks)}

    def prepare(self, source: ModelSource) -> None:
        """Check the models before the first episode, then start the ranks that the run needs first.

        They import torch, and Megatron, while engines start; nothing is on a GPU before they get a plan.

        Raises:
            UserError: see `check_device`, `check_trainable` and `check_auxiliary_models`.
        """
        check_device(self.config)
        check_trainable(source, self.config)
        check_auxiliary_models(source, self.config)
        trains, is_torch = self.config.rollout.num_rollout, self.config.trainer.trainer == "torch"
        if (trains and is_torch) or self.config.warm_start.warm_start_steps:
            self._torch_ranks()
        elif trains:
            self._megatron_ranks(self.config.layout.world_size)

    def begin(self, source: ModelSource, loss: Loss) -> None:
        """Have the ranks build the RL trainer from now on: `reinforcement` waits for it."""
        self._early = asyncio.create_task(self._start(self.plan(source, loss)))

    def begin_to_import(self) -> None:
        """Have `starting` wait until the ranks that were started have imported their workers."""
        if self._started and not self.config.run.inline:
            ranks = self._started[-1]
            self._importing = asyncio.create_task(ranks.run(ranks.imported))

    @property
    def starting(self) -> asyncio.Task[RankTrainer] | asyncio.Task[None] | None:
        """What `begin` or `begin_to_import` began: it raises TrainerError where a rank ends."""
        return self._early or self._importing

    async def warm_start(self, source: ModelSource) -> Trainer:
        """The supervised trainer: Muon on the hidden weights, a cosine down to 0, the rest as in RL.

        Raises:
            ModelLoadError: the torch trainer cannot train the model.
            TrainerError: the trainer's process does not start.
        """
        section, trainer = self.config.warm_start, self.config.trainer
        settings = TrainerConfig(
            optimizer="muon",
            lr=section.warm_start_lr,
            lr_decay_style="cosine",
            lr_warmup_iters=min(10, section.warm_start_steps // 10),
            clip_grad=trainer.clip_grad,
            max_tokens_per_gpu=trainer.max_tokens_per_gpu,
            bf16=trainer.bf16,
            device=trainer.device if trainer.trainer == "torch" else "cpu",
        )
        plan = torch_plan.TorchPlan(
            policy=Learning(sft_loss, settings, section.warm_start_steps),
            models={"old": str(source.directory.resolve())},
            num_threads=self._torch_threads(source),
            num_ranks=self.config.num_torch_ranks,
            fsdp_size=trainer.fsdp_size,
        )
        return await RankTrainer.started(self._torch_ranks(), plan)

    async def reinforcement(self, source: ModelSource, loss: Loss) -> RankTrainer:
        """The RL trainer, with the networks that the algorithm needs.

        A critic, and a reference without a directory of its own, are initialized with the policy's weights.

        Raises:
            ConfigError: the loss is defined where no other process can import it.
            ModelLoadError: the torch trainer cannot train the model.
            TrainerError: a process of the trainer does not start.
        """
        early, self._early = self._early, None
        with working(STARTS_RANKS):
            return await (self._start(self.plan(source, loss)) if early is None else early)

    async def supervised(self, source: ModelSource, settings: TrainerConfig, steps: int) -> RankTrainer:
        """The trainer of SFT, on the ranks that RL has, with the policy as its only network.

        Raises:
            ModelLoadError: the torch trainer cannot train the model.
            TrainerError: a process of the trainer does not start.
        """
        models: dict[ScoreRole, str] = {"old": str(source.directory.resolve())}
        return await self._start(self._plan_of(source, Learning(sft_loss, settings, steps), models))

    async def _start(self, plan: Plan) -> RankTrainer:
        if not isinstance(plan, megatron.MegatronPlan):
            return await RankTrainer.started(self._torch_ranks(), plan)
        if self._megatron is None:
            # The warm start is over: the memory of its rank is free for others.
            await self.close()
        return await RankTrainer.started(self._megatron_ranks(plan.world_size), plan)

    def plan(self, source: ModelSource, loss: Loss) -> Plan:
        """The plan of the RL trainer's ranks."""
        config, algorithm = self.config, self.config.algorithm
        steps = config.rollout.num_rollout * config.rollout.num_steps_per_rollout * algorithm.ppo_epochs
        critic, own = None, algorithm.critic
        if own is not None:
            settings = config.trainer.of_critic(
                own.critic_lr, own.critic_lr_warmup_iters, own.critic_weight_decay
            )
            critic = Learning(ValueLoss(own.value_clip or None), settings, steps)
        policy, models = Learning(loss, config.trainer, steps), _models(source, config)
        return self._plan_of(source, policy, models, critic)

    def _plan_of(
        self,
        source: ModelSource,
        policy: Learning,
        models: Mapping[ScoreRole, str],
        critic: Learning | None = None,
    ) -> Plan:
        config = self.config
        of_critic = config.algorithm.critic
        warmup = 0 if critic is None or of_critic is None else of_critic.num_critic_only_steps
        moves = "ref" in models and config.algorithm.ref_update_interval is not None
        if config.trainer.trainer == "megatron":
            return megatron.MegatronPlan(
                layout=config.layout,
                policy=policy,
                models=models,
                critic=critic,
                critic_warmup=warmup,
                moves_reference=moves,
            )
        return torch_plan.TorchPlan(
            policy=policy,
            models=models,
            critic=critic,
            critic_warmup=warmup,
            moves_reference=moves,
            num_threads=self._torch_threads(source),
            num_ranks=self.config.num_torch_ranks,
            fsdp_size=config.trainer.fsdp_size,
        )

    def _torch_threads(self, source: ModelSource) -> int:
        """Threads of each of the torch trainer's ranks, which share a machine (count)."""
        threads = threads_for(source.config, self.config.run.num_threads)
        is_torch = self.config.trainer.trainer == "torch"
        return max(1, threads // (self.config.layout.actor_num_gpus_per_node if is_torch else 1))

    async def close(self) -> None:
        """End all ranks, also those that are still starting."""
        await self._stop_starting()
        while self._started:
            ranks = self._started.pop()
            await ranks.run(ranks.close)
        self._torch = self._megatron = None

    async def _stop_starting(self) -> None:
        begun = [task for task in (self._early, self._importing) if task is not None]
        self._early = self._importing = None
        if any(not task.done() for task in begun):
            # Their call has no other end before the networks are built.
            for ranks in self._started:
                ranks.end()
        await asyncio.gather(*begun, return_exceptions=True)

    def _torch_ranks(self) -> Ranks:
        if self._torch is None:
            number, serves_rl = self.config.num_torch_ranks, self.config.trainer.trainer == "torch"
            folder = self.folder if serves_rl else self.folder / "warm-start"
            inline = self.config.run.inline and number == 1
            self._torch = InlineRank() if inline else self._processes(number, folder, torch_plan.WORKER)
            self._started.append(self._torch)
        return self._torch

    def _megatron_ranks(self, world_size: int) -> Ranks:
        if self._megatron is None:
            self._megatron = self._processes(world_size, self.folder, megatron.WORKER)
            self._started.append(self._megatron)
        return self._megatron

    def _processes(self, world_size: int, folder: Path, preloaded: str) -> Ranks:
        return self.places.ranks(world_size, folder, preloaded=preloaded)


def check_auxiliary_models(source: ModelSource, config: RunConfig) -> None:
    """Check before the first episode that the ranks can open the reference and the teacher.

    Raises:
        UserError: one does not exist, or has another vocabulary than the policy; or trainer = megatron, and
            its layout does not divide it, or Megatron does not train such a model.
    """
    algorithm = config.algorithm
    for directory, is_used in (
        (algorithm.ref_load, algorithm.has_reference),
        (algorithm.opd.teacher_load, algorithm.use_opd),
    ):
        if directory is not None and is_used:
            _check_auxiliary(directory, source, config)
    if algorithm.ref_load is not None and algorithm.ref_update_interval is not None:
        _check_same_network(algorithm.ref_load, source)


def check_device(config: RunConfig) -> None:
    """Check that this machine has a GPU, where its torch trainer is to compute on one.

    Raises:
        ConfigError: it has none.
    """
    if config.cluster.cluster == "local" and config.trainer.device == "cuda" and not num_gpus():
        raise ConfigError(
            f"{in_words()}, and device = cuda needs one; take a machine with a GPU, or drop device."
        )


def check_published(model: Path, config: RunConfig) -> None:
    """Check that the engine of a run can take new weights in the form that its model is stored in.

    Raises:
        ConfigError: it cannot; or a warm start would leave a model in another form.
    """
    scheme = None if quantized_model(str(model)) is None else scheme_of(model)
    if scheme is None:
        return
    if config.warm_starts:
        raise ConfigError(
            f"{model} is quantized, and a warm start of it would leave a model that is not; train it with "
            "`agentrl sft`, cast what that saves (`agentrl convert`), and begin with the result."
        )
    engine = config.engine
    takes_adapters = config.trainer.lora_rank is not None and engine.update_weights_transport == "lora"
    is_served = engine.engine == "sglang" and config.rollout.replay is None
    if is_served and not takes_adapters and not scheme.is_block_fp8:
        raise ConfigError(
            f"{model} has weights in {scheme.in_words}, and SGLang takes new ones in block fp8 alone: it "
            "rearranges others once it has loaded them. Cast the model so "
            f"(`agentrl convert {model} OUT --cast fp8`), or train adapters with "
            "update_weights_transport = lora."
        )


def check_trainable(source: ModelSource, config: RunConfig) -> None:
    """Check before the first episode that the trainer can train such a model.

    Raises:
        MissingExtraError: trainer = megatron, or lora_rank is set, and what it needs is not installed.
        ConfigError: its layout does not divide the model, or needs more GPUs than there are; or the torch
            trainer asks for more memory than this machine has; or what is to learn cannot be chosen so.
        ModelLoadError: Megatron does not train such a model, or it lacks layers that are to learn.
    """
    is_here = config.cluster.cluster == "local"
    check_published(source.directory, config)
    expert_layers_of(config, source.config)
    if config.trainer.trainer != "megatron":
        if config.trainer.lora_rank:
            require("training adapters", "peft")
        if is_here and config.trainer.device == "cuda":
            check_gpus(config.layout.world_size)
        elif is_here:
            check_machine(
                "the torch trainer",
                learned_memory(source.config, config.trainer, config.fsdp_size).times(
                    config.layout.world_size
                ),
                "take a smaller model, or trainer = megatron on GPUs",
            )
        return
    require("trainer = megatron", "megatron")
    if is_here:
        check_gpus(config.layout.world_size)
    shape = shape_of(source.config)
    check_layout(shape, config.layout)
    if config.trainer.enable_mtp_training:
        with CheckpointReader(source.directory, ahead=True) as checkpoint:
            shape = checkpoint.shape
    learning_of(shape, config.trainer)
    check_replay(config.trainer, config.layout)
    layout = config.layout
    for name, hook in hooks.hooks().items():
        if name in MegatronConfig.model_fields:
            hook.maybe(getattr(layout, name))


def _models(source: ModelSource, config: RunConfig) -> dict[ScoreRole, str]:
    """The directory of each role. Ranks of other machines read it under the same path."""
    algorithm, policy = config.algorithm, str(source.directory.resolve())
    models: dict[ScoreRole, str] = {"old": policy}
    if algorithm.has_reference:
        models["ref"] = policy if algorithm.ref_load is None else str(Path(algorithm.ref_load).resolve())
    if algorithm.opd.teacher_load is not None:
        models["teacher"] = str(Path(algorithm.opd.teacher_load).resolve())
    return models


def _check_auxiliary(directory: str, source: ModelSource, config: RunConfig) -> None:
    if config.trainer.trainer == "megatron":
        check_readable(directory, config.layout)
    else:
        open_source(directory)
    if open_tokenizer(directory).get_vocab() != source.tokenizer.get_vocab():
        raise ConfigError(
            f"{directory} has another vocabulary than the policy, so it cannot score its tokens; choose a "
            "model with the same tokenizer."
        )


def _check_same_network(directory: str, source: ModelSource) -> None:
    sizes = [_sizes(source.config), _sizes(open_source(directory).config)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"ref_update_interval moves the reference to the policy, and {directory} is another network; "
            "leave out ref_update_interval, or choose a reference of the policy's sizes."
        )


def _sizes(config: PreTrainedConfig) -> dict[str, object]:
    names = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads")
    return {name: getattr(config.get_text_config(), name, None) for name in names}


def check_readable(directory: str | Path, layout: MegatronConfig) -> None:
    """Check that Megatron's ranks can open a model directory; no weight is read.

    Raises:
        UserError: a tensor is missing or has another shape, or the layout does not divide the model.
    """
    with CheckpointReader(directory) as checkpoint:
        check_layout(checkpoint.shape, layout)
        # Raises where a tensor is missing.
        deque(checkpoint.specs(), maxlen=0)
