"""The fastest attention that is installed is chosen, named, and given what it asks for."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn.attention import varlen

from agentrl.trainer.megatron.model.kernels import Ends, by_length, fastest

GPU = torch.device("cuda")
LENGTHS = (7, 7, 6, 3, 1)
SCALE = 0.2


def drawn(dtype=torch.float32, device="cpu"):
    """Query, key and value of a row whose heads share keys and values in pairs, and its ends."""
    generator = torch.Generator().manual_seed(3)
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    shapes = [(sum(LENGTHS), heads, 16) for heads in (4, 2, 2)]
    row = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return *row, Ends(bounds.to(device), max(LENGTHS))


def alone(query, key, value, ends, scale):
    """Each sequence by itself, in plain numbers."""
    outputs = []
    for start, stop in pairwise(ends.bounds.tolist()):
        q, k, v = (x[start:stop].transpose(0, 1).double() for x in (query, key, value))
        k, v = (x.repeat_interleave(2, 0) for x in (k, v))
        logits = q @ k.transpose(1, 2) * scale
        hidden = torch.ones(stop - start, stop - start, dtype=torch.bool, device=q.device).triu(1)
        outputs.append((logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


def test_by_length_is_each_sequence_by_itself():
    row = drawn()
    torch.testing.assert_close(by_length(*row, SCALE).double(), alone(*row, SCALE), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float32)])
def test_where_no_kernel_can_do_it_sdpa_does(device, dtype):
    kernel = fastest(torch.device(device), dtype)
    assert kernel.attend is by_length
    assert "SDPA" in kernel.name


def test_torchs_own_is_given_the_sequences(monkeypatch):
    def attend(query, key, value, *ends, scale, window_size, enable_gqa):
        assert (window_size, enable_gqa, ends[2:]) == ((-1, 0), True, (7, 7))
        assert ends[0] is ends[1]
        return alone(query, key, value, Ends(ends[0], 7), scale).to(query.dtype)

    monkeypatch.setattr(varlen, "varlen_attn", attend)
    kernel = fastest(GPU, torch.bfloat16)
    assert kernel.name == f"torch {torch.__version__} varlen_attn"
    row = drawn()
    torch.testing.assert_close(kernel.attend(*row, SCALE), by_length(*row, SCALE), atol=1e-6, rtol=1e-5)


def test_one_that_cannot_share_keys_is_left_alone(monkeypatch):
    def attend(*row, is_causal=False):
        raise AssertionError("it was asked")

    monkeypatch.setattr(varlen, "varlen_attn", attend)
    assert fastest(GPU, torch.bfloat16).attend is by_length


def test_flash_attn_goes_first(monkeypatch, tmp_path):
    (tmp_path / "flash_attn.py").write_text(
        "from tests.trainer.megatron.test_kernels import Ends, alone\n"
        "__version__ = '9.8'\n"
        "def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,\n"
        "                           dropout_p=0.0, softmax_scale=None, causal=False):\n"
        "    assert causal and dropout_p == 0.0 and max_seqlen_q == max_seqlen_k == 7\n"
        "    return alone(q, k, v, Ends(cu_seqlens_q, max_seqlen_q), softmax_scale).to(q.dtype)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    kernel = fastest(GPU, torch.float16)
    assert kernel.name == "flash-attn 9.8"
    row = drawn()
    torch.testing.assert_close(kernel.attend(*row, SCALE), by_length(*row, SCALE), atol=1e-6, rtol=1e-5)
