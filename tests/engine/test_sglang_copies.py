"""The loader inside SGLang repeats the copies of the first version, where that is all that loading is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from agentrl.engine.sglang.inside.agentrl_sglang import copies, memory
from agentrl.engine.sglang.transports.cuda_ipc import request_of
from tests.engine.devices import packed_of
from tests.engine.scheduling import Layered, checkpoint
from tests.engine.test_sglang_inside import call


class Counting(Layered):
    """calls: of `load_weights`. also: called with each tensor, after it was loaded."""

    def __init__(self, dtype: torch.dtype = torch.float32, also: Callable[..., object] | None = None) -> None:
        super().__init__(dtype)
        self.calls, self.also = 0, also
        self.register_buffer("derived", torch.zeros(4, 4))
        self.twice: torch.Tensor | None = None

    def load_weights(self, weights) -> None:
        self.calls += 1
        for name, tensor in weights:
            super().load_weights([(name, tensor)])
            if self.also is not None and name == "layer.v_proj.weight":
                self.also(self, tensor)


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return tensors | ({} if model.twice is None else {"twice": model.twice.clone()})


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def sent(folder: Path, model: Counting, seed: int, whole: bool = True) -> None:
    packed = packed_of(checkpoint(seed))
    request = request_of(packed.weights, is_whole=whole)
    assert call(folder, model, **request)["error"] is None


def loaded(seed: int, **how) -> dict[str, torch.Tensor]:
    """What `load_weights` itself makes of a version."""
    model = Counting(**how)
    model.load_weights(checkpoint(seed))
    return state_of(model)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_near", [True, False])
def test_later_versions_are_the_copies_of_the_first(tmp_path, monkeypatch, whole, dtype, is_near):
    if not is_near:
        monkeypatch.setattr(memory, "_mapped_memory", far(memory._mapped_memory))
    model = Counting(dtype)
    for seed in range(1, 5):
        sent(tmp_path, model, seed, whole)
        assert same(state_of(model), loaded(seed, dtype=dtype))
        assert model.calls == 1


@pytest.mark.parametrize("group_bytes", [1, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_copied_is_compared_bit_for_bit(tmp_path, monkeypatch, group_bytes, dtype):
    monkeypatch.setattr(copies, "_GROUP_BYTES", group_bytes)
    model, plain = Counting(dtype), torch._foreach_copy_
    sent(tmp_path, model, 1)
    packed = packed_of(checkpoint(2))
    request = request_of(packed.weights, is_whole=True)
    names = [name for name, _ in checkpoint(1)]
    places = [model.layer.slice_of(name.removeprefix("layer.")) for name in names]
    for name, place in zip(names, places, strict=True):

        def damaging(targets, sources, place=place):
            plain(targets, sources)
            for target in targets:
                if target.data_ptr() == place.data_ptr():
                    # Of a zero, only the sign.
                    target.view(-1)[:1].view(torch.uint8)[-1] ^= 0x80

        monkeypatch.setattr(torch, "_foreach_copy_", damaging)
        assert "the model holds other weights" in call(tmp_path, model, **request)["error"], name
        monkeypatch.setattr(torch, "_foreach_copy_", plain)
    assert call(tmp_path, model, **request)["error"] is None
    assert (model.calls, same(state_of(model), loaded(2, dtype=dtype))) == (1, True)


def far(mapped):
    """The memory of another card: every part is copied, here into memory that the next one reuses."""

    class Far:
        def __init__(self, *args) -> None:
            self._mapped = mapped(*args)

        def __enter__(self):
            return self._mapped.__enter__()[0], False

        def __exit__(self, *error):
            return self._mapped.__exit__(*error)

    return Far


def plus_one(model: Counting, tensor: torch.Tensor) -> None:
    """As the norms of Gemma."""
    torch.add(tensor[:2].repeat(2, 1), 1, out=model.derived)


def assigned(model: Counting, tensor: torch.Tensor) -> None:
    model.twice = 2 * tensor


def by_number(model: Counting, tensor: torch.Tensor) -> None:
    model.derived.fill_(tensor[0, 0].item())


def converted(model: Counting, tensor: torch.Tensor) -> None:
    model.derived[:2].copy_(tensor.to(torch.float64))


def increased(model: Counting, tensor: torch.Tensor) -> None:
    model.layer.embed_tokens.weight.data[0].add_(tensor[0].mean())


def broadcast(model: Counting, tensor: torch.Tensor) -> None:
    model.derived.copy_(tensor[0])


def overwritten(model: Counting, tensor: torch.Tensor) -> None:
    model.derived[:2].copy_(tensor)
    model.derived[1:3].copy_(tensor)


def overwritten_by_zeros(model: Counting, tensor: torch.Tensor) -> None:
    model.derived[:2].copy_(tensor)
    model.derived[1].zero_()


@pytest.mark.parametrize(
    "also",
    [plus_one, assigned, by_number, converted, increased, broadcast, overwritten, overwritten_by_zeros],
)
def test_where_loading_is_more_than_copies_every_version_is_loaded(tmp_path, also):
    model = Counting(also=also)
    for seed in range(1, 4):
        # A loader that changes its own parameters is another one than was sent: no tensor is compared.
        sent(tmp_path, model, seed, whole=also is not increased)
        assert same(state_of(model), loaded(seed, also=also)), seed
        assert model.calls == seed


def strided(model: Counting, tensor: torch.Tensor) -> None:
    model.derived[:, :2].copy_(tensor.t())


def padded(model: Counting, tensor: torch.Tensor) -> None:
    model.derived[:2].copy_(tensor)
    model.derived[2:].fill_(0)


@pytest.mark.parametrize("also", [strided, padded])
def test_transposed_copies_and_zeros_beside_them_are_repeated(tmp_path, also):
    model = Counting(also=also)
    for seed in range(1, 4):
        sent(tmp_path, model, seed)
        assert same(state_of(model), loaded(seed, also=also))
        assert model.calls == 1


def test_a_model_that_has_moved_or_another_layout_is_loaded(tmp_path):
    model = Counting()
    sent(tmp_path, model, 1)
    weight = model.layer.embed_tokens.weight
    weight.data = weight.data.clone()
    sent(tmp_path, model, 2)
    assert (model.calls, same(state_of(model), loaded(2))) == (2, True)
    packed = packed_of(checkpoint(3), bucket_bytes=60)
    assert call(tmp_path, model, **request_of(packed.weights, is_whole=True))["error"] is None
    assert (model.calls, same(state_of(model), loaded(3))) == (3, True)
    sent(tmp_path, model, 4)
    assert (model.calls, same(state_of(model), loaded(4))) == (4, True)


def test_a_version_that_was_refused_teaches_nothing(tmp_path):
    model = Counting(also=lambda self, tensor: self.layer.qkv_proj.weight.data[0].copy_(tensor[0]))
    packed = packed_of(checkpoint(1))
    for calls in (1, 2):
        reply = call(tmp_path, model, **request_of(packed.weights, is_whole=True))
        assert "holds another layer.q_proj.weight" in reply["error"]
        assert model.calls == calls
    good = Counting()
    sent(tmp_path, good, 1)
    packed = packed_of(checkpoint(2))
    request = request_of(packed.weights, is_whole=True)
    packed.memory.bytes_B[packed.weights.parts[2].start] ^= 1
    assert "other bytes than was sent" in call(tmp_path, good, **request)["error"]
    sent(tmp_path, good, 3)
    assert (good.calls, same(state_of(good), loaded(3))) == (1, True)


@pytest.mark.parametrize(("dtype", "reads"), [(torch.float32, 0), (torch.bfloat16, 1)])
def test_sources_that_lie_end_to_end_are_compared_where_they_are(dtype, reads):
    model, sizes = torch.nn.ModuleList(torch.nn.Linear(n, n, dtype=dtype) for n in (2, 3, 4)), (4, 9, 16)
    starts = [5, 9, 18]
    targets = [layer.weight.data for layer in model]
    sources = [copies._Copy(t, torch.float32, at, t.stride()) for t, at in zip(targets, starts, strict=True)]
    group, numbers = copies._Group(sources[::-1]), torch.randn(40)
    joined = []
    with pytest.MonkeyPatch.context() as patch:
        plain = torch.cat
        patch.setattr(torch, "cat", lambda tensors: joined.append(1) or plain(tensors))
        assert not group.repeat(numbers.view(torch.uint8))
    assert len(joined) == 1 + reads
    for target, at, size in zip(targets, starts, sizes, strict=True):
        assert torch.equal(target.view(-1), numbers[at : at + size].to(dtype))
