"""A network, its loss and its optimizer: one step over a batch, however it is cut into micro-batches.

The state that is saved of networks is the same whatever the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TypedDict, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from agentrl.errors import ModelLoadError
from agentrl.losses import TokenOutputs
from agentrl.trainer.batch import MicroBatch
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.elsewhere import MOMENTS, MOMENTUM, TORCH_FILE, Unsharded, saved_elsewhere
from agentrl.trainer.loss_inputs import StepInputs
from agentrl.trainer.offload import AdamSettings, CpuAdamW, CpuShard, NetworkMemory, own_part
from agentrl.trainer.plan import Done, Learning, StepSums, is_without_gradient, learning_rate
from agentrl.trainer.routing import NO_LOSSES, Float64Array, RouterLosses
from agentrl.trainer.saved import StateWriter, done_of
from agentrl.trainer.summary import FOLDERS, SavedTrainer
from agentrl.trainer.torch.forward import TorchNetwork
from agentrl.trainer.torch.sharding import (
    ShardedRanks,
    frozen_names,
    layers_of,
    load_weights,
    only_gathered,
    optimizer_shards,
    step_sharded,
)
from agentrl.types import ScoreRole, TrainBatch
from agentrl.weights.checksum import checksum
from agentrl.weights.hf.routing import Routers


class Optimizer:
    """One or two torch optimizers that step together over every trainable weight of a model."""

    def __init__(self, model: PreTrainedModel, config: TrainerConfig) -> None:
        matrices = hidden_matrices(model) if config.optimizer == "muon" else []
        chosen = {id(matrix) for matrix in matrices}
        others = {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) not in chosen}
        self.parts: list[torch.optim.Optimizer] = []
        # All that adapters learn are matrices.
        if others:
            self.parts.append(_adamw(others, config))
        if matrices:
            self.parts.append(_muon(matrices, config))

    def step(self, lr: float) -> None:
        """Apply the gradients at rate `lr`."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            if isinstance(part, torch.optim.Muon) and isinstance(part.param_groups[0]["params"][0], DTensor):
                step_sharded(part)
            else:
                part.step()

    def reset(self) -> None:
        """Drop the means, and their steps so far."""
        for part in self.parts:
            part.state.clear()


def hidden_matrices(model: PreTrainedModel) -> list[nn.Parameter]:
    """The trainable 2-D weights between the embedding and the head: the weights that Muon optimizes."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    outer = {id(p) for end in ends if isinstance(end, nn.Module) for p in end.parameters()}
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.ndim == 2 and _is_matrix(name, parameter)
        if id(parameter) not in outer
    ]


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether it is one, or one of each expert; the biases of all experts have two dimensions, too."""
    return parameter.ndim >= 2 and not name.endswith("bias")


