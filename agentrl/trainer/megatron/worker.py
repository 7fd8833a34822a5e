"""The worker of one Megatron rank: every rank gets the same calls with the same arguments."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from megatron.core import parallel_state

from agentrl.losses import needs_entropy_gradient
from agentrl.trainer.attention import fastest, kernels_in_words
from agentrl.trainer.batch import MicroBatch, micro_batches, shares_of
from agentrl.trainer.elsewhere import saved_elsewhere
from agentrl.trainer.launch.cast_weights import Cast, cast_buckets, cast_on_device
from agentrl.trainer.launch.device_weights import DeviceFacts, DeviceStore, keep
from agentrl.trainer.launch.phases import report_phase
from agentrl.trainer.launch.process_group import opened_store
from agentrl.trainer.launch.rank_plan import RankPlace
from agentrl.trainer.launch.shared_buffers import Filled
from agentrl.trainer.megatron.device import compute_device
from agentrl.trainer.megatron.files import saving
from agentrl.trainer.megatron.files.checkpoint import CheckpointReader, config_of
from agentrl.trainer.megatron.gather import BucketLoads, gathered, packed_on_device
from agentrl.trainer.megatron.hooks import Hooks
from agentrl.trainer.megatron.learner import MegatronLearner, is_reporting_rank
from agentrl.trainer.megatron.local_ranks import LocalRanks
from agentrl.trainer.megatron.model.families import VALUE_HEAD
from agentrl.trainer.megatron.model.network import Network
from agentrl.trainer.megatron.model.outputs import logprobs_of, values_of
from agentrl.trainer.megatron.model.rows import padded
from agentrl.trainer.megatron.model.shape import learning_of
from agentrl.trainer.megatron.parallel import joined
from agentrl.trainer.megatron.passes import Passes
from agentrl.trainer.megatron.plan import MegatronPlan
from agentrl.trainer.offload import NetworkMemory, free_bytes, offloaded_bytes
from agentrl.trainer.plan import Done, RankScores, StepSums, reported, scored_tokens
from agentrl.trainer.recording import Recorder
from agentrl.trainer.saved import StateWriter, done_of, is_own
from agentrl.trainer.summary import FOLDERS, SavedTrainer
from agentrl.types import BoolArray, Sample, ScoreRole, TrainBatch
from agentrl.types.seams import TensorSpec

_log = logging.getLogger(__name__)


class MegatronWorker(Recorder, DeviceStore):
    """One rank of the trainer; the parallel state must be initialized."""

    def __init__(self, plan: MegatronPlan) -> None:
        self._plan = plan
        self._hooks, self._step = Hooks(plan.layout), 0
        self._hooks.init()
        self._writer = StateWriter()
        self._local_ranks: LocalRanks | None = None
        self._loads: BucketLoads | None = None
        self._passes: dict[ScoreRole, Passes] = {}
        self._learners: dict[ScoreRole, MegatronLearner] = {}
        self._memory: dict[ScoreRole, NetworkMemory] = {}
        report_phase("loading weights")
        outputs = partial(logprobs_of, entropy_gradient=needs_entropy_gradient(plan.policy.loss))
        self._learn("old", MegatronLearner(_network(plan), outputs, plan.policy))
        if plan.critic is not None:
            self._learn("values", MegatronLearner(_critic(plan), values_of, plan.critic))
        for role in plan.models.keys() - {"old"}:
            passes = Passes(_network(plan, role), learns=False)
            self._add(role, passes, NetworkMemory(passes.tensors))
        self._has_sinks = self._passes["old"].network.shape.family.has_sinks
        _log.info("attention: %s", fastest(compute_device(), self._dtype, has_sinks=self._has_sinks).name)

    def adapters(self) -> tuple[TensorSpec, ...]:
        """None."""
        return ()

    def manifest(self) -> tuple[TensorSpec, ...]:
        """The policy's tensors in the order of the checkpoint's layers, in the dtype that is published."""
        with _policy_reader(self._plan) as checkpoint:
            return tuple(checkpoint.specs("bfloat16" if self._plan.config.bf16 else "float32"))

    def kernels(self) -> str | None:
        """What it computes with on a GPU, in a sentence for the start of a run; None = on the CPU."""
        return kernels_in_words(compute_device(), self._dtype, has_sinks=self._has_sinks)

    def score(self, samples: Sequence[Sample], role: ScoreRole, statistics: bool = False) -> RankScores:
        """Logprobs, or values, of the tokens that the role scores, by sample; statistics: see `Worker`.

        Returns:
            those that this rank reports.
        """
        rows = self._rows(samples, [scored_tokens(sample, role) for sample in samples])
        with self._memory[role].onloaded():
            self._hooks.before_score(role, self._passes[role].readable_stages)
            # Of all networks the routers of the policy alone are seen, and R2 keeps what they took.
            replay = self._plan.config.router_replay
            routing = self._passes[role].routing(replay, records=replay == "R2") if role == "old" else None
            outputs_by_row = self._passes[role].forward(rows, routing)
        scores = reported(outputs_by_row if is_reporting_rank() else [], statistics=statistics)
        return RankScores(scores, None if routing is None else routing.routed())

    def update(self, batch: TrainBatch) -> dict[ScoreRole, StepSums]:
        """One optimizer step over the batch, of every network that learns in this step."""
        rows = self._rows(batch.samples, [sample.loss_mask for sample in batch.samples])
        is_warmup = self._plan.critic is not None and self._step < self._plan.critic_warmup
        is_warmup = is_warmup or batch.critic_only
        done: dict[ScoreRole, StepSums] = {}
        for role, learner in self._learners.items():
            if role == "values" or not is_warmup:
                with self._memory[role].onloaded():
                    self._hooks.before_step(role, learner.passes.readable_stages)
                    done[role] = learner.learn(rows, batch)
                    self._hooks.after_step(role, learner.passes.readable_stages)
        is_left_out = "old" in done and done["old"].is_left_out
        self._step += not (batch.critic_only or is_left_out)
        return done

    @torch.no_grad()
    def move_reference(self, share: float) -> None:
        """Move this rank's shards of the reference: share x policy + (1 - share) x reference."""
        with _readable(self._memory["old"], self._passes["old"]), self._memory["ref"].onloaded():
            networks = (self._passes[role].network for role in ("ref", "old"))
            for (_, own), (_, policys) in zip(*(network.pieces() for network in networks), strict=False):
                own.lerp_(policys.to(own.dtype), share)

    def weights(
        self, manifest: Sequence[TensorSpec], bucket_bytes: int, cast: Cast | None = None
    ) -> Generator[Filled, None, int]:
        """The policy's weights, in buckets; only rank 0 yields them, and all ranks must call it."""
        if self._local_ranks is None or self._local_ranks.pool.bucket_bytes != bucket_bytes:
            self._local_ranks = LocalRanks(bucket_bytes)
        with _readable(self._memory["old"], self._passes["old"]):
            stream = gathered(self._loads_of(manifest, bucket_bytes), self._local_ranks)
            return (yield from stream if cast is None else cast_buckets(stream, cast, compute_device()))

    def weights_on_device(
        self, manifest: Sequence[TensorSpec], bucket_bytes: int, cast: Cast | None = None
    ) -> DeviceFacts | None:
        """The policy's weights in memory of rank 0's device; all ranks must call it, only rank 0 has them.

        None = the device has no memory that other processes can map, or too little.
        """
        loads = self._loads_of(manifest, bucket_bytes)
        packed = packed_on_device(loads, partial(_readable, self._memory["old"], self._passes["old"]))
        if packed is not None and cast is not None:
            packed = cast_on_device(packed, cast, compute_device())
        return None if packed is None else keep(packed)

    def onload(self) -> int | None:
        """Have all networks on the device, unless the layout offloads those that are not in use.

        Returns:
            the memory of the device that was free before (bytes); None = the device is the CPU.
        """
        before = free_bytes(compute_device())
        if not self._plan.layout.offload:
            for memory in self._memory.values():
                memory.onload()
        return before

    def offload(self) -> int:
        """Free the memory of all networks; each call has the ones that it needs until its end.

        Returns:
            what the device got back (bytes).
        """
        return offloaded_bytes(compute_device(), self._offload_all)

    def save(self, folder: Path) -> tuple[int, dict[ScoreRole, Done]]:
        """Copy this rank's part of the state, and begin to write the copy: see `is_written`.

        Returns:
            the updates, and what the optimizers did.
        """
        files: list[saving.FileCopy] = []
        for role, learner in self._learners.items():
            with self._memory[role].onloaded():
                self._hooks.before_save(role, learner.passes.readable_stages)
                files += saving.copies(folder / FOLDERS[role], learner, self._writer.copy_of(role))
        if self._plan.moves_reference:
            with self._memory["ref"].onloaded():
                network = self._passes["ref"].network
                files += saving.shard_copies(folder / FOLDERS["ref"], network, self._writer.copy_of("ref"))

        def write() -> None:
            for file in files:
                file.write()

        self._writer.start(write)
        return self._step, {role: learner.optimizer.done for role, learner in self._learners.items()}

    def is_written(self) -> bool | OSError:
        """Whether the copies that `save` made are on disk, or why they cannot be written."""
        return self._writer.is_done()

    def load(self, folder: Path, saved: SavedTrainer) -> None:
        """Restore what `save` has written."""
        self._step, done, config = saved.steps, done_of(saved), config_of(Path(self._plan.models["old"]))
        is_same = is_own(saved, self._plan)
        for role, learner in self._learners.items():
            with self._memory[role].onloaded():
                if is_same:
                    saving.read(folder / FOLDERS[role], learner, done[role])
                else:
                    ahead = learner.passes.network.shape.ahead
                    saving.take(saved_elsewhere(folder, role, saved, config, ahead), learner, done[role])
        if self._plan.moves_reference:
            network = self._passes["ref"].network
            with self._memory["ref"].onloaded():
                if is_same:
                    saving.read_shards(folder / FOLDERS["ref"], network)
                else:
                    network.load(saved_elsewhere(folder, "ref", saved, config).value)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self._plan.config.bf16 else torch.float32

    def _loads_of(self, manifest: Sequence[TensorSpec], bucket_bytes: int) -> BucketLoads:
        """What each bucket of the policy's weights holds, which no version changes."""
        loads = self._loads
        if loads is None or (loads.manifest, loads.bucket_bytes) != (manifest, bucket_bytes):
            loads = self._loads = BucketLoads(self._passes["old"].network, manifest, bucket_bytes)
        return loads

    def _learn(self, role: ScoreRole, learner: MegatronLearner) -> None:
        self._learners[role] = learner
        passes = learner.passes
        self._add(role, passes, NetworkMemory(passes.tensors, learner.optimizer_tensors, passes.gradients))

    def _add(self, role: ScoreRole, passes: Passes, memory: NetworkMemory) -> None:
        self._passes[role], self._memory[role] = passes, memory
        if self._plan.layout.offload:
            memory.offload()

    def _offload_all(self) -> None:
        for memory in self._memory.values():
            memory.offload()

    def _rows(self, samples: Sequence[Sample], masks: Sequence[BoolArray]) -> tuple[MicroBatch, ...]:
        layout, width = self._plan.layout, self._passes["old"].network.config.hidden_size
        replica: int = parallel_state.get_data_parallel_rank()
        own_masks = shares_of(masks, layout.data_parallel_size, width)[replica]
        rows = micro_batches(samples, own_masks, self._plan.config.max_tokens_per_gpu)
        return padded(rows, layout.row_count_multiple)


