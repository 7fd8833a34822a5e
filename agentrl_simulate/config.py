"""What a simulation takes for episodes, engine, trainer and their sizes: the table [simulate]."""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

from pydantic import Field, model_validator

from agentrl.config import Count, Section

Size = Annotated[float, Field(gt=0.0)]
Seconds = Annotated[float, Field(ge=0.0)]
Rate = Annotated[float, Field(gt=0.0)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
_Z95 = 1.6448536269514722
"""The 0.95 quantile of the standard normal distribution."""


class Spread(NamedTuple):
    """A lognormal distribution: its median, and its 0.95 quantile. Where the two are equal, a constant."""

    median: float
    p95: float

    @property
    def sigma(self) -> float:
        """The standard deviation of the logarithm."""
        return math.log(self.p95 / self.median) / _Z95 if self.median else 0.0

    @property
    def mean(self) -> float:
        """The mean of the distribution."""
        return self.median * math.exp(self.sigma**2 / 2)


class EpisodesSection(Section):
    """The episodes: lengths and times are lognormal, given by the median and the 0.95 quantile (p95)."""

    turns: Size = 4.0
    """Turns of an episode: the median (count)."""
    turns_p95: Size = 8.0
    """Turns of an episode: p95 (count)."""
    turn_len: Size = 200.0
    """Tokens that the policy samples in a turn: the median (tokens)."""
    turn_len_p95: Size = 600.0
    """Tokens of a turn: p95 (tokens)."""
    prompt_len: Size = 500.0
    """Tokens of the first prompt: the median (tokens)."""
    prompt_len_p95: Size = 1000.0
    """Tokens of the first prompt: p95 (tokens)."""
    reply_len: Size = 200.0
    """Tokens that the environment adds between two turns: the median (tokens)."""
    reply_len_p95: Size = 600.0
    """Tokens that the environment adds: p95 (tokens)."""
    env_s: Seconds = 0.5
    """Time between two turns, in tools and the environment: the median (seconds)."""
    env_s_p95: Seconds = 2.0
    """Time between two turns: p95 (seconds)."""
    sibling_correlation: Ratio = 0.5
    """Share of the variance of turns and lengths (of their logarithm) that is the prompt's, so that siblings
    have it in common."""
    failed_episodes_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of episodes that fail, after a turn at random; they are played again as the run says."""
    filtered_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of groups that the dynamic sampling filter drops, so that others are played for them."""
    idle_ratio: Ratio = 0.0
    """Share of groups without a gradient: they are in the batch, and cost the trainer nothing."""

    @model_validator(mode="after")
    def _quantiles_rise(self) -> EpisodesSection:
        for name in ("turns", "turn_len", "prompt_len", "reply_len", "env_s"):
            median, p95 = getattr(self, name), getattr(self, f"{name}_p95")
            if p95 < median or (median == 0.0 < p95):
                raise ValueError(
                    f"{name}_p95 ({p95:g}) must be at least the median, {name} ({median:g}), which is above "
                    "0 unless both are 0; change one of them."
                )
        return self


class EngineSection(Section):
    """One engine: a server with its GPUs, which decodes its requests together, one token each in a step."""

    engine_gpus: Count = 1
    """GPUs of an engine (count)."""
    engine_slots: Count = 256
    """Requests that an engine decodes at once; others wait for a place (count)."""
    decode_step_s: Seconds = 0.012
    """Duration of a decoding step, without the part that grows with the requests (seconds)."""
    decode_request_s: Seconds = 0.0001
    """What each request adds to the duration of a decoding step (seconds)."""
    prefill_tok_per_s: Rate = 20_000.0
    """Prompt tokens that an engine computes (tokens/s); nothing is decoded meanwhile."""
    cached_sessions: Count | None = None
    """Episodes whose prefix an engine keeps between two turns (count); left out, all of them."""
    request_s: Seconds = 0.005
    """Time of a request outside of the engine: tokens, network (seconds)."""
    standstill_s: Seconds = 1.0
    """Standstill of all engines for new weights (seconds); after it every prefix is computed again."""

    @model_validator(mode="after")
    def _a_token_takes_time(self) -> EngineSection:
        if self.decode_step_s + self.decode_request_s <= 0.0:
            raise ValueError(
                "decode_step_s and decode_request_s are both 0, and a token takes time; set one of them."
            )
        return self


class TrainingSection(Section):
    """The trainer, as it was measured on `trainer_gpus` GPUs."""

    trainer_gpus: Count = 1
    """GPUs that the speeds of this table are of (count)."""
    trainer_scaling: Annotated[float, Field(gt=0.5, le=1.0)] = 0.95
    """Share of the speed of a GPU that is left when their number is doubled (1 = linear)."""
    train_tok_per_s: Rate = 8_000.0
    """Tokens of trained episodes, prompts included, that are trained on (tokens/s)."""
    score_tok_per_s: Rate | None = None
    """Tokens of the pass before the first update, for proximal, reference and teacher logprobs (tokens/s);
    left out, there is no such pass."""
    optimizer_step_s: Seconds = 1.0
    """What each optimizer step takes besides its tokens; it does not shrink with more GPUs (seconds)."""
    publish_s: Seconds = 5.0
    """Duration of an update of the engine's weights, the standstill included (seconds)."""
    between_s: Seconds = 0.5
    """Time between two iterations: journal, metrics, checkpoints (seconds)."""


class SizesSection(Section):
    """How many of each there are, and what they share."""

    rollout_gpus: Count | None = None
    """GPUs that play: engines of engine_gpus each (count); left out, those of one engine."""
    train_gpus: Count = 1
    """GPUs that train (count)."""
    colocate: bool = False
    """Engines and trainer take turns on all GPUs, those that play and those that train."""
    offload_s: Seconds = 5.0
    """Time of a change from playing to training or back, where they take turns (seconds)."""
    turn_cpu_s: Seconds = 0.001
    """Processor time of a turn in the process that plays it (seconds); turns of one process wait for each
    other."""
    play_slowdown: Seconds = 0.0
    """How much longer the engine takes while the trainer works, where they share processors (share of its
    time)."""
    train_slowdown: Seconds = 0.0
    """How much longer the trainer takes while an engine works, where they share processors (share of its
    time)."""

    @property
    def without_effect(self) -> dict[str, str]:
        """The time of a change, where there is none."""
        return {} if self.colocate else {"offload_s": "without colocate; add it"}


class SimulateSection(EpisodesSection, EngineSection, TrainingSection, SizesSection):
    """Everything that a simulation takes besides the settings of the run."""

    iterations: Count = 30
    """Iterations that are simulated, in place of num_rollout (count); those at both ends are not timed."""
    simulation_seed: int = 0
    """Seed of the episodes that are drawn."""

    @property
    def playing_gpus(self) -> int:
        """GPUs that play, derived where it was left out (count)."""
        return self.engine_gpus if self.rollout_gpus is None else self.rollout_gpus

    @property
    def num_engines(self) -> int:
        """Engines (count)."""
        gpus = self.playing_gpus + self.train_gpus if self.colocate else self.playing_gpus
        return gpus // self.engine_gpus

    @property
    def trainer_speedup(self) -> float:
        """How many times as fast as measured the trainer is: each doubling gives 2 x trainer_scaling."""
        gpus = self.playing_gpus + self.train_gpus if self.colocate else self.train_gpus
        doublings = math.log2(gpus / self.trainer_gpus)
        return float((2.0 * self.trainer_scaling) ** doublings)

    @model_validator(mode="after")
    def _an_engine_has_its_gpus(self) -> SimulateSection:
        if not self.num_engines:
            raise ValueError(
                f"rollout_gpus ({self.playing_gpus}) must be at least engine_gpus ({self.engine_gpus}): one "
                "engine needs that many; change one of them."
            )
        return self


class ModelFile(Section):
    """The file of such a table."""

    simulate: SimulateSection = SimulateSection()
