"""Log-probabilities of the same sampled tokens: SGLang, Megatron, transformers in fp32 and in bf16."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from torch import nn

from agentrl.engine.sglang import SGLangPolicy
from agentrl.types import JSON, Completion, FloatArray, RolloutId, Sample
from agentrl.types.seams import Sampling
from benchmarks.gpu import card
from benchmarks.gpu.job import Bench
from benchmarks.gpu.ranks import Ranks
from benchmarks.gpu.server import url_of
from benchmarks.gpu.shapes import Shape, model_folder, shape_of

_ROWS = 4096
_PROMPTS = 16
_NEW, _TINY_NEW = 128, 8
_EXACT = "transformers fp32"


async def run(bench: Bench) -> None:
    """A row for each pair of sides."""
    spec = bench.spec
    ranks = Ranks(1, bench.folder)
    turn = bench.turn()
    shape = shape_of(spec.shape, tiny=spec.tiny)
    model = model_folder(bench.folder, shape, spec.device)
    bf16 = "bf16" if spec.device == "cuda" else "fp32"
    samples, repeats = await _sampled(url_of(turn, shape.name), shape, _TINY_NEW if spec.tiny else _NEW)
    sides = {f"sglang {bf16}": _of_loss_tokens([sample.logprobs for sample in samples], samples)}
    async with ranks.training(model, rows=_ROWS, bf16=spec.device == "cuda") as trainer:
        attention = ranks.attention
        scores = await trainer.score(samples, ("old",))
        sides[f"megatron {bf16}"] = _of_loss_tokens(scores.proximal, samples)
    for name, dtype in ((_EXACT, torch.float32), ("transformers bf16", torch.bfloat16)):
        sides[name] = _of_loss_tokens(_by_transformers(model, samples, dtype, spec.device), samples)
    tokens = len(sides[_EXACT])
    facts: dict[str, JSON] = {"tokens": tokens, "attention": attention, "same_when_repeated": repeats}
    for first, second in combinations(sides, 2):
        apart = np.abs(sides[first] - sides[second])
        mean, largest = float(apart.mean()), float(apart.max())
        line = f"mean {mean:.4f}, largest {largest:.3f} over {tokens} tokens"
        figures = {**facts, "mean_abs": mean, "max_abs": largest}
        bench.row(f"{first} - {second}", line, figures, {"mean_abs_less": mean})


async def _sampled(url: str, shape: Shape, new: int) -> tuple[list[Sample], str]:
    """What a server samples, with its logprobs; how many requests gave the same tokens when repeated."""
    policy = SGLangPolicy(url, max_concurrency=64, vocab_size=shape.vocab)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, shape.vocab, int(n)).tolist() for n in rng.integers(32, 200, _PROMPTS)]

    async def completions(name: str) -> list[Completion]:
        jobs = (
            policy.generate(prompt, Sampling(new, seed=number), session=f"{name}{number}")
            for number, prompt in enumerate(prompts)
        )
        return list(await asyncio.gather(*jobs))

    try:
        done, again = await completions("a"), await completions("b")
    finally:
        await policy.close()
    same = sum(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(done, again, strict=True))
    samples = [_sample(prompt, completion) for prompt, completion in zip(prompts, done, strict=True)]
    return samples, f"{same} of {len(done)}"


def _sample(prompt: Sequence[int], completion: Completion) -> Sample:
    ids = np.array([*prompt, *completion.token_ids.tolist()], np.int32)
    mask = np.arange(len(ids)) >= len(prompt)
    logprobs = np.zeros(len(ids), np.float32)
    logprobs[len(prompt) :] = completion.logprobs
    return Sample(
        token_ids=ids,
        author=mask.astype(np.int8),
        loss_mask=mask,
        logprobs=logprobs,
        versions=np.where(mask, 0, -1).astype(np.int32),
        turns=np.zeros(len(ids), np.int32),
        temperatures=np.ones(len(ids), np.float32),
        rollout_id=RolloutId("agree"),
    )


def _by_transformers(
    model: Path, samples: Sequence[Sample], dtype: torch.dtype, device: str
) -> list[FloatArray]:
    """The logprobs of every token of each sample, one sample at a time; 0 of the first."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False, dtype=dtype)
    nn.Module.to(network, device).eval()
    out: list[FloatArray] = []
    with torch.no_grad():
        for sample in samples:
            ids = torch.from_numpy(sample.token_ids.astype(np.int64)).to(device)
            logits = network(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
            logprobs = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
            out.append(np.concatenate([[0.0], logprobs.cpu().numpy()]).astype(np.float32))
    del network
    card.empty()
    return out


def _of_loss_tokens(arrays: Sequence[FloatArray], samples: Sequence[Sample]) -> FloatArray:
    chosen = [array[sample.loss_mask] for array, sample in zip(arrays, samples, strict=True)]
    return np.concatenate(chosen).astype(np.float32)
