"""The fastest attention that is installed is chosen, named, and given what it asks for."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
import torch
from torch.nn.attention import varlen

from agentrl.trainer.attention import Ends, Scoring, Sides, by_length, fastest, kernels_in_words

GPU = torch.device("cuda")
LENGTHS = (7, 7, 6, 3, 1)
BEFORE = (0, 2, 5, 0, 9)
"""Keys of each sequence that its first query already looks back at."""
SCALE = 0.2
KINDS = {
    "all before": Scoring(SCALE),
    "a window": Scoring(SCALE, window=3),
    "sinks": Scoring(SCALE, sinks=torch.tensor([0.3, -1.0, 0.0, 2.0])),
    "a window and sinks": Scoring(window=3, sinks=torch.tensor([0.3, -1.0, 0.0, 2.0])),
}
KERNELS = {kind: scores for kind, scores in KINDS.items() if scores.sinks is None}
LOOKS = pytest.mark.parametrize("looks_back", [False, True])


def drawn(dtype=torch.float32, device="cpu", *, looks_back=False):
    """Query, key and value of a row whose heads share keys and values in pairs, and its sides."""
    generator = torch.Generator().manual_seed(3)
    queries = keys = Ends.of(LENGTHS, torch.device(device))
    if looks_back:
        lengths = [own + before for own, before in zip(LENGTHS, BEFORE, strict=True)]
        keys = Ends.of(lengths, torch.device(device))
    shapes = [(int(ends.bounds[-1]), n, 16) for ends, n in ((queries, 4), (keys, 2), (keys, 2))]
    row = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return *row, Sides(queries, keys)


def sides_of(*bounds):
    return Sides(*(Ends(each, tuple(each.diff().tolist())) for each in bounds))


def per_sequence(query, key, value, sides, scores):
    """Each sequence by itself, in plain numbers."""
    outputs = []
    starts = [list(pairwise(ends.bounds.tolist())) for ends in sides]
    for mine, theirs in zip(*starts, strict=True):
        q = query[slice(*mine)].transpose(0, 1).double()
        k, v = (x[slice(*theirs)].transpose(0, 1).double().repeat_interleave(2, 0) for x in (key, value))
        products = (q @ k.transpose(1, 2) * (scores.scale or 16**-0.5)).exp()
        # How many tokens the key is before the query.
        back = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] - torch.arange(k.shape[1])
        is_seen = (back >= 0) & (back < (scores.window or 10**6))
        products = products * is_seen.to(q.device)
        total = products.sum(-1, keepdim=True)
        if scores.sinks is not None:
            total = total + scores.sinks.double().exp()[:, None, None]
        outputs.append((products / total @ v).transpose(0, 1))
    return torch.cat(outputs)


def leaves(row, scores):
    """All that has a gradient, as copies: queries, keys, values, sinks."""
    tensors = [*row[:3], *([] if scores.sinks is None else [scores.sinks])]
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def check(attend, row, scores, *, tolerance=1e-6):
    """Outputs and every gradient are those of `per_sequence`."""
    results = []
    for function in (attend, per_sequence):
        own = leaves(row, scores)
        out = function(*own[:3], row[3], scores._replace(sinks=own[3] if own[3:] else None))
        weights = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
        gradients = torch.autograd.grad((out * weights).sum(), own)
        results.append([out, *gradients])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), atol=tolerance, rtol=10 * tolerance)


@LOOKS
@pytest.mark.parametrize("kind", KINDS)
def test_by_length_is_each_sequence_by_itself(kind, looks_back):
    check(by_length, drawn(looks_back=looks_back), KINDS[kind])


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float32)])
def test_where_no_kernel_can_do_it_sdpa_does(device, dtype):
    kernel = fastest(torch.device(device), dtype)
    assert kernel.attend is by_length
    assert "SDPA" in kernel.name


@LOOKS
@pytest.mark.parametrize("kind", KERNELS)
def test_torchs_own_is_given_the_sequences(monkeypatch, kind, looks_back):
    def attend(query, key, value, *places, scale, window_size, enable_gqa):
        bounds, key_bounds, longest, longest_key = places
        left, right = window_size
        assert (right, enable_gqa) == (0, True)
        sides = sides_of(bounds, key_bounds)
        assert [longest, longest_key] == ([7, 11] if looks_back else [7, 7])
        scores = Scoring(scale, None if left < 0 else left + 1)
        return per_sequence(query, key, value, sides, scores).to(query.dtype)

    monkeypatch.setattr(varlen, "varlen_attn", attend)
    kernel = fastest(GPU, torch.bfloat16)
    assert kernel.name == f"torch {torch.__version__} varlen_attn"
    check(kernel.attend, drawn(looks_back=looks_back), KERNELS[kind])


def test_one_that_cannot_share_keys_is_left_alone(monkeypatch):
    def attend(*row, is_causal=False):
        raise AssertionError("it was asked")

    monkeypatch.setattr(varlen, "varlen_attn", attend)
    assert fastest(GPU, torch.bfloat16).attend is by_length


FLASH_ATTN = """
from agentrl.trainer.attention import Scoring
from tests.trainer.test_kernels import per_sequence, sides_of
__version__ = '9.8'
def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                           dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    assert causal and dropout_p == 0.0
    scores = Scoring(softmax_scale, None if window_size[0] < 0 else window_size[0] + 1)
    sides = sides_of(cu_seqlens_q, cu_seqlens_k)
    assert (max_seqlen_q, max_seqlen_k) == (sides.queries.longest, sides.keys.longest)
    return per_sequence(q, k, v, sides, scores).to(q.dtype)