def _adamw(parameters: Mapping[str, nn.Parameter], config: TrainerConfig) -> torch.optim.Optimizer:
    matrices = [parameter for name, parameter in parameters.items() if _is_matrix(name, parameter)]
    others = [parameter for name, parameter in parameters.items() if not _is_matrix(name, parameter)]
    groups: list[dict[str, object]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    own = AdamSettings(
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
    )
    if config.optimizer_cpu_offload:
        return CpuAdamW(groups, **own)
    return torch.optim.AdamW(groups, fused=True, **own)


def _muon(matrices: list[nn.Parameter], config: TrainerConfig) -> torch.optim.Optimizer:
    # This scaling gives an update the size of AdamW's, so that both share one learning rate.
    return torch.optim.Muon(
        matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
    )


T = TypeVar("T")
Forward = Callable[[TorchNetwork, MicroBatch], TokenOutputs]


class LearnerState(TypedDict):
    """A network that learns, as `torch.save` writes it.

    network: what learns of it, and its buffers. frozen: a checksum of the rest, which the directory has that
    the network is loaded from; None = there is none. parameters: of each optimizer, by name, in its order.
    """

    network: dict[str, Tensor]
    frozen: int | None
    optimizers: list[dict[str, object]]
    parameters: list[list[str]]


class Learner:
    """Trains `network` in place.

    forward: its outputs at the predicted tokens of a row. done: its optimizer's steps so far.
    """

    def __init__(self, network: TorchNetwork, forward: Forward, learning: Learning) -> None:
        self.network = network
        if learning.config.gradient_checkpointing:
            recompute_layers(network.model, network.routers)
        self._forward = forward
        self._loss = learning.loss
        self._config = learning.config
        self._total_steps = learning.total_steps
        self._optimizer = Optimizer(network.model, learning.config)
        self.done = Done(0, 0)

    def learn(self, batch: TrainBatch) -> StepSums:
        """One optimizer step: gradients of every micro-batch add up, then clip, then step.

        A gradient that is not finite is discarded: weights and optimizer stay as they were,
        skipped_steps (in all so far) grows by one, and the schedule advances. A step that is left out
        (`ProximalInStep`) changes nothing.

        Returns:
            the loss and its metrics as sums over tokens; grad_norm, lr, skipped_steps.
        """
        steps, skipped = self.done
        lr = learning_rate(self._config, steps, self._total_steps)
        model = self.network.model
        model.zero_grad()
        if batch.resets_optimizer:
            self._optimizer.reset()
        inputs = StepInputs(batch, bf16=self._config.bf16)
        sums, routing = self._backward(batch, inputs)
        grad_norm = self._clipped()
        is_left_out = is_without_gradient(batch, grad_norm)
        if math.isfinite(grad_norm) and not is_left_out:
            self._optimizer.step(lr)
        elif not is_left_out:
            skipped += 1
        model.zero_grad()
        self.done = Done(steps + (not is_left_out), skipped)
        step = {"grad_norm": grad_norm, "lr": lr, "skipped_steps": float(skipped)}
        return StepSums(sums, step, inputs.logprobs(), is_left_out, routing)

    def state(self) -> LearnerState:
        """What learns, and the optimizers, for `torch.save`; every rank calls it."""
        model = self.network.model
        frozen = frozen_names(model)
        return {
            "network": {name: t for name, t in model.state_dict().items() if name not in frozen},
            "frozen": self._frozen,
            "optimizers": [part.state_dict() for part in self._optimizer.parts],
            "parameters": self._parameters,
        }

    def optimizer_tensors(self) -> Iterator[Tensor]:
        """The optimizers' tensors on the device, which the first step makes."""
        for part in (part for part in self._optimizer.parts if not isinstance(part, CpuAdamW)):
            for state in part.state.values():
                yield from (own_part(value) for value in state.values() if isinstance(value, Tensor))

    def resume(self, state: LearnerState, done: Done) -> None:
        """Restore a state. done: the optimizer's steps until then.

        Raises:
            KeyError, RuntimeError, ValueError: the state is of another network or other optimizers, or what
                does not learn is not what it was.
        """
        if state["frozen"] != self._frozen:
            raise ValueError("what does not learn is of another model; put that one back")
        load_weights(self.network.model, state["network"])
        for part, saved in zip(self._optimizer.parts, state["optimizers"], strict=True):
            part.load_state_dict(optimizer_shards(saved, part))
        self.done = done

    def take(self, saved: Unsharded, done: Done) -> None:
        """Restore what Megatron's ranks have saved. done: as for `resume`.

        Raises:
            ModelLoadError: it is of another model.
        """
        names = self.network.model.state_dict().keys() - frozen_names(self.network.model)
        optimizers = []
        for part, listed in zip(self._optimizer.parts, self._parameters, strict=True):
            is_muon = isinstance(part, torch.optim.Muon)
            kinds = (MOMENTUM,) if is_muon else MOMENTS
            state: dict[int, dict[str, Tensor]] = {}
            for number, name in enumerate(listed if done.stepped else ()):
                state[number] = {kind: saved.moment(name, kind) for kind in kinds}
                if not is_muon:
                    # One of its own: the optimizer keeps this very tensor, and counts in it.
                    state[number]["step"] = torch.tensor(float(done.stepped))
            optimizers.append({**part.state_dict(), "state": state})
        self.resume(
            {
                "network": {name: saved.value(name) for name in names},
                "frozen": self._frozen,
                "optimizers": optimizers,
                "parameters": self._parameters,
            },
            done,
        )

    @property
    def _parameters(self) -> list[list[str]]:
        """The names of each optimizer's parameters; "" = it is none of the model's."""
        names = {id(parameter): name for name, parameter in self.network.model.named_parameters()}
        return [
            [names.get(id(parameter), "") for group in part.param_groups for parameter in group["params"]]
            for part in self._optimizer.parts
        ]

    @cached_property
    def _frozen(self) -> int | None:
        """The checksum of what does not learn, in fp32, however it is kept."""
        parts = [(name, p) for name, p in self.network.model.named_parameters() if not p.requires_grad]
        if not parts:
            return None
        return checksum((name, whole(p.detach()).to("cpu", torch.float32)) for name, p in parts)

    def _clipped(self) -> float:
        """Scale a gradient down that is longer than it may be; its norm before, over all ranks."""
        parameters = [p for p in self.network.model.parameters() if p.grad is not None]
        norm = whole(get_total_norm([p.grad for p in parameters if p.grad is not None]))
        clip_grads_with_norm_(parameters, self._config.clip_grad, norm)
        return float(norm)

    def _backward(
        self, batch: TrainBatch, inputs: StepInputs
    ) -> tuple[Mapping[str, float], Float64Array | None]:
        """Accumulate the gradient of the batch; return loss and metrics as sums, and the sums of routers."""
        masks = [sample.loss_mask for sample in batch.samples]
        total: Tensor | None = None
        names: list[str] = []
        losses = NO_LOSSES if self.network.routers is None else RouterLosses.of(self._config, masks)
        routed = self.network.routed(self._config.router_replay, losses=losses)
        with self.network.attending(), routed as routing:
            for row in self.network.rows(batch.samples, masks, self._config.max_tokens_per_gpu):
                outputs = self._forward(self.network, row)
                loss, metrics = self._loss(outputs, inputs.of(row, outputs))
                loss.backward()
                names = ["loss", *metrics]
                sums = torch.stack([loss.detach(), *metrics.values()]).double()
                total = sums if total is None else total + sums
        values = [] if total is None else total.tolist()
        return dict(zip(names, values, strict=True)), None if routing is None else routing.sums.cpu().numpy()


def recompute_layers(model: PreTrainedModel, routers: Routers | None = None) -> None:
    """Have the backward pass compute each layer a second time; without a gradient nothing changes.

    routers: of the model; the second time they choose as they did the first.
    """

    def recomputed(forward: Callable[..., object], *args: object, **options: object) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **options)
        again = partial(forward, **options)
        if routers is not None:
            again = partial(routers.run, routers.passed, again)
        # No layer draws random numbers: the network is in evaluation mode.
        return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False)

    for layer in layers_of(model):
        layer.forward = partial(recomputed, layer.forward)


