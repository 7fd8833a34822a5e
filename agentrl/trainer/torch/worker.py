"""The worker of the torch trainer's rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.errors import ModelLoadError
from agentrl.losses import needs_entropy_gradient
from agentrl.trainer.attention import kernels_in_words
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.launch.cast_weights import Cast, cast_buckets, cast_on_device
from agentrl.trainer.launch.device_weights import DeviceFacts, DeviceStore, keep
from agentrl.trainer.launch.phases import report_phase
from agentrl.trainer.launch.rank_plan import RankPlace
from agentrl.trainer.launch.shared_buffers import AHEAD, Filled, bucket_of
from agentrl.trainer.offload import NetworkMemory, free_bytes, has_own_memory, offloaded_bytes
from agentrl.trainer.plan import Done, Learning, RankScores, StepSums, reported, scored_tokens
from agentrl.trainer.recording import Recorder
from agentrl.trainer.summary import SavedTrainer
from agentrl.trainer.torch.compact import compact
from agentrl.trainer.torch.critic import Critic, critic_over, value_outputs
from agentrl.trainer.torch.forward import TorchNetwork, check_scores, token_outputs
from agentrl.trainer.torch.frozen import freeze
from agentrl.trainer.torch.learner import Learner, SavedNetworks, tensors_of
from agentrl.trainer.torch.plan import TorchPlan
from agentrl.trainer.torch.sharding import ShardedRanks, sharing
from agentrl.types import FloatArray, Sample, ScoreRole, TrainBatch
from agentrl.types.seams import TensorSpec
from agentrl.weights.checksum import digests_of, sum_digests
from agentrl.weights.codec import grouped, manifest_of, named_weights, size_of
from agentrl.weights.device import allocated, layout_of, packed, views_in
from agentrl.weights.hf.loading import open_directory
from agentrl.weights.shared import BufferPool, HostCopy

Weights: TypeAlias = Callable[[PreTrainedModel], Iterator[tuple[str, Tensor]]]


class AuxiliaryModels(NamedTuple):
    """The networks besides the policy: one that learns values, and two that do not learn.

    moves_reference: whether `TorchWorker.move_reference` may move the reference.
    """

    critic: Critic | None = None
    ref: PreTrainedModel | None = None
    teacher: PreTrainedModel | None = None
    moves_reference: bool = False


class TorchWorker(Recorder, DeviceStore):
    """Trains `model` in place. Dropout is off: the loss compares probabilities with those of an engine.

    model: a causal language model in fp32. policy: how it learns; a loss whose
    `entropy_coef` is not 0 gets an entropy with a gradient. auxiliary: the networks of the other roles.
    ranks: those that share all networks, where there are several; each calls every method.

    Raises:
        ModelLoadError: see `TorchNetwork` and `check_scores`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: Learning,
        auxiliary: AuxiliaryModels,
        ranks: ShardedRanks | None = None,
    ) -> None:
        self._published: Weights = named_weights
        self._adapters: Weights | None = None
        base: TorchNetwork | None = None
        freeze(model, policy.config)
        if policy.config.lora_rank:
            from agentrl.trainer.torch import adapters

            self._published, self._adapters = adapters.merged_weights, adapters.adapter_weights
            without = partial(adapters.without_adapters, model)
            base = _scoring(TorchNetwork(model, acting=without, ranks=ranks))
        network = _scoring(TorchNetwork(model, routes=True, ranks=ranks))
        _check_routers(network, policy.config)
        self.model = model
        self._config = policy.config
        # Only a bonus on the entropy needs its gradient, which costs memory.
        bonus = needs_entropy_gradient(policy.loss)
        forward = partial(token_outputs, bf16=policy.config.bf16, entropy_gradient=bonus)
        self._policy = Learner(network, forward, policy)
        self._auxiliary, self._ranks = auxiliary, ranks
        self._networks = _networks_of(network, base, auxiliary, ranks)
        if policy.config.bf16 and ranks is None:
            self._compact()
        self._step = 0
        self._pool: BufferPool | None = None
        self._memory = _memory_of(self._networks, self._learners())
        moving = auxiliary.ref if auxiliary.moves_reference else None
        self._saved = SavedNetworks(self._learners(), moving, self._memory, ranks)

    def _compact(self) -> None:
        """Take less memory for networks that do not learn, or whose adapters do."""
        auxiliary = self._auxiliary
        # A reference may be the policy without its adapters.
        learning = {learner.network.model for learner in self._learners().values()}
        for model in {network.model for network in self._networks.values()}:
            is_moved = auxiliary.moves_reference and model is auxiliary.ref
            if not is_moved and (self._config.lora_rank or model not in learning):
                compact(model, learns=model in learning)

    def manifest(self) -> tuple[TensorSpec, ...]:
        """The policy's tensors, each piece of memory once."""
        return manifest_of(self._published(self.model))

    def adapters(self) -> tuple[TensorSpec, ...]:
        """The tensors of the policy's adapters alone, by the names that files of them have."""
        return () if self._adapters is None else manifest_of(self._adapters(self.model))

    def kernels(self) -> str | None:
        """What it computes with, for the start of a run; None = the CPU, in rows that sequences share."""
        dtype = torch.bfloat16 if self._config.bf16 else self.model.dtype
        parts = [kernels_in_words(self.model.device, dtype)]
        if any(not network.is_packed for network in self._networks.values()):
            parts.append(
                f"{type(self.model).__name__} trains in batches of sequences of like length: its layers "
                "cannot tell those of one row apart: exact, and a little slower."
            )
        return " ".join(filter(None, parts)) or None

    def score(self, samples: Sequence[Sample], role: ScoreRole, statistics: bool = False) -> RankScores:
        """Logprobs, or values, of the tokens that the role scores, by sample; statistics: see `Worker`.

        Returns:
            those of this rank's samples.
        """
        network, replay = self._networks[role], self._config.router_replay
        with self._memory[role].onloaded(), network.routed(replay, records=replay == "R2") as routing:
            scores = _scores(network, samples, role, self._config, statistics=statistics)
            return RankScores(scores, None if routing is None else routing.routed())

    def update(self, batch: TrainBatch) -> dict[ScoreRole, StepSums]:
        """One optimizer step of the critic, where there is one, and one of the policy after the warm-up."""
        done: dict[ScoreRole, StepSums] = {}
        critic = self._auxiliary.critic
        if critic is not None:
            with self._memory["values"].onloaded():
                done["values"] = critic.learn(batch)
        if batch.critic_only:
            return done
        if critic is None or self._step >= critic.warmup:
            with self._memory["old"].onloaded():
                done["old"] = self._policy.learn(batch)
        self._step += not ("old" in done and done["old"].is_left_out)
        return done

    @torch.no_grad()
    def move_reference(self, share: float) -> None:
        """Move the reference towards the policy: share x policy + (1 - share) x reference."""
        ref = self._auxiliary.ref
        assert ref is not None, "the driver moves the reference of a plan that has one"
        with self.onloaded(), self._memory["ref"].onloaded():
            for own, policys in zip(ref.parameters(), self.model.parameters(), strict=True):
                own.lerp_(policys, share)

    def weights(
        self, manifest: Sequence[TensorSpec], bucket_bytes: int, cast: Cast | None = None
    ) -> Generator[Filled, None, int]:
        """The policy's weights in shared buffers; returns their checksum. Only rank 0 yields them."""
        if self._pool is None or self._pool.bucket_bytes != bucket_bytes:
            self._pool = BufferPool(bucket_bytes)
        with self.onloaded():
            tensors = self._tensors_of(manifest)
            if self._ranks is not None and not self._ranks.is_first:
                deque(tensors, maxlen=0)
                return 0
            stream = _filled(tensors, self._pool, manifest, bucket_bytes)
            return (yield from stream if cast is None else cast_buckets(stream, cast, self.model.device))

    @torch.no_grad()
    def weights_on_device(
        self, manifest: Sequence[TensorSpec], bucket_bytes: int, cast: Cast | None = None
    ) -> DeviceFacts | None:
        """The policy's weights in memory of rank 0's device; None on other ranks, or where it has none."""
        layout, ranks = layout_of(list(_loads(manifest, bucket_bytes))), self._ranks
        is_first = ranks is None or ranks.is_first
        memory = allocated(self.model.device, layout.num_bytes) if is_first and layout is not None else None
        if ranks is not None and not ranks.first_has(memory is not None):
            return None
        with self.onloaded():
            weights = self._tensors_of(manifest)
            if layout is None or memory is None:
                if not is_first:
                    deque(weights, maxlen=0)
                return None
            whole = packed(layout, memory, partial(_write, weights))
            done = whole if cast is None else cast_on_device(whole, cast, self.model.device)
            return None if done is None else keep(done)

    def onloaded(self) -> AbstractContextManager[None]:
        """Have the policy's weights on the device for the block."""
        return self._memory["old"].parameters_onloaded()

    def onload(self) -> int | None:
        """Have all networks on the device.

        Returns:
            the memory of the device that was free before (bytes); None = the device is the CPU.
        """
        before = free_bytes(self.model.device)
        for memory in self._memory.values():
            memory.onload()
        return before

    def offload(self) -> int:
        """Free the memory of all networks on a GPU; on the CPU, whatever the heap keeps and nothing uses.

        Returns:
            what the device got back (bytes).
        """
        return offloaded_bytes(self.model.device, self._offload_all)

    def save(self, folder: Path) -> tuple[int, dict[ScoreRole, Done]]:
        """Copy weights and optimizers, and begin to write the copies: see `is_written`.

        Returns:
            the updates, and what each optimizer did.
        """
        return self._step, self._saved.save(folder)

    def is_written(self) -> bool | OSError:
        """Whether the copies that `save` made are on disk, or why they cannot be written."""
        return self._saved.is_written()

    def load(self, folder: Path, saved: SavedTrainer) -> None:
        """Restore what `save` has written.

        Raises:
            ModelLoadError: a file is missing, damaged, or of another model.
        """
        self._saved.load(folder, saved, self.model.config)
        self._step = saved.steps

    def _tensors_of(self, manifest: Sequence[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
        adapters = None if tuple(manifest) != self.adapters() else self._adapters
        return (adapters or self._published)(self.model)

    def _learners(self) -> dict[ScoreRole, Learner]:
        critic = self._auxiliary.critic
        values: dict[ScoreRole, Learner] = {} if critic is None else {"values": critic.learner}
        return {"old": self._policy, **values}

    def _offload_all(self) -> None:
        for memory in set(self._memory.values()) if has_own_memory(self.model.device) else ():
            memory.offload()


def _write(weights: Iterator[tuple[str, Tensor]], load: Sequence[TensorSpec], bytes_B: Tensor) -> None:
    """Write the next weights into the memory of a bucket."""
    # Both are in the order of the manifest; the first is the shorter one.
    for (name, target), (own_name, source) in zip(views_in(load, bytes_B), weights, strict=False):
        assert name == own_name
        target.copy_(source)


def _memory_of(
    networks: Mapping[ScoreRole, TorchNetwork], learners: Mapping[ScoreRole, Learner]
) -> dict[ScoreRole, NetworkMemory]:
    """The memory of the network in each role."""
    learning = {
        role: NetworkMemory(partial(tensors_of, learner.network.model), learner.optimizer_tensors)
        for role, learner in learners.items()
    }
    memory = {}
    for role, network in networks.items():
        # The reference may be the policy without its adapters.
        same = "old" if network.model is networks["old"].model else role
        memory[role] = learning.get(same) or NetworkMemory(partial(tensors_of, network.model))
    return memory


def _networks_of(
    policy: TorchNetwork,
    base: TorchNetwork | None,
    auxiliary: AuxiliaryModels,
    ranks: ShardedRanks | None,
) -> dict[ScoreRole, TorchNetwork]:
    """The network of each role that there is. base: the policy without its adapters, where it has some."""
    networks: dict[ScoreRole, TorchNetwork] = {"old": policy}
    if auxiliary.ref is not None:
        networks["ref"] = _scoring(TorchNetwork(auxiliary.ref, ranks=ranks))
    elif base is not None:
        networks["ref"] = base
    if auxiliary.teacher is not None:
        networks["teacher"] = _scoring(TorchNetwork(auxiliary.teacher, ranks=ranks))
    if auxiliary.critic is not None:
        networks["values"] = auxiliary.critic.learner.network
    return networks


def _check_routers(network: TorchNetwork, config: TrainerConfig) -> None:
    if (config.router_replay or config.has_router_losses) and network.routers is None:
        raise ModelLoadError(
            "router_replay, moe_aux_loss_coeff and moe_z_loss_coeff need a mixture of experts whose routers "
            f"are known, and {type(network.model).__name__} is none; leave them out."
        )


def _scoring(network: TorchNetwork) -> TorchNetwork:
    """A network whose logprobs have been checked."""
    check_scores(network)
    return network


def _filled(
    tensors: Iterator[tuple[str, Tensor]], pool: BufferPool, manifest: Sequence[TensorSpec], bucket_bytes: int
) -> Generator[Filled, None, int]:
    """Tensors, in the order of the manifest, in shared buffers; returns their checksum."""
    digests: list[Future[list[int]]] = []
    # Checksums run in threads, so that this one fills the next buffer.
    with ThreadPoolExecutor(AHEAD) as threads:
        host_copy = HostCopy()
        for load in _loads(manifest, bucket_bytes):
            buffer = pool.take(sum(map(size_of, load)))
            filled = Filled(load, buffer, pool)
            offset = 0
            # Both are in the order of the manifest; the first is the shorter one.
            for spec, (name, tensor) in zip(load, tensors, strict=False):
                assert spec.name == name
                source_B = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                host_copy.copy(source_B, buffer.bytes_B[offset : offset + len(source_B)])
                offset += len(source_B)
            buffer.digests = threads.submit(digests_of, bucket_of(filled))
            digests.append(buffer.digests)
            yield filled
        return sum_digests(digest for future in digests for digest in future.result())


def _scores(
    network: TorchNetwork,
    samples: Sequence[Sample],
    role: ScoreRole,
    config: TrainerConfig,
    *,
    statistics: bool,
) -> dict[int, FloatArray]:
    """What is reported of the tokens that the role scores, by sample."""
    forward = value_outputs if role == "values" else token_outputs
    masks = [scored_tokens(sample, role) for sample in samples]
    with torch.no_grad(), network.attending():
        rows = network.rows(samples, masks, config.max_tokens_per_gpu)
        outputs_by_row = [(row, forward(network, row, bf16=config.bf16)) for row in rows]
    return reported(outputs_by_row, statistics=statistics)


@contextmanager
def worker(plan: TorchPlan, place: RankPlace) -> Iterator[TorchWorker]:
    """The worker, with the models of the plan's directories.

    Raises:
        ModelLoadError: a directory holds no model; or see `TorchNetwork`.
    """
    device, world_size = torch.device(plan.config.device), plan.world_size
    torch.set_num_threads(plan.num_threads)
    with sharing(place, world_size, plan.shard_size, device) as ranks:
        report_phase("loading weights")

        def placed(model: PreTrainedModel) -> PreTrainedModel:
            if ranks is None:
                # Module.to is wrapped by transformers in a way that hides its signature from type checkers.
                nn.Module.to(model, device)
            return model

        # Below adapters there is half as much to send to a device, once `TorchWorker` has seen it.
        is_halved = bool(plan.config.lora_rank) and plan.config.bf16
        model = open_directory(plan.models["old"], torch.float32)
        if not is_halved:
            placed(model)
        # The critic is a copy, with adapters or frozen parameters, too.
        freeze(model, plan.config)
        critic = None
        if plan.critic is not None:
            critic = Critic(critic_over(model), plan.critic, warmup=plan.critic_warmup, ranks=ranks)
        judges: dict[ScoreRole, PreTrainedModel] = {}
        for role in sorted(plan.opened - {"old"}):
            judges[role] = placed(open_directory(plan.models[role], torch.float32))
            if ranks is not None:
                ranks.shard(judges[role])
        auxiliary = AuxiliaryModels(critic, judges.get("ref"), judges.get("teacher"), plan.moves_reference)
        trained = TorchWorker(model, plan.policy, auxiliary, ranks)
        for learning in (model, *(() if critic is None else (critic.network,))):
            placed(learning)
        yield trained


def _loads(manifest: Sequence[TensorSpec], max_bytes: int) -> Iterator[tuple[TensorSpec, ...]]:
    """The tensors of each bucket; one that is larger than a bucket has a bucket of its own."""
    return map(tuple, grouped(manifest, size_of, max_bytes))
