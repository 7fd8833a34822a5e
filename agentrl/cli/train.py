"""`agentrl train`."""

from __future__ import annotations

import rich_click as click

import agentrl
from agentrl.assembly.config import RunConfig, SftSection
from agentrl.assembly.load import load_run
from agentrl.assembly.ranks import served_as_rank
from agentrl.cli.flags import EngineFlags, config_flags, flag_values
from agentrl.extras import TRAINING, require


@config_flags(RunConfig, without=SftSection.model_fields)
@click.command("train", cls=EngineFlags, context_settings={"show_default": False})
@click.argument("run", required=False, type=click.Path())
@click.option(
    "--resume",
    is_flag=True,
    help="Resume the run of RUN from its last checkpoint; begin it if it has not begun.",
)
@click.option("--quiet", is_flag=True, help="Print nothing but the path of the finished run.")
def train_command(run: str | None, resume: bool, quiet: bool, **flags: str | bool | None) -> None:
    """Train an agent with the settings of RUN, a TOML file; every setting is also a flag, and flags win.

    RUN may be the folder of a run that was stopped or killed: it is resumed from its last checkpoint.

    Arguments of SGLang's own servers are flags, too: --sglang-mem-fraction-static 0.8.

    Under a launcher such as torchrun, which starts it for every rank (trainer = megatron), rank 0 is the run.

    Writes <output_dir>/<name>/: config.toml, metrics.jsonl, TensorBoard events, every episode
    (trajectories/), a Hugging Face model (checkpoint/) and report.html.
    """
    settings = flag_values(flags, RunConfig)
    # An invalid setting is reported at once, not after the seconds that importing torch takes.
    config = load_run(run, settings)
    require("training", *TRAINING)
    if served_as_rank(config):
        return
    result = agentrl.train(run, resume=resume, quiet=quiet, **settings)
    if quiet:
        click.echo(str(result.folder))
