"""From rows of tokens to logprobs: all tokens through the model, only predicting states through its head.

Attention stays inside sequences, through the attention registry of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agentrl.errors import ModelLoadError
from agentrl.losses import OutputHead, Targets, TokenOutputs, logprobs_and_entropy, to_device
from agentrl.trainer.attention import Ends, Sides, fastest
from agentrl.trainer.batch import MicroBatch, micro_batches
from agentrl.types import NO_VERSION, Author, RolloutId, Sample

_NAME = "agentrl_segments"


@contextmanager
def segment_attention(model: PreTrainedModel) -> Iterator[None]:
    """Make `model` attend within sequences; it must be called with `ends=`. Restored afterwards.

    Raises:
        ModelLoadError: the architecture does not support the attention registry.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        if model.config._attn_implementation != _NAME:
            raise ModelLoadError(
                f"{type(model).__name__} attends in its own way, so sequences cannot share a row; "
                "choose a Llama, Qwen2 or Qwen3 architecture."
            )
        yield
    finally:
        model.set_attn_implementation(before)


def _attend(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_mask: Tensor | None,
    ends: Ends,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Query, key and value [1, heads, T, head_dim] -> [1, T, heads, head_dim]; transformers' signature."""
    # Under autocast norms and rotations give queries and keys in fp32.
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    return _kernel(value.device, value.dtype).attend(q, k, v, Sides(ends, ends), scaling)[None], None


# It looks for packages.
_kernel = lru_cache(maxsize=8)(fastest)

ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)


_TOLERANCE = 1e-4


def token_outputs(
    model: PreTrainedModel, row: MicroBatch, *, bf16: bool, entropy_gradient: bool = False
) -> TokenOutputs:
    """Logprob and entropy of the row's N predicted tokens. Call it inside `segment_attention`."""
    device = model.device
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        states_ND = predicting_states(model, row)
    head = head_of(model)
    dtype = torch.bfloat16 if bf16 else head.weight.dtype
    return logprobs_and_entropy(
        states_ND.to(dtype),
        OutputHead(head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype)),
        Targets(to_device(row.targets_N, device), to_device(row.temperature_N, device), row.kept_N),
        entropy_gradient=entropy_gradient,
    )


def predicting_states(model: PreTrainedModel, row: MicroBatch) -> torch.Tensor:
    """[N, width]: the hidden states that predict the row's tokens, each the state of the token before."""
    device = model.device
    states: torch.Tensor = model.base_model(
        input_ids=to_device(row.input_ids_T, device)[None],
        position_ids=to_device(row.position_ids_T, device)[None],
        use_cache=False,
        ends=Ends.of(row.lengths, device),
    ).last_hidden_state[0]
    return states.index_select(0, to_device(row.predictor_N, device))


def head_of(model: PreTrainedModel) -> nn.Linear:
    """The layer from hidden states to logits.

    Raises:
        ModelLoadError: the model has none, or one that is no linear layer.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelLoadError(
            f"{type(model).__name__} has no linear language-model head; use a causal language model."
        )
    return head


def check_trainable(model: PreTrainedModel) -> None:
    """Compare two short sequences in one row with the model's own forward, one by one.

    Raises:
        ModelLoadError: they differ: the architecture has features that a flat row does not support
            (windows, masks of its own, caps on the logits), or its weights are not in fp32.
    """
    name = type(model).__name__
    if model.dtype not in (torch.float32, torch.float64):
        raise ModelLoadError(f"{name} came in {model.dtype}; load it in float32, and set bf16 for speed.")
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ModelLoadError(
            f"{name} mixes {sorted(kinds)}; this trainer needs full attention in every layer, "
            "as in Llama, Qwen2 and Qwen3: choose such a model."
        )
    samples = [_probe(length, model.config.get_text_config().vocab_size) for length in (7, 4)]
    (row,) = micro_batches(samples, [sample.loss_mask for sample in samples], 16)
    with torch.no_grad():
        separate = [_separate_logprobs(model, sample) for sample in samples]
        try:
            with segment_attention(model):
                packed = token_outputs(model, row, bf16=False).logp_N
        except TypeError as error:
            raise _unfit(name) from error
    if not torch.allclose(packed, torch.cat(separate).to(packed), atol=_TOLERANCE):
        raise _unfit(name)


def _unfit(name: str) -> ModelLoadError:
    return ModelLoadError(
        f"{name} gives other probabilities when sequences share a row, so it cannot be trained here; "
        "choose a Llama, Qwen2 or Qwen3 architecture."
    )


def _probe(length: int, vocab_size: int) -> Sample:
    ids = torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(length))
    later = torch.arange(length) > 0
    return Sample(
        token_ids=ids.to(torch.int32).numpy(),
        author=(later * int(Author.DEMO)).to(torch.int8).numpy(),
        loss_mask=later.numpy(),
        logprobs=torch.zeros(length).numpy(),
        versions=torch.full((length,), NO_VERSION, dtype=torch.int32).numpy(),
        turns=torch.zeros(length, dtype=torch.int32).numpy(),
        temperatures=torch.ones(length).numpy(),
        rollout_id=RolloutId("probe"),
    )


def _separate_logprobs(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    ids = torch.from_numpy(sample.token_ids.astype("int64")).to(model.device)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