def tensors_of(network: PreTrainedModel) -> Iterator[Tensor]:
    """Parameters and buffers; of those that ranks share, this rank's parts."""
    yield from map(own_part, network.parameters())
    yield from network.buffers()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that ranks share; every rank calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copied(value: T, copy: Callable[[Tensor | CpuShard], Tensor]) -> T:
    """The same containers with copies of their tensors."""
    if isinstance(value, Tensor | CpuShard):
        return cast(T, copy(value))
    if isinstance(value, dict):
        return cast(T, {key: copied(below, copy) for key, below in value.items()})
    return cast(T, [copied(below, copy) for below in value]) if isinstance(value, list) else value


class SavedNetworks:
    """Writes and reads the networks that change.

    memory: of each network, by its role. ref: the reference, where it moves. ranks: those that share all
    networks, where there are several; each calls every method, and rank 0 writes.
    """

    def __init__(
        self,
        learners: Mapping[ScoreRole, Learner],
        ref: PreTrainedModel | None,
        memory: Mapping[ScoreRole, NetworkMemory],
        ranks: ShardedRanks | None,
    ) -> None:
        self._learners, self._ref, self._memory, self._ranks = learners, ref, memory, ranks
        self._writer = StateWriter()

    def save(self, folder: Path) -> dict[ScoreRole, Done]:
        """Copy weights and optimizers, and begin to write the copies; returns what each optimizer did."""
        copies: dict[str, LearnerState] = {}
        for role, learner in self._learners.items():
            with self._memory[role].onloaded():
                copies[FOLDERS[role]] = copied(learner.state(), self._copy_of(role))
        if self._ref is not None:
            with self._memory["ref"].onloaded():
                state: LearnerState = {
                    "network": self._ref.state_dict(),
                    "frozen": None,
                    "optimizers": [],
                    "parameters": [],
                }
                copies[FOLDERS["ref"]] = copied(state, self._copy_of("ref"))

        def write() -> None:
            for name, state in copies.items():
                (folder / name).mkdir()
                try:
                    torch.save(state, folder / name / TORCH_FILE)
                except RuntimeError as error:
                    # What torch makes of a disk that is full.
                    raise OSError(str(error)) from error

        if self._is_first:
            self._writer.start(write)
        return {role: learner.done for role, learner in self._learners.items()}

    def is_written(self) -> bool | OSError:
        """Whether the copies that `save` made are on disk, or why they cannot be written."""
        return self._writer.is_done()

    def load(self, folder: Path, saved: SavedTrainer, config: PreTrainedConfig) -> None:
        """Restore what `save` has written, or Megatron's ranks. config: the policy's.

        Raises:
            ModelLoadError: a file is missing, damaged, or of another model.
        """
        done = done_of(saved)
        if not saved.is_of_torch:
            self._take(folder, saved, config)
            return
        for role, learner in self._learners.items():
            self._restore(folder, role, partial(learner.resume, done=done[role]))
        if (ref := self._ref) is not None:
            self._restore(folder, "ref", lambda state: load_weights(ref, state["network"]))

    def _take(self, folder: Path, saved: SavedTrainer, config: PreTrainedConfig) -> None:
        for role, learner in self._learners.items():
            with self._memory[role].onloaded():
                learner.take(saved_elsewhere(folder, role, saved, config), done_of(saved)[role])
        if self._ref is not None:
            with self._memory["ref"].onloaded():
                network = saved_elsewhere(folder, "ref", saved, config)
                load_weights(self._ref, {name: network.value(name) for name in self._ref.state_dict()})

    @property
    def _is_first(self) -> bool:
        return self._ranks is None or self._ranks.is_first

    def _copy_of(self, role: ScoreRole) -> Callable[[Tensor | CpuShard], Tensor]:
        """What copies a network's tensors: rank 0 has whole copies of them, the others have none."""
        return self._writer.copy_of(role) if self._is_first else only_gathered

    def _restore(self, folder: Path, role: ScoreRole, resume: Callable[[LearnerState], object]) -> None:
        path = folder / FOLDERS[role] / TORCH_FILE
        try:
            with self._memory[role].onloaded():
                # Of what all have, a rank reads its part alone.
                resume(torch.load(path, weights_only=True, mmap=self._ranks is not None))
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ModelLoadError(f"{path} is not what this trainer saves: {reason}") from error
