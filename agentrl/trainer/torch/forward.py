"""From rows of tokens to logprobs: all tokens through the model, only predicting states through its head.

Attention stays inside sequences, through the attention registry of transformers. A model whose layers do more
(windows, recurrences) gets the sequences of a row in batches of like length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agentrl.errors import ModelLoadError
from agentrl.losses import LogitFinish, OutputHead, Targets, TokenOutputs, logprobs_and_entropy, to_device
from agentrl.trainer.attention import (
    SHORTEST,
    Attend,
    Beginnings,
    Ends,
    Fold,
    Scoring,
    Sides,
    fastest,
    folds_of,
)
from agentrl.trainer.batch import MicroBatch, micro_batches
from agentrl.trainer.routing import (
    NO_LOSSES,
    PassRouting,
    RankTokens,
    RouterFacts,
    RouterLosses,
    RouterReplay,
)
from agentrl.trainer.torch.sharding import ShardedRanks
from agentrl.types import NO_VERSION, Author, BoolArray, RolloutId, Sample
from agentrl.weights.hf.routing import Routers
from agentrl.weights.hf.source import long_ropes

_NAME = "agentrl_segments"
_TOLERANCE = 1e-4
_PROBES = ((9, 0), (9, 4), (5, 3))
"""The sequences that a model is tried with: their tokens, and how many of these the first one begins with."""

T = TypeVar("T")


class Packing(NamedTuple):
    """Where the sequences of a row end, and what they share. attention: in place of the fastest there is."""

    ends: Ends
    shared: Beginnings | None = None
    attention: Attend | None = None


class UnpackableError(Exception):
    """A layer attends in a way that `segment_attention` does not compute."""


class TorchNetwork:
    """A causal language model, and how the sequences of a row go through it.

    Packed, they go end to end, and attend within themselves; what several begin with, as siblings with their
    prompt, is computed once. Folded, each batch of neighbours of like length goes by itself, padded at its
    end, where a causal model sees nothing of it; that is exact for any causal model, and a little slower.
    Which of them holds is found out with short sequences.

    Args:
        model: a causal language model in fp32 or better; it is put into evaluation mode.
        acting: what its passes are in; e.g. its adapters do not act.
        routes: whether its routers are seen, and may replay what others chose (`routed`).
        ranks: those that share it, where there are several; this one then keeps a shard of it.

    Raises:
        ModelLoadError: neither gives what the model gives for a sequence alone, or its weights are not in
            fp32.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        acting: Callable[[], AbstractContextManager[None]] = nullcontext,
        routes: bool = False,
        ranks: ShardedRanks | None = None,
    ) -> None:
        if model.dtype not in (torch.float32, torch.float64):
            raise ModelLoadError(
                f"{type(model).__name__} came in {model.dtype}; load it in float32, and set bf16 for speed."
            )
        self.model = model.eval()
        self.acting = acting
        self._ranks = ranks
        self.routers = Routers.of(model) if routes else None
        self._routing: PassRouting | None = None
        self._whole = None if ranks is None else ranks.shard(model)
        row = _probe_row(model)
        with acting(), torch.no_grad():
            separate = self.computed(lambda: _separate(model, row))
        self.is_packed = attends_everywhere(model) and self._gives(row, separate, is_packed=True)
        if not self.is_packed and not self._gives(row, separate, is_packed=False):
            raise ModelLoadError(
                f"{type(model).__name__} gives a sequence other states when another one is beside it, so it "
                "cannot be trained here; choose a causal language model."
            )

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Have the model attend as `states` needs it; its own attention is restored afterwards."""
        attention = segment_attention(self.model) if self.is_packed else _one_sequence_a_line()
        with self.acting(), attention:
            yield

    @contextmanager
    def routed(
        self,
        replay: RouterReplay | None = None,
        *,
        records: bool = False,
        losses: RouterLosses = NO_LOSSES,
    ) -> Iterator[PassRouting | None]:
        """Have the routers ask, for each row that goes through the network. Backward passes belong to it.

        replay, records, losses: see `PassRouting`, which is None where its routers are not seen.
        """
        if (routers := self.routers) is None:
            yield None
            return
        facts = RouterFacts(routers.layers, routers.experts, self.model.device, routers.is_sigmoid)
        self._routing = PassRouting(facts, replay, records=records, losses=losses)
        try:
            yield self._routing
        finally:
            self._routing = routers.passed = None

    def computed(self, function: Callable[[], T]) -> T:
        """What a function of the weights gives; ranks that share them gather them for it, layer by layer.

        Where a gradient follows, the function goes through the layers once.
        """
        if self._whole is None:
            return function()
        value: T = self._whole(function)
        if not torch.is_grad_enabled():
            # What lies outside of the layers was kept for a backward pass.
            self._whole.free()
        return value

    def rows(
        self, samples: Sequence[Sample], masks: Sequence[BoolArray], max_tokens: int
    ) -> Sequence[MicroBatch]:
        """This rank's rows for tokens under `masks`, see `micro_batches`; it may have none of a sample."""
        if self._ranks is None:
            return micro_batches(samples, masks, max_tokens)
        # Ranks gather a layer together: each row of each of them goes through it once.
        cut = None if self.is_packed else lambda lengths: [fold.count for fold in self._folds(lengths)]
        width = head_of(self.model).weight.shape[1]
        return self._ranks.rows(samples, masks, max_tokens, width=width, cut=cut)

    def states(self, row: MicroBatch) -> Tensor:
        """[T, width]: the last hidden state of each token of a row. Call it in `attending`."""
        model, device = self.model, self.model.device
        ids_T = to_device(row.input_ids_T, device)
        if self.is_packed:
            positions_T = to_device(row.position_ids_T, device)
            shared = Beginnings.of(self._alike(row), row.lengths, device)
            if shared is not None:
                ids_T, positions_T = ids_T[shared.firsts], positions_T[shared.firsts]
            self._route(row, shared)
            packed_TD: Tensor = model.base_model(
                input_ids=ids_T[None],
                position_ids=positions_T[None],
                use_cache=False,
                packing=Packing(Ends.of(row.lengths, device), shared),
            ).last_hidden_state[0]
            return packed_TD if shared is None else packed_TD.index_select(0, shared.places)
        return torch.cat([self._folded(row, ids_T, fold) for fold in self._folds(row.lengths)])

    def predicting_states(self, row: MicroBatch) -> Tensor:
        """[N, width]: those that predict the row's tokens, each the state of the token before."""
        return self.states(row).index_select(0, to_device(row.predictor_N, self.model.device))

    def _folds(self, lengths: tuple[int, ...]) -> tuple[Fold, ...]:
        # Where positions turn by the longest sequence of a batch, all of a batch have one length.
        shortest = 1.0 if long_ropes(self.model.config) else SHORTEST
        return folds_of(lengths, self.model.device, shortest=shortest)

    def _alike(self, row: MicroBatch) -> npt.NDArray[np.int64]:
        """A number for each token, [T], equal where tokens after the same ones have the same states."""
        rows = [row.input_ids_T]
        if self._routing is not None:
            rows += [
                experts.astype(np.int64) for experts in (row.routed_T, row.replayed_T) if experts is not None
            ]
        if len(rows) == 1:
            return row.input_ids_T
        known: dict[bytes, int] = {}
        keys = [b"".join(each.tobytes() for each in of_token) for of_token in zip(*rows, strict=True)]
        return np.array([known.setdefault(key, len(known)) for key in keys])

    def _route(self, row: MicroBatch, part: Beginnings | Fold | None) -> None:
        """Have the routers ask for the tokens that come next. part: of the row; None = all of it."""
        if self._routing is not None and self.routers is not None:
            self.routers.passed = self._routing.row(row, _own_tokens(row, part))

    def _folded(self, row: MicroBatch, ids_T: Tensor, fold: Fold) -> Tensor:
        self._route(row, fold)
        states = self.model.base_model(input_ids=fold.batch(ids_T), use_cache=False).last_hidden_state
        return fold.tokens(states)

    def _gives(self, row: MicroBatch, expected_TD: Tensor, *, is_packed: bool) -> bool:
        """Whether a row gives these states."""
        self.is_packed = is_packed
        try:
            with torch.no_grad(), self.attending():
                states_TD = self.computed(lambda: self.states(row))
        except torch.OutOfMemoryError:
            raise
        # Whatever a model makes of arguments that it does not know, or of an attention of another shape.
        except (TypeError, RuntimeError, UnpackableError):
            return False
        scale = float(expected_TD.abs().max())
        return torch.allclose(states_TD, expected_TD, rtol=0, atol=_TOLERANCE * max(scale, 1.0))


