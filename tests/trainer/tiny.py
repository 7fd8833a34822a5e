"""Models, batches and gradients as small as a test needs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentrl.losses import Loss, PolicyLoss
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.torch import AuxiliaryModels, TorchTrainer
from agentrl.types import Credit, RolloutId, Sample, Scores, TrainBatch

VOCAB = 13
POLICY_LOSS = PolicyLoss()
POLICY_LOSS = PolicyLoss()
NO_MODELS = AuxiliaryModels()
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def qwen3(dtype: torch.dtype = torch.float64, *, tied: bool = True) -> PreTrainedModel:
    torch.manual_seed(1)
    return widened(Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=tied)), dtype)


def qwen2(dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    torch.manual_seed(3)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.2)
    return widened(model, dtype)


def llama(dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    torch.manual_seed(2)
    return widened(LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)), dtype)


def widened(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Fresh weights are so small that attention hardly matters; larger ones let a mistake show."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(10)
    return model.to(dtype).eval()


def sample(
    rng: np.random.Generator, mask: Sequence[int], name: str = "s", temperature: float = 1.0
) -> Sample:
    loss_mask = np.array(mask, dtype=bool)
    number = len(loss_mask)
    return Sample(
        token_ids=rng.integers(0, VOCAB, number).astype(np.int32),
        author=loss_mask.astype(np.int8),
        loss_mask=loss_mask,
        logprobs=np.where(loss_mask, rng.normal(-2.5, 0.3, number), 0).astype(np.float32),
        versions=np.where(loss_mask, 0, -1).astype(np.int32),
        turns=np.zeros(number, dtype=np.int32),
        temperatures=np.full(number, temperature, dtype=np.float32),
        rollout_id=RolloutId(name),
    )


def divisor(sample: Sample) -> torch.Tensor:
    """What divides the logits at each place [T, 1]: the temperature of the token that they predict."""
    return torch.from_numpy(np.append(sample.temperatures[1:], np.float32(1)))[:, None]


def reference_gradient(
    model: PreTrainedModel, train_batch: TrainBatch, *, imitation: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    """Every sequence through the model alone, every token in a loop, the surrogate as written in books."""
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for index, sample in enumerate(train_batch.samples):
        ids = torch.tensor(sample.token_ids.tolist())
        logits = model(input_ids=ids[None], use_cache=False).logits[0] / divisor(sample)
        for t in range(1, len(ids)):
            if not sample.loss_mask[t]:
                continue
            logp = logits[t - 1, ids[t]] - logits[t - 1].logsumexp(0)
            weight = float(train_batch.credit.weights[index][t])
            advantage = float(train_batch.credit.advantages[index][t])
            ratio = (logp - float(train_batch.scores.proximal[index][t])).exp()
            surrogate = torch.minimum(advantage * ratio, advantage * ratio.clip(0.8, 1.28))
            total = total - weight * (logp if imitation else surrogate)
    total.backward()
    gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return float(total.detach()), gradient


# The last token, the first that may be, one only, all, none, one token in all, and long among short.
MASKS = (
    [0, 0, 0, 1],
    [0, 1, 0, 0, 0],
    [0, 1],
    [0, 1, 1, 1, 1, 1],
    [0, 0, 0],
    [0],
    [0, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 1, 0],
    [0, 0, 1, 1, 0, 1],
)


def batch(seed: int = 0, masks: Sequence[Sequence[int]] = MASKS) -> TrainBatch:
    """Random tokens, advantages and weights; temperatures 0.7, 1.0 and 1.3 in turn."""
    rng = np.random.default_rng(seed)
    samples = tuple(sample(rng, mask, f"s{i}", (0.7, 1.0, 1.3)[i % 3]) for i, mask in enumerate(masks))
    advantages = tuple((s.loss_mask * rng.normal(size=len(s))).astype(np.float32) for s in samples)
    weights = tuple((s.loss_mask * rng.uniform(0.01, 0.1, len(s))).astype(np.float32) for s in samples)
    return TrainBatch(samples, Scores(tuple(s.logprobs for s in samples)), Credit(advantages, weights))


def siblings() -> TrainBatch:
    """Two groups of three under one system prompt of 3 tokens, with 4 more of each group; the answers are of
    unlike lengths, and two of the first group begin with the same 2 tokens."""
    made = batch(1, [[0] * 7 + [1] * number for number in (2, 5, 5, 3, 7, 4)])
    ids = [one.token_ids.copy() for one in made.samples]
    for source, length, targets in ((0, 3, range(1, 6)), (0, 7, (1, 2)), (3, 7, (4, 5)), (1, 9, (2,))):
        for target in targets:
            ids[target][:length] = ids[source][:length]
    samples = tuple(replace(one, token_ids=own) for one, own in zip(made.samples, ids, strict=True))
    return replace(made, samples=samples)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(VOCAB)}
    split = Tokenizer(WordLevel(words, unk_token="w0"))
    split.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=split)


def trainer(
    model: PreTrainedModel,
    loss: Loss = POLICY_LOSS,
    *,
    total_steps: int = 100,
    auxiliary: AuxiliaryModels = NO_MODELS,
    **changes: str | float | int | bool | None,
) -> TorchTrainer:
    return TorchTrainer(
        model, loss, settings(**changes), tokenizer=tokenizer(), total_steps=total_steps, auxiliary=auxiliary
    )


def settings(**changes: str | float | int | bool | None) -> TrainerConfig:
    """No warm-up, and no bound on the gradient."""
    return TrainerConfig.model_validate({"clip_grad": 1e9, "lr_warmup_iters": 0, **changes})


@contextmanager
def gradients_of(model: PreTrainedModel) -> Iterator[dict[str, torch.Tensor]]:
    """Collect what the optimizers are given for each weight, by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    gradients: dict[str, torch.Tensor] = {}

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            gradients.update({names[id(p)]: p.grad.clone() for p in group["params"]})

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield gradients
    finally:
        handle.remove()
