"""`agentrl sft`."""

from __future__ import annotations

from typing import cast

import rich_click as click

import agentrl
from agentrl.assembly.config import SFT_SETTINGS, RunConfig, SftConfig
from agentrl.assembly.keywords import SftSettings
from agentrl.assembly.load import load_run
from agentrl.cli.flags import config_flags, flag_values
from agentrl.cli.sections import SettingsCommand
from agentrl.cli.train import resumed_from, step_option
from agentrl.config import leaves, spellings
from agentrl.runtime.extras import TRAINING, require

_WITHOUT = {name for name in leaves(RunConfig) if name not in SFT_SETTINGS} | {
    name for name, (section, _) in spellings(RunConfig).items() if section != "rendering"
}


@config_flags(SftConfig, without=_WITHOUT)
@click.command("sft", cls=SettingsCommand, context_settings={"show_default": False})
@click.argument("run", required=False, type=click.Path())
@click.option(
    "--resume",
    is_flag=True,
    help="Resume the run of RUN from its last checkpoint; begin it if it has not begun.",
)
@step_option
@click.option("--quiet", is_flag=True, help="Print nothing but the path of the finished run.")
def sft_command(
    run: str | None, resume: bool, step: int | None, quiet: bool, **flags: str | bool | None
) -> None:
    """Fine-tune a model on conversations, or on the episodes of a run, with the settings of RUN (TOML).

    RUN may be the run file of `agentrl train`, which then starts from the result: --hf-checkpoint
    runs/NAME-sft/checkpoint. With its environment, a conversation has the tokens that an episode of the same
    messages has. RUN may also be the folder of a run that was stopped or killed.

    Writes <output_dir>/<name>-sft/: config.toml, metrics.jsonl, TensorBoard events, a Hugging Face model
    (checkpoint/) and report.html.
    """
    settings = flag_values(flags, SftConfig)
    # An invalid setting is reported at once, not after the seconds that importing torch takes.
    load_run(run, settings, SftConfig)
    require("fine-tuning", *TRAINING)
    resumed = resumed_from(resume, step)
    result = agentrl.sft(run, resume=resumed, quiet=quiet, **cast(SftSettings, settings))
    if quiet:
        click.echo(str(result.folder))