@contextmanager
def _readable(memory: NetworkMemory, passes: Passes) -> Iterator[None]:
    """Have a network's weights for the block, those of the last step; every rank must enter it."""
    with memory.parameters_onloaded():
        passes.gather()
        yield


@contextmanager
def worker(plan: MegatronPlan, place: RankPlace) -> Iterator[MegatronWorker]:
    """The worker of one rank, in its process groups."""
    assert place.rendezvous is not None, "Megatron's ranks are processes of their own"
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    # Rows differ in length: without it the allocator keeps pieces of every size.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    store = opened_store(place.rendezvous)
    with joined(plan.layout, place.rank, store=store, local_rank=place.local_rank):
        yield MegatronWorker(plan)


def _network(plan: MegatronPlan, role: ScoreRole = "old") -> Network:
    opened = _policy_reader(plan) if role == "old" else CheckpointReader(plan.models[role])
    with opened as checkpoint:
        network = Network(checkpoint.shape, plan.layout, bf16=plan.config.bf16)
        network.load(checkpoint.read)
        if role == "old" and not plan.config.all_learn:
            network.freeze(learning_of(checkpoint.shape, plan.config))
    return network


def _policy_reader(plan: MegatronPlan) -> CheckpointReader:
    return CheckpointReader(plan.models["old"], ahead=plan.config.enable_mtp_training)


def _critic(plan: MegatronPlan) -> Network:
    """A critic with the policy's trunk, and a head that predicts 0 everywhere."""
    with CheckpointReader(plan.models["old"]) as checkpoint:
        shape = checkpoint.shape.of_a_critic
        zero_head = torch.zeros(1, int(shape.sizes["hidden_size"]))
        network = Network(shape, plan.layout, bf16=plan.config.bf16)
        network.load(lambda name: zero_head if name == VALUE_HEAD else checkpoint.read(name))
        if not plan.config.all_learn:
            network.freeze(learning_of(checkpoint.shape, plan.config))
    return network
