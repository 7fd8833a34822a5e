"""Settings of the Megatron trainer: how a model is spread over processes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.config import Changes, ImportPath
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
    megatron_config: Annotated[dict[str, JSON], Changes.SPEED] = Field(default_factory=dict)
    """Fields of Megatron's TransformerConfig, added to the checkpoint's (a table; as a flag: JSON)."""
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
        if self.num_virtual_stages_per_pipeline_rank > 1 and self.pipeline_model_parallel_size == 1:
            raise ValueError(
                "num_virtual_stages_per_pipeline_rank needs pipeline_model_parallel_size of at least 2; "
                "raise it, or leave it out."
            )