def _own_tokens(row: MicroBatch, part: Beginnings | Fold | None) -> RankTokens:
    if part is None:
        return RankTokens(np.arange(len(row.input_ids_T)))
    if isinstance(part, Beginnings):
        places_T, firsts = part.on_host
        return RankTokens(firsts, places_T)
    index_t = np.full(part.count * part.longest, -1)
    index_t[slice(None) if part.real_cells is None else part.real_cells] = np.arange(part.start, part.stop)
    return RankTokens(index_t)


def attends_everywhere(model: PreTrainedModel) -> bool:
    """Whether each layer says that it attends to all tokens before, wherever the row's longest one ends."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and not long_ropes(model.config)


def _separate(model: PreTrainedModel, row: MicroBatch) -> Tensor:
    """The last hidden states of each sequence of a row by itself, [T, width]."""
    each = to_device(row.input_ids_T, model.device).split(row.lengths)
    states = [model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0] for ids in each]
    return torch.cat(states)


def _probe_row(model: PreTrainedModel) -> MicroBatch:
    """A row of short sequences."""
    vocab = model.config.get_text_config().vocab_size
    first_T = _probe_ids(_PROBES[0][0], 0, vocab)
    samples = [
        _probe_sample(torch.cat([first_T[:shared], _probe_ids(length - shared, seed, vocab)]))
        for seed, (length, shared) in enumerate(_PROBES)
    ]
    most = sum(length for length, _ in _PROBES)
    (row,) = micro_batches(samples, [sample.loss_mask for sample in samples], most)
    return row


def _probe_ids(length: int, seed: int, vocab: int) -> Tensor:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed))


def _probe_sample(ids: Tensor) -> Sample:
    length = len(ids)
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


@contextmanager
def _one_sequence_a_line() -> Iterator[None]:
    """Spare transformers its search for several sequences in a line: it reads positions from the device."""
    search = masking_utils.find_packed_sequence_indices
    vars(masking_utils).update(find_packed_sequence_indices=lambda _positions: None)
    try:
        yield
    finally:
        vars(masking_utils).update(find_packed_sequence_indices=search)


@contextmanager
def segment_attention(model: PreTrainedModel) -> Iterator[None]:
    """Make `model` attend within sequences; it must be called with `packing=`. Restored afterwards.

    Raises:
        UnpackableError: the architecture does not support the attention registry.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        if model.config._attn_implementation != _NAME:
            raise UnpackableError
        yield
    finally:
        model.set_attn_implementation(before)