"""


@LOOKS
@pytest.mark.parametrize("kind", KERNELS)
def test_flash_attn_goes_first(monkeypatch, tmp_path, kind, looks_back):
    (tmp_path / "flash_attn.py").write_text(FLASH_ATTN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    kernel = fastest(GPU, torch.float16)
    assert kernel.name == "flash-attn 9.8"
    check(kernel.attend, drawn(looks_back=looks_back), KERNELS[kind])


@pytest.mark.parametrize("source", ["import a_torch_of_last_year", "__version__ = '9.8'"])
def test_a_flash_attn_that_cannot_be_used_is_told_and_left_alone(monkeypatch, tmp_path, caplog, source):
    (tmp_path / "flash_attn.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    assert "flash" not in fastest(GPU, torch.bfloat16).name
    assert "flash-attn is installed, but cannot be used: " in caplog.text
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)


@pytest.fixture
def card(monkeypatch):
    """Presents a card of this capability, with a torch whose varlen_attn cannot share keys, as 2.11's."""
    for package in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules, package)

    def of(*capability):
        monkeypatch.setattr(varlen, "varlen_attn", lambda *row, is_causal=False: None)
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return of


def test_the_operator_under_torchs_own_shares_keys_on_cards_that_have_it(card):
    card(8, 0)
    kernel = fastest(GPU, torch.bfloat16)
    assert kernel.name == f"torch {torch.__version__} FlashAttention-2"
    assert fastest(GPU, torch.float32).attend is by_length
    card(7, 5)
    assert fastest(GPU, torch.bfloat16).attend is by_length


def products(query, key, places, options):
    """Of FlashAttention's operators: for each sequence where its queries and keys are, and what these score;
    in plain numbers."""
    left, right = options["window_size_left"], options["window_size_right"]
    assert right == 0
    for mine, theirs in zip(*(pairwise(bounds.tolist()) for bounds in places[:2]), strict=True):
        q, k = query[slice(*mine)].double(), key[slice(*theirs)].double().repeat_interleave(2, 1)
        back = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        is_hidden = (back < 0) | (back > (left if left is not None else 10**6))
        scale = options["scale"] or 16**-0.5
        scored = torch.einsum("qhd,khd->hqk", q, k) * scale
        yield slice(*mine), slice(*theirs), scored.masked_fill(is_hidden, -torch.inf), scale


