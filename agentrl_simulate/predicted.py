"""The times of a trainer that has not run: by the model behind `agentrl fit`, from a run's settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedConfig

from agentrl.assembly.algorithm import roles_of
from agentrl.assembly.config import RunConfig
from agentrl.assembly.memory import BF16
from agentrl.assembly.speed import EngineSpeed, Work, engine_speed, trainer_speed
from agentrl.types import JSON
from agentrl.weights.hf.source import open_config
from agentrl.weights.hf.tensors import num_parameters
from agentrl_simulate.config import EpisodesSection, Spread

_PUBLISHED_PER_S = 19.2e9
"""Bytes of weights that a trainer sent to a server on the same H200, measured (docs/benchmarks.md)."""
_FIT = "By the model of H100s behind `agentrl fit`"
_DECODE = "By a model of servers on H100s (docs/mixtures-of-experts.md)"
_PUBLISH = "Of weights in bfloat16, at 19.2 GB/s as one small model on an H200 was sent"
_RUN = "Of the run file"


def predicted(config: RunConfig, model: Path, episodes: EpisodesSection) -> Iterator[tuple[str, JSON, str]]:
    """Values of the table [simulate] of a run of the Megatron trainer: name, value, and by what.

    model: its directory, of which config.json is enough. episodes: their mean length counts.

    Raises:
        ModelLoadError: its config makes no sense, or Megatron does not train such models.
    """
    policy, layout, trainer = open_config(model), config.layout, config.trainer
    length = _mean_length(episodes)
    tokens = max(trainer.max_tokens_per_gpu, round(length))
    replicas = layout.data_parallel_size
    rows = config.rollout.episodes_per_step * length / replicas / tokens
    speed = trainer_speed(policy, layout, Work(rows, tokens, length), offloads=trainer.optimizer_cpu_offload)
    yield "train_tok_per_s", replicas * tokens / speed.learn, _FIT
    if passes := _scoring_passes(config):
        yield "score_tok_per_s", replicas * tokens / speed.forward / passes, _FIT
    yield "optimizer_step_s", speed.step, _FIT
    yield "publish_s", BF16 * num_parameters(policy) / _PUBLISHED_PER_S, _PUBLISH
    yield from ((name, value, _RUN) for name, value in _sizes(config).items())
    if config.engine.rollout_num_gpus_per_engine:
        server = _server_speed(config, policy, episodes)
        yield "decode_step_s", server.step, _DECODE
        yield "decode_request_s", server.request, _DECODE
        yield "prefill_tok_per_s", server.prefill, _DECODE


def _server_speed(config: RunConfig, policy: PreTrainedConfig, episodes: EpisodesSection) -> EngineSpeed:
    """Of a server with its share of an iteration's episodes, or of max_slots, where that is less."""
    engine, rollout = config.engine, config.rollout
    samples = rollout.prompts * rollout.n_samples_per_prompt * (1 + rollout.max_staleness)
    requests = min(samples, engine.max_slots) / engine.rollout_num_engines
    gpus = engine.rollout_num_gpus_per_engine
    return engine_speed(policy, gpus, requests, _mean_length(episodes) / 2)


def _mean_length(episodes: EpisodesSection) -> float:
    """Tokens of an episode, all turns together."""
    turns, sampled, prompt, reply = (
        Spread(getattr(episodes, name), getattr(episodes, f"{name}_p95")).mean
        for name in ("turns", "turn_len", "prompt_len", "reply_len")
    )
    return prompt + turns * sampled + max(turns - 1, 0.0) * reply


def _scoring_passes(config: RunConfig) -> int:
    """Forward passes before the first update; other networks are taken to be as large as the policy."""
    algorithm = config.algorithm
    has_teacher = algorithm.use_opd and algorithm.opd.teacher_url is None
    return len(roles_of(algorithm, is_async=config.rollout.is_async)) + has_teacher


def _sizes(config: RunConfig) -> dict[str, JSON]:
    """GPUs and requests; without those of the engine, where it has no GPUs."""
    engine, gpus = config.engine, config.layout.world_size
    own = engine.rollout_num_gpus_per_engine
    sizes: dict[str, JSON] = {"trainer_gpus": gpus, "train_gpus": gpus}
    if own:
        slots = max(engine.max_slots // engine.rollout_num_engines, 1)
        playing = own * engine.rollout_num_engines
        sizes |= {"engine_gpus": own, "engine_slots": slots, "rollout_gpus": playing}
    if own and config.trainer.colocate and gpus > 1:
        # In turns the simulation counts the GPUs of both together.
        sizes |= {"rollout_gpus": gpus // 2, "train_gpus": gpus - gpus // 2, "colocate": True}
    return sizes