def _attend(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_mask: Tensor | None,
    packing: Packing,
    scaling: float | None = None,
    **variants: object,
) -> tuple[Tensor, None]:
    """Query, key and value [1, heads, T, head_dim] -> [1, T, heads, head_dim]; transformers' signature.

    Where sequences share tokens, all is of these; each sequence attends to all of its own.

    Raises:
        UnpackableError: the layer has a window, a cap on its scores, or sinks; or its values have another
            width than its keys, which not every kernel takes.
    """
    if value.shape[-1] != key.shape[-1] or any(
        variants.get(name) is not None for name in ("sliding_window", "softcap", "s_aux")
    ):
        raise UnpackableError
    # Under autocast norms and rotations give queries and keys in fp32.
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    ends, shared, attention = packing
    if shared is not None:
        q, k, v = (x.index_select(0, shared.places) for x in (q, k, v))
    attend = attention or _kernel(value.device, value.dtype).attend
    out = attend(q, k, v, Sides(ends, ends), Scoring(scaling))
    return (out if shared is None else out.index_select(0, shared.firsts))[None], None


# It looks for packages.
_kernel = lru_cache(maxsize=8)(fastest)

ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)


def token_outputs(
    network: TorchNetwork, row: MicroBatch, *, bf16: bool, entropy_gradient: bool = False
) -> TokenOutputs:
    """Logprob and entropy of the row's N predicted tokens. Call it inside `network.attending()`."""
    return network.computed(lambda: _outputs(network, row, bf16=bf16, entropy_gradient=entropy_gradient))


def _outputs(network: TorchNetwork, row: MicroBatch, *, bf16: bool, entropy_gradient: bool) -> TokenOutputs:
    model, device = network.model, network.model.device
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        states_ND = network.predicting_states(row)
    head = head_of(model)
    dtype = torch.bfloat16 if bf16 else head.weight.dtype
    bias = None if head.bias is None else head.bias.to(dtype)
    return logprobs_and_entropy(
        states_ND.to(dtype),
        OutputHead(head.weight.to(dtype), bias, finish=_finish_of(model)),
        Targets(to_device(row.targets_N, device), to_device(row.temperature_N, device), row.kept_N),
        entropy_gradient=entropy_gradient,
    )


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


def _finish_of(model: PreTrainedModel) -> LogitFinish:
    """What some families do to their logits after the head, by the names that their configurations have."""
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    return LogitFinish(scale, getattr(config, "final_logit_softcapping", None))


def check_scores(network: TorchNetwork) -> None:
    """Compare the logprobs of a short row with those of the model's own logits.

    Raises:
        ModelLoadError: they differ: the model does to its logits what is not known here.
    """
    model = network.model
    row = _probe_row(model)
    with torch.no_grad(), network.attending():
        scored_N = token_outputs(network, row, bf16=False).logp_N
    with torch.no_grad(), network.acting():
        each = to_device(row.input_ids_T, model.device).split(row.lengths)
        logits = network.computed(lambda: [model(ids[None], use_cache=False).logits[0] for ids in each])
    own_NV = torch.cat(logits).log_softmax(-1)[to_device(row.predictor_N, model.device)]
    own_N = own_NV.gather(1, to_device(row.targets_N, model.device)[:, None])[:, 0]
    if not torch.allclose(scored_N, own_N.to(scored_N), atol=_TOLERANCE):
        raise ModelLoadError(
            f"{type(model).__name__} changes its logits in a way that this trainer does not know, so its "
            "probabilities would be wrong; choose another architecture."
        )
