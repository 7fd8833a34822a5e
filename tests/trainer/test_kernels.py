"""The fastest attention that is installed is chosen, named, and given what it asks for."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
import torch
from torch.nn.attention import varlen

from agentrl.trainer.attention import Ends, Sides, by_length, fastest, kernels_in_words

GPU = torch.device("cuda")
LENGTHS = (7, 7, 6, 3, 1)
BEFORE = (0, 2, 5, 0, 9)
"""Keys of each sequence that its first query already looks back at."""
SCALE = 0.2
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


def per_sequence(query, key, value, sides, scale):
    """Each sequence by itself, in plain numbers."""
    outputs = []
    starts = [list(pairwise(ends.bounds.tolist())) for ends in sides]
    for mine, theirs in zip(*starts, strict=True):
        q = query[slice(*mine)].transpose(0, 1).double()
        k, v = (x[slice(*theirs)].transpose(0, 1).double().repeat_interleave(2, 0) for x in (key, value))
        logits = q @ k.transpose(1, 2) * scale
        hidden = torch.ones(logits.shape[1:], dtype=torch.bool, device=q.device)
        hidden = hidden.triu(1 + k.shape[1] - q.shape[1])
        outputs.append((logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


@LOOKS
def test_by_length_is_each_sequence_by_itself(looks_back):
    row = drawn(looks_back=looks_back)
    torch.testing.assert_close(
        by_length(*row, SCALE).double(), per_sequence(*row, SCALE), atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float32)])
def test_where_no_kernel_can_do_it_sdpa_does(device, dtype):
    kernel = fastest(torch.device(device), dtype)
    assert kernel.attend is by_length
    assert "SDPA" in kernel.name


@LOOKS
def test_torchs_own_is_given_the_sequences(monkeypatch, looks_back):
    def attend(query, key, value, *places, scale, window_size, enable_gqa):
        bounds, key_bounds, longest, longest_key = places
        assert (window_size, enable_gqa) == ((-1, 0), True)
        sides = sides_of(bounds, key_bounds)
        assert [longest, longest_key] == ([7, 11] if looks_back else [7, 7])
        return per_sequence(query, key, value, sides, scale).to(query.dtype)

    monkeypatch.setattr(varlen, "varlen_attn", attend)
    kernel = fastest(GPU, torch.bfloat16)
    assert kernel.name == f"torch {torch.__version__} varlen_attn"
    row = drawn(looks_back=looks_back)
    torch.testing.assert_close(kernel.attend(*row, SCALE), by_length(*row, SCALE), atol=1e-6, rtol=1e-5)


def test_one_that_cannot_share_keys_is_left_alone(monkeypatch):
    def attend(*row, is_causal=False):
        raise AssertionError("it was asked")

    monkeypatch.setattr(varlen, "varlen_attn", attend)
    assert fastest(GPU, torch.bfloat16).attend is by_length


FLASH_ATTN = """
from tests.trainer.test_kernels import per_sequence, sides_of
__version__ = '9.8'
def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                           dropout_p=0.0, softmax_scale=None, causal=False):
    assert causal and dropout_p == 0.0
    sides = sides_of(cu_seqlens_q, cu_seqlens_k)
    assert (max_seqlen_q, max_seqlen_k) == (sides.queries.longest, sides.keys.longest)
    return per_sequence(q, k, v, sides, softmax_scale).to(q.dtype)
"""


@LOOKS
def test_flash_attn_goes_first(monkeypatch, tmp_path, looks_back):
    (tmp_path / "flash_attn.py").write_text(FLASH_ATTN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    kernel = fastest(GPU, torch.float16)
    assert kernel.name == "flash-attn 9.8"
    row = drawn(looks_back=looks_back)
    torch.testing.assert_close(kernel.attend(*row, SCALE), by_length(*row, SCALE), atol=1e-6, rtol=1e-5)


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


@LOOKS
def test_flash_attn_3_goes_first_on_hopper_alone(monkeypatch, tmp_path, card, looks_back):
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
    row = drawn(looks_back=looks_back)
    torch.testing.assert_close(kernel.attend(*row, SCALE), by_length(*row, SCALE), atol=1e-6, rtol=1e-5)


def test_the_start_of_a_run_names_what_it_computes_with_and_what_would_be_faster(monkeypatch, card):
    monkeypatch.setattr("agentrl.trainer.attention.compiles", lambda device: device.type == "cuda")
    assert kernels_in_words(torch.device("cpu"), torch.bfloat16) is None
    card(9, 0)
    sentence = kernels_in_words(GPU, torch.bfloat16)
    assert sentence.endswith(" FlashAttention-2; flash-attn 3 would be faster on this GPU.")
    assert "SDPA" in kernels_in_words(GPU, torch.float32)
    assert "FlashAttention (bf16 = true" in kernels_in_words(GPU, torch.float32)
    card(8, 0)
    monkeypatch.setattr("agentrl.trainer.attention.compiles", lambda device: False)
    assert kernels_in_words(GPU, torch.bfloat16).endswith("not compiled: install Triton and a C compiler.")
