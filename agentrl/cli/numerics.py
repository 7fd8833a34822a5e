"""`agentrl numerics`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import rich_click as click
from rich import box
from rich.console import Console
from rich.table import Table

from agentrl.assembly.arguments import plain_settings
from agentrl.assembly.config import OpenRunConfig
from agentrl.assembly.keywords import TrainSettings
from agentrl.assembly.needed import checked_run
from agentrl.assembly.sections import OF_SFT
from agentrl.assembly.trust import CONFIG
from agentrl.cli.flags import EngineFlags, config_flags, flag_values
from agentrl.errors import ConfigError, UserError
from agentrl.runtime.extras import TRAINING, require
from agentrl.runtime.temporary import temporary_folder
from agentrl.types import JSON, Sample
from agentrl.weights.hf.folders import holds_model, model_remedy

# The trainer scores the whole batch before the first of two steps, neither of which is made.
_FIXED = TrainSettings(num_rollout=1, use_rollout_logprobs=False, num_steps_per_rollout=2)
# Only with such a term has a group whose rewards are equal a gradient, and so a pass of the trainer.
_USUAL = TrainSettings(entropy_coef=1e-3)
# What a model plays without a run file: messages alone, which every chat template renders, in several turns,
# so that tokens are at many depths.
_OF_MODEL = TrainSettings(
    env="Wordle-v0",
    dialect="chat",
    rollout_batch_size=4,
    n_samples_per_prompt=4,
    rollout_max_response_len=512,
    rollout_max_context_len=4096,
)
_OWN = (*_FIXED, *TrainSettings(output_dir="", name="", debug_rollout_only=False), "replay")
_QUANTILES = (0.5, 0.99)


@config_flags(OpenRunConfig, without=(*OF_SFT, *_OWN, "load_debug_rollout_data"))
@click.command("numerics", cls=EngineFlags, context_settings={"show_default": False})
@click.argument("run", required=False, type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def numerics_command(run: str | None, as_json: bool, **flags: str | bool | None) -> None:
    """Tell how far the trainer's logprobs are from those that the engine has sampled with.

    One batch is played and scored with the settings of RUN, a TOML file, or of flags; nothing is trained, and
    no folder stays. RUN may also be the Hugging Face directory of a chat model, which then plays 16 episodes
    of Wordle-v0; flags change that, too. Try it before a run with another engine, trainer, layout, dtype or
    kernel:

        agentrl numerics run.toml --engine sglang --trainer megatron
        agentrl numerics models/Qwen3-0.6B --engine sglang --trainer megatron

    In fp32 on a CPU differences are about 1e-6, in bfloat16 about 0.01, of mixtures of experts more, unless
    their routing is replayed. Where they rise with depth, the two place tokens differently.

    The rows, over the tokens that the policy sampled, d = engine's logprob - trainer's (nats):

    \b
    tokens                 how many there are
    equal                  share of them with d = 0
    median, p99, largest   quantiles of |d|, and the largest
    logprob_abs_diff       mean of |d|
    kl                     mean of d, which estimates KL(engine, trainer)
    kl_k3                  mean of exp(-d) - 1 + d: the same, never below 0
    ppl_ratio              trainer's perplexity over the engine's
    ess                    share of tokens that count, weighted by exp(-d)
    max_ratio              the largest exp(-d)
    depth_N/k3             kl_k3 of tokens with N or more before them
    """
    require("comparing engine and trainer", *TRAINING)
    run, of_model = _run_or_model(run, flag_values(flags, OpenRunConfig))
    given = {**_USUAL, **of_model, **_FIXED}
    with temporary_folder("numerics") as folder:
        settings = plain_settings({**given, **TrainSettings(output_dir=str(folder), name="numerics")})
        checked_run(run, settings, OpenRunConfig)
        if not as_json:
            click.echo("Starting the engine, playing one batch and scoring it with the trainer ...", err=True)
        report = asyncio.run(_measured(run, settings))
    if as_json:
        click.echo(json.dumps(report))
        return
    _show(report)


def _run_or_model(run: str | None, flags: Mapping[str, JSON]) -> tuple[str | None, Mapping[str, object]]:
    """RUN where it is one, and the settings: the flags, and those of a model where RUN is its directory.

    Raises:
        ConfigError: it is a folder with neither, or none at all; or hf_checkpoint names another model.
    """
    folder = Path(run or "")
    is_missing = not folder.exists() and folder.suffix != ".toml" and len(folder.parts) > 1
    if run is None or (folder / CONFIG).exists() or not (folder.is_dir() or is_missing):
        return run, flags
    if not holds_model(folder):
        lacks = f"has neither {CONFIG}, of a run, nor config.json, of a model"
        raise ConfigError(f"{run} {'does not exist' if is_missing else lacks}; {model_remedy(folder)}.")
    own = TrainSettings(hf_checkpoint=run)
    if own.keys() & flags.keys():
        raise ConfigError(f"{run} is a model, and hf_checkpoint names one, too; drop one of them.")
    return None, {**_OF_MODEL, **own, **flags}


async def _measured(run: str | None, settings: Mapping[str, JSON]) -> dict[str, JSON]:
    """The differences of a batch.

    Raises:
        UserError: it has no token that the policy sampled.
    """
    from agentrl.algorithms.off_policy import mismatch_by_depth, mismatch_metrics
    from agentrl.algorithms.tokens import Tokens
    from agentrl.run.open_run import open_run
    from agentrl.types import Scores

    async with open_run(run, settings, resume=False, quiet=True) as opened:
        batch = await opened.credit(await opened.play())
    samples: list[Sample] = []
    proximal: list[np.ndarray[tuple[int], np.dtype[np.float32]]] = []
    for step in batch.steps:
        samples += step.batch.samples
        proximal += step.batch.scores.proximal
    tokens = Tokens.of(samples)
    if not len(tokens):
        raise UserError("no episode of the batch has a token to compare; play more, or longer ones.")
    scores = tokens.scores(Scores(tuple(proximal)))
    differences_N = np.abs(scores.proximal_N - scores.behaviour_N)
    median, high = np.quantile(differences_N, _QUANTILES).tolist()
    return {
        "tokens": len(tokens),
        "equal": float((differences_N == 0).mean()),
        "median": median,
        "p99": high,
        "largest": float(differences_N.max()),
        **{name.removeprefix("train_rollout_"): n for name, n in mismatch_metrics(tokens, scores).items()},
        **mismatch_by_depth(tokens, scores),
    }


def _show(report: Mapping[str, JSON]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for name, value in report.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:.3g}")
    console = Console(highlight=False)
    console.print("|trainer's logprob - engine's|, and the KL between them (nats)")
    console.print(table)