def flash_forward(query, key, value, *rest, **options):
    """What the operator gives: outputs, the logarithms of the normalisers, and two states."""
    *places, dropout, is_causal, _ = rest
    assert (dropout, is_causal) == (0.0, True)
    out, summed = [], []
    for _, theirs, scored, _ in products(query, key, places, options):
        v = value[theirs].double().repeat_interleave(2, 1)
        out.append(torch.einsum("hqk,khd->qhd", scored.softmax(-1), v))
        summed.append(scored.logsumexp(-1))
    state = torch.zeros(2)
    return torch.cat(out).float(), torch.cat(summed, 1).float(), state, state, state


def flash_backward(gradient, query, key, value, out, summed, *rest, **options):
    """The published backward pass (Dao 2023, algorithm 2), from outputs and normalisers as they are given."""
    of_query, of_key, of_value = (torch.zeros_like(x).double() for x in (query, key, value))
    for mine, theirs, scored, scale in products(query, key, rest[:2], options):
        q, k, v = query[mine].double(), key[theirs].double(), value[theirs].double()
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        d_out, shares = gradient[mine].double(), (scored - summed[:, mine, None]).exp()
        d_shares = torch.einsum("qhd,khd->hqk", d_out, v)
        delta = (d_out * out[mine].double()).sum(-1).T[..., None]
        d_scored = shares * (d_shares - delta) * scale
        of_query[mine] = torch.einsum("hqk,khd->qhd", d_scored, k)
        for target, shared in (
            (of_key, torch.einsum("hqk,qhd->khd", d_scored, q)),
            (of_value, torch.einsum("hqk,qhd->khd", shares, d_out)),
        ):
            target[theirs] = shared.unflatten(1, (-1, 2)).sum(2)
    return of_query.float(), of_key.float(), of_value.float()


@LOOKS
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in KERNELS])
def test_sinks_are_in_what_the_operators_are_given(monkeypatch, tmp_path, card, kind, looks_back):
    # One that has no sinks does not go first.
    (tmp_path / "flash_attn.py").write_text(FLASH_ATTN)
    monkeypatch.syspath_prepend(tmp_path)
    card(9, 0)
    kernel = fastest(GPU, torch.bfloat16, has_sinks=True)
    assert kernel.name == f"torch {torch.__version__} FlashAttention-2"
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)
    check(kernel.attend, drawn(looks_back=looks_back), KINDS[kind])


@LOOKS
@pytest.mark.parametrize("kind", KERNELS)
def test_flash_attn_3_goes_first_on_hopper_alone(monkeypatch, tmp_path, card, kind, looks_back):
    # Some of its versions return the normalisers, too.
    source = FLASH_ATTN.replace("dropout_p=0.0, ", "").replace(" and dropout_p == 0.0", "")
    source = source.replace(".to(q.dtype)", ".to(q.dtype), None")
    (tmp_path / "flash_attn_interface.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    card(8, 0)
    assert "flash-attn 3" not in fastest(GPU, torch.bfloat16).name
    card(9, 0)
    kernel = fastest(GPU, torch.bfloat16)
    assert kernel.name == "flash-attn 3 9.8"
    check(kernel.attend, drawn(looks_back=looks_back), KERNELS[kind])


def test_the_start_of_a_run_names_what_it_computes_with_and_what_would_be_faster(monkeypatch, card):
    monkeypatch.setattr("agentrl.trainer.attention.compiles", lambda device: device.type == "cuda")
    assert kernels_in_words(torch.device("cpu"), torch.bfloat16) is None
    card(9, 0)
    sentence = kernels_in_words(GPU, torch.bfloat16)
    assert sentence.endswith(" FlashAttention-2; flash-attn 3 would be faster on this GPU.")
    # It has no sinks.
    assert "flash-attn" not in kernels_in_words(GPU, torch.bfloat16, has_sinks=True)
    assert "SDPA" in kernels_in_words(GPU, torch.float32)
    assert "FlashAttention (bf16 = true" in kernels_in_words(GPU, torch.float32)
    card(8, 0)
    monkeypatch.setattr("agentrl.trainer.attention.compiles", lambda device: False)
    assert kernels_in_words(GPU, torch.bfloat16).endswith("not compiled: install Triton and a C compiler.")
