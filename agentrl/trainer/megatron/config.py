"""Settings of the Megatron trainer: how a model is spread over processes."""

from __future__ import annotations

from itertools import accumulate, pairwise, starmap
from typing import Annotated, Literal

from pydantic import Field

from agentrl.config import Changes, ImportPath
from agentrl.errors import ConfigError
from agentrl.trainer.config import RanksConfig, Size
from agentrl.types import JSON


class MegatronConfig(RanksConfig):
    """The layout. Each rank is a process with a GPU of its own, or with one thread of the CPU.

    The ranks are tensor x context x pipeline x data; the data-parallel size is what is left of them.
    """

    tensor_model_parallel_size: Annotated[Size, Changes.SPEED] = 1
    """Ranks that shard every matrix (count)."""
    pipeline_model_parallel_size: Annotated[Size, Changes.SPEED] = 1
    """Ranks that share the layers, one stage each (count)."""
    num_virtual_stages_per_pipeline_rank: Annotated[Size, Changes.SPEED] = 1
    """Stages of each pipeline rank; more than 1 makes the pipeline's bubble smaller (count)."""
    decoder_first_pipeline_num_layers: Annotated[Size | None, Changes.SPEED] = None
    """Layers of the first pipeline rank, which has the embedding, too (count); left out, as many as
    others."""
    decoder_last_pipeline_num_layers: Annotated[Size | None, Changes.SPEED] = None
    """Layers of the last pipeline rank, which has the head and the loss, too (count); left out, as many as
    others."""
    context_parallel_size: Annotated[Size, Changes.SPEED] = 1
    """Ranks that share every sequence (count)."""
    expert_model_parallel_size: Annotated[Size, Changes.SPEED] = 1
    """Ranks that share the experts of each layer (count); they are taken from all ranks of a stage."""
    expert_tensor_parallel_size: Annotated[Size | None, Changes.SPEED] = None
    """Ranks that shard the matrices of each expert (count); left out, tensor_model_parallel_size."""
    sequence_parallel: Annotated[bool, Changes.SPEED] = False
    """Shard also the activations between the matrices over the tensor ranks; needs more than one of them."""
    use_distributed_optimizer: Annotated[bool, Changes.SPEED] = True
    """Shard the optimizer's state over the replicas and context ranks."""
    offload: Annotated[bool, Changes.SPEED] = False
    """Keep the networks that are not in use in the memory of the CPU."""
    recompute_granularity: Annotated[Literal["full", "selective"] | None, Changes.SPEED] = None
    """What the backward pass recomputes: layers (full) or attention (selective); None = nothing."""
    megatron_config: Annotated[dict[str, JSON], Changes.LEARNING] = Field(default_factory=dict)
    """Fields of Megatron's TransformerConfig, DistributedDataParallelConfig and OptimizerConfig, added to
    what the checkpoint and the other settings say (a table; as a flag: JSON)."""
    custom_megatron_init_path: ImportPath | None = None
    """Function that each rank calls with its layout before it makes a network (package.module:name)."""
    custom_model_provider_path: ImportPath | None = None
    """Function that makes a stage of a network in place of Megatron's GPTModel, from the same arguments
    (package.module:name); its parameters have GPTModel's names."""
    custom_megatron_before_log_prob_hook_path: ImportPath | None = None
    """Function that each rank calls with a role and the stages of its network, before that scores samples
    (package.module:name)."""
    custom_megatron_before_train_step_hook_path: ImportPath | None = None
    """Function that each rank calls with a role and the stages of its network, before that takes an optimizer
    step (package.module:name)."""
    custom_megatron_after_train_step_hook_path: ImportPath | None = None
    """The same after the step."""
    custom_megatron_before_save_hook_path: ImportPath | None = None
    """The same before the network's state is saved."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one replica of the model together."""
        return (
            self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        )

    @property
    def expert_tensor_ranks(self) -> int:
        """Ranks that shard the matrices of an expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold the experts of one layer together."""
        return self.expert_model_parallel_size * self.expert_tensor_ranks

    def replicas_of(self, experts: bool) -> int:
        """Ranks that have the same shards: of the experts, or of all else."""
        if experts:
            return self.world_size // self.pipeline_model_parallel_size // self.expert_ranks
        return self.data_parallel_size * self.context_parallel_size

    def sharding_ranks(self, expert: int | None) -> int:
        """Ranks that shard a matrix. expert: the number of the expert it is of, if of one."""
        return self.tensor_model_parallel_size if expert is None else self.expert_tensor_ranks

    @property
    def data_parallel_size(self) -> int:
        """Replicas."""
        return self.world_size // self.model_parallel_size

    @property
    def shares_the_optimizer(self) -> bool:
        """Whether one optimizer's state is sharded over several ranks."""
        return self.use_distributed_optimizer and self.data_parallel_size * self.context_parallel_size > 1

    @property
    def sequence_multiple(self) -> int:
        """A sequence is padded to a multiple of this (tokens): each context rank has two equal pieces."""
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def row_multiple(self) -> int:
        """A row is padded to a multiple of this (tokens): tensor ranks may shard it, too."""
        shares = self.tensor_model_parallel_size if self.sequence_parallel else 1
        return shares * self.sequence_multiple

    @property
    def row_count_multiple(self) -> int:
        """Rows that go through a pipeline of virtual stages at a time."""
        return self.pipeline_model_parallel_size if self.num_virtual_stages_per_pipeline_rank > 1 else 1

    def stages(self, num_layers: int) -> tuple[range, ...]:
        """The numbers of the layers of each stage, in the order in which rows go through them.

        Stage s is of pipeline rank s % pipeline_model_parallel_size.

        Raises:
            ConfigError: the layers cannot be shared out so.
        """
        ranks, virtual = self.pipeline_model_parallel_size, self.num_virtual_stages_per_pipeline_rank
        chosen = {0: self.decoder_first_pipeline_num_layers, ranks - 1: self.decoder_last_pipeline_num_layers}
        by_rank = {rank: number for rank, number in chosen.items() if number is not None}
        rest, others = num_layers - sum(by_rank.values()), ranks - len(by_rank)
        # Of two ranks with virtual stages Megatron divides by none that are left.
        if rest % others if others else rest or virtual > 1:
            raise self._uneven(num_layers)
        numbers = [by_rank.get(rank, rest // max(others, 1)) for rank in range(ranks)]
        if any(number < virtual or number % virtual for number in numbers):
            raise self._uneven(num_layers)
        ends = accumulate((number // virtual for number in numbers * virtual), initial=0)
        return tuple(starmap(range, pairwise(ends)))

    def stages_of(self, rank: int, num_layers: int) -> tuple[range, ...]:
        """The same of a pipeline rank alone, from 0."""
        return self.stages(num_layers)[rank :: self.pipeline_model_parallel_size]

    def _uneven(self, num_layers: int) -> ConfigError:
        ranks = self.pipeline_model_parallel_size
        own = self.decoder_first_pipeline_num_layers or self.decoder_last_pipeline_num_layers
        last = rest_of_layers(num_layers, ranks)
        if own or self.num_virtual_stages_per_pipeline_rank > 1 or last < 1:
            return ConfigError(
                f"the model's {num_layers} layers are not shared out evenly over "
                f"pipeline_model_parallel_size = {ranks} with num_virtual_stages_per_pipeline_rank = "
                f"{self.num_virtual_stages_per_pipeline_rank}; change one of these, "
                "decoder_first_pipeline_num_layers or decoder_last_pipeline_num_layers."
            )
        return ConfigError(
            f"pipeline_model_parallel_size = {ranks} does not divide the model's {num_layers} layers; lower "
            f"it, or set decoder_last_pipeline_num_layers = {last}."
        )

    def check_ranks(self) -> None:
        """Check that its settings fit each other. A run of the torch trainer may keep any of them.

        Raises:
            ValueError: they do not; one sentence.
        """
        if self.world_size % self.model_parallel_size:
            raise ValueError(
                f"actor_num_nodes x actor_num_gpus_per_node = {self.world_size} must be a multiple of "
                f"tensor x pipeline x context = {self.model_parallel_size}; change one of them."
            )
        of_a_stage = self.world_size // self.pipeline_model_parallel_size
        if of_a_stage % self.expert_ranks:
            raise ValueError(
                f"the {of_a_stage} ranks of a stage must be a multiple of expert_model_parallel_size x "
                f"expert_tensor_parallel_size = {self.expert_ranks}; change one of them."
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "sequence_parallel needs tensor_model_parallel_size of at least 2; raise it, or leave it out."
            )
        of_stages = {
            "num_virtual_stages_per_pipeline_rank": self.num_virtual_stages_per_pipeline_rank > 1,
            "decoder_first_pipeline_num_layers": self.decoder_first_pipeline_num_layers is not None,
            "decoder_last_pipeline_num_layers": self.decoder_last_pipeline_num_layers is not None,
        }
        if self.pipeline_model_parallel_size == 1:
            for name in (name for name, is_set in of_stages.items() if is_set):
                raise ValueError(
                    f"{name} needs pipeline_model_parallel_size of at least 2; raise it, or leave it out."
                )


def rest_of_layers(num_layers: int, ranks: int) -> int:
    """Layers of the last of some pipeline ranks, which has the head, where all others have equally many.

    Below 1 where there are too few layers for that.
    """
    return num_layers - (ranks - 1) * -(-num_layers // ranks)
