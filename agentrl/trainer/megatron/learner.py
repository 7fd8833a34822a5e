"""A network that learns, on this rank: one step over a batch, however it is distributed over replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from agentrl.losses import LossOutput, TokenOutputs
from agentrl.trainer.batch import MicroBatch
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.loss_inputs import StepInputs
from agentrl.trainer.megatron.arguments import Target, chosen
from agentrl.trainer.megatron.model.ahead import AheadLoss
from agentrl.trainer.megatron.model.network import Network
from agentrl.trainer.megatron.model.outputs import OutputFunction
from agentrl.trainer.megatron.passes import Passes
from agentrl.trainer.megatron.state import (
    StatePart,
    begin_moments,
    mains_of,
    move_to_cpu,
    parts_of,
    step_matrices,
)
from agentrl.trainer.plan import Done, Learning, StepSums, is_without_gradient, learning_rate
from agentrl.trainer.routing import PassRouting, RouterLosses
from agentrl.types import TrainBatch


# Megatron's optimizer with agentrl's schedule and metrics.
class MegatronOptimizer:
    """AdamW over every parameter of the stages that learns, or Muon over the matrices among them.

    The norm of the gradient is that over all ranks.

    total_steps: the optimizer steps that a decay of the learning rate takes.
    """

    def __init__(
        self,
        network: Network,
        stages: Sequence[DistributedDataParallel],
        config: TrainerConfig,
        *,
        total_steps: int,
    ) -> None:
        self._network = network
        self._config = config
        self._total_steps = total_steps
        self._done = Done(0, 0)
        self._inner = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=config.min_lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.adam_beta1,
                adam_beta2=config.adam_beta2,
                adam_eps=config.adam_eps,
                clip_grad=config.clip_grad,
                bf16=config.bf16,
                params_dtype=network.config.params_dtype,
                use_distributed_optimizer=network.layout.shares_the_optimizer,
                **chosen(network.layout, Target.OPTIMIZER),
            ),
            list(stages),
            use_gloo_process_groups=False,
        )
        for group in self._inner.param_groups:
            # Megatron has no setting for it. The fused kernel takes a third of the time of the separate ones.
            group["fused"] = True
        if config.optimizer_cpu_offload:
            move_to_cpu(self._inner, network.pieces())

    def step(self, leaves_out: Callable[[float], bool]) -> tuple[dict[str, float], bool]:
        """Apply the gradients; a gradient that is not finite is discarded, and the schedule advances.

        leaves_out: whether a step of this norm changes nothing.

        Returns:
            grad_norm (before clipping), lr, skipped_steps (in all so far); and whether it was left out.
        """
        steps, skipped = self._done
        lr = learning_rate(self._config, steps, self._total_steps)
        for group in self._inner.param_groups:
            # Embedding and head may have a peak of their own.
            group["lr"] = lr * group["max_lr"] / self._config.lr
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]
        self._inner.prepare_grads()
        # What learns from a loss of its own is clipped by itself: no step of the policy depends on it.
        ahead = mains_of(self._inner, (p for p in self._network.pieces() if p.placed.depth is not None))
        parameters, own = [p for g in self._inner.param_groups for p in g["params"]], set(map(id, ahead))
        rest = [parameter for parameter in parameters if id(parameter) not in own]
        grad_norm = self._norm_without(ahead)
        is_left_out = leaves_out(grad_norm)
        if self._network.shape.ahead:
            self._clip_ahead(ahead, self._norm_without(rest))
        if math.isfinite(grad_norm) and not is_left_out:
            clip_grad_by_total_norm_fp32(rest, self._config.clip_grad, grad_norm)
            self._update(lr)
        elif not is_left_out:
            skipped += 1
        # Megatron leaves its buffer in `grad`, and the next backward pass adds `grad` to it: counted twice.
        self._inner.zero_grad()
        self._done = Done(steps + (not is_left_out), skipped)
        return {"grad_norm": grad_norm, "lr": lr, "skipped_steps": float(skipped)}, is_left_out

    def _norm_without(self, parameters: Sequence[Tensor]) -> float:
        """The norm of the gradient over all ranks, without those of some parameters. Every rank calls it."""
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        norm = float(self._inner.get_grad_norm())
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return norm

    def _clip_ahead(self, parameters: Sequence[Tensor], norm: float) -> None:
        """Clip the gradient of layers that predict further ahead; one that is not finite changes nothing."""
        if math.isfinite(norm):
            clip_grad_by_total_norm_fp32(parameters, self._config.clip_grad, norm)
            return
        for parameter in parameters:
            parameter.grad = None

    def _update(self, lr: float) -> None:
        if self._config.optimizer == "muon":
            (only,) = self._inner.chained_optimizers
            step_matrices(only, self._network, lr=lr, weight_decay=self._config.weight_decay)
        self._inner.step_with_ready_grads()

    def reset(self) -> None:
        """Drop the means, and their steps so far."""
        begin_moments(self._inner, (), steps=0, has_muon=False)

    @property
    def done(self) -> Done:
        """Its steps so far."""
        return self._done

    def parts(self) -> Iterator[StatePart]:
        """This rank's part of each parameter."""
        return parts_of(self._inner, self._network.pieces())

    def resume(self, done: Done) -> Iterator[StatePart]:
        """Set the steps so far, and allocate the moments; returns this rank's parts, to be filled."""
        self._done = done
        has_muon = self._config.optimizer == "muon"
        begin_moments(self._inner, self._network.pieces(), steps=done.stepped, has_muon=has_muon)
        return self.parts()


class MegatronLearner:
    """Trains `network` in place. outputs: logprobs or values of a row."""

    def __init__(self, network: Network, outputs: OutputFunction, learning: Learning) -> None:
        self._loss, self._bf16 = learning.loss, learning.config.bf16
        self._is_on_cpu = learning.config.optimizer_cpu_offload
        self._config = learning.config
        self._routing: PassRouting | None = None
        self._ahead: AheadLoss | None = None
        self.passes = Passes(network, outputs)
        self.optimizer = MegatronOptimizer(
            network, self.passes.stages, learning.config, total_steps=learning.total_steps
        )

    def learn(self, rows: Sequence[MicroBatch], batch: TrainBatch) -> StepSums:
        """One optimizer step over the batch, of which `rows` are this replica's."""
        if batch.resets_optimizer:
            self.optimizer.reset()
        inputs = StepInputs(batch, bf16=self._bf16)
        # A critic's routers are its own.
        masks, shape = [sample.loss_mask for sample in batch.samples], self.passes.network.shape
        if not shape.critic:
            losses = RouterLosses.of(self._config, masks)
            self._routing = self.passes.routing(self._config.router_replay, losses=losses)
        if shape.ahead:
            self._ahead = AheadLoss.of(self._config, masks, shape.ahead)
        sums = self.backward(rows, inputs)
        step, is_left_out = self.optimizer.step(partial(is_without_gradient, batch))
        logprobs = inputs.logprobs() if is_reporting_rank() else {}
        routing, self._routing = self._routing, None
        # Every rank has layers and tokens of its own.
        of_routers = None if routing is None else routing.sums.cpu().numpy()
        return StepSums(sums, step, logprobs, is_left_out, of_routers)

    def backward(self, rows: Sequence[MicroBatch], inputs: StepInputs) -> Mapping[str, float]:
        """Accumulate the gradient of the batch; sums of loss and metrics on the reporting ranks."""

        def loss(row: MicroBatch, outputs: TokenOutputs) -> LossOutput:
            output = self._loss(outputs, inputs.of(row, outputs))
            return LossOutput(output.sum, {"loss": output.sum.detach(), **output.metrics})

        reports = self.passes.learn(rows, loss, self._routing, self._ahead)
        return _summed(reports) if is_reporting_rank() else {}

    def optimizer_tensors(self) -> Iterator[Tensor]:
        """The optimizer's state on the device between two steps; it may share memory with the parameters."""
        for part in () if self._is_on_cpu else self.optimizer.parts():
            yield part.main
            yield from part.moments.values()


def is_reporting_rank() -> bool:
    """Whether this rank reports, of all ranks that compute the same outputs."""
    last = parallel_state.get_pipeline_model_parallel_world_size() - 1
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
    )
    return place == (last, 0, 0)


def _summed(reports: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    return {
        name: float(torch.stack([report[name] for report in reports]).double().sum()) for name in reports[0]
    }
