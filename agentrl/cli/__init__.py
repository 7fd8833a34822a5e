"""The command line: a thin caller of the Python API."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import rich_click as click
from click import exceptions

from agentrl.cli.lazy import LazyGroup, Offer
from agentrl.errors import AgentRLError, RecordError, UserError
from agentrl.runtime.extras import missing_extra
from agentrl.runtime.files import is_refused_write
from agentrl.runtime.interrupts import INTERRUPTED, exits_on_signals

__all__ = ["main", "run"]

BAD_INPUT = 2
_STDOUT = 1


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="agentrl", prog_name="agentrl", message="%(prog)s %(version)s")
def cli() -> None:
    """An agent gym on top of an RL engine.

    Train an agent with `agentrl train`, fine-tune a model with `agentrl sft`, score one with `agentrl eval`,
    several on several environments with `agentrl benchmark`, list the environments with `agentrl envs list`,
    the tools that can be added to them with `agentrl tools list`, the graders of answers with `agentrl
    graders list`, and the settings of runs with `agentrl settings`. Record what your own tools do with a
    model by `agentrl gateway`, read what agents did with `agentrl view`, take it to other tools with `agentrl
    export`, and size a run with `agentrl simulate`.
    """


cli.offer(
    {
        "train": Offer("agentrl.cli.train:train_command", "Train an agent with the settings of a run file."),
        "sft": Offer(
            "agentrl.cli.sft:sft_command", "Fine-tune a model on conversations, or on the episodes of a run."
        ),
        "simulate": Offer(
            "agentrl_simulate.command:simulate_command", "Simulate a run: its speed, and who waits for whom."
        ),
        "rollout": Offer(
            "agentrl.cli.train:rollout_command", "Play the batches of a run, and train on nothing."
        ),
        "replay": Offer(
            "agentrl.cli.replay:replay_command", "Play the recorded actions of an episode again."
        ),
        "eval": Offer("agentrl.cli.evaluate:evaluate_command", "Score a model on an environment."),
        "benchmark": Offer("agentrl.cli.benchmark:benchmark", "Score many policies on many environments."),
        "rescore": Offer(
            "agentrl.cli.rescore:rescore_command", "Score saved episodes by other rewards, and compare."
        ),
        "convert": Offer(
            "agentrl.cli.convert:convert_command",
            "Turn adapters, GGUF files and checkpoints of Megatron into model directories, and back.",
        ),
        "data": Offer("agentrl.cli.data:data", "Check and count files of prompts."),
        "envs": Offer(
            "agentrl.cli.envs:envs", "The environments that are installed: list, show, check, make new ones."
        ),
        "export": Offer(
            "agentrl.cli.formats:export_command", "Write episodes in the formats of other tools."
        ),
        "import": Offer(
            "agentrl.cli.formats:import_command", "Read trajectories of other tools into a journal."
        ),
        "numerics": Offer(
            "agentrl.cli.numerics:numerics_command",
            "Tell how far the trainer's logprobs are from those of the engine.",
        ),
        "fit": Offer(
            "agentrl.cli.fit:fit_command",
            "Tell what of a model fits on GPUs: memory by part, and the longest row.",
        ),
        "graders": Offer("agentrl.cli.graders:graders", "The graders that a run can name."),
        "plot": Offer("agentrl.cli.plot:plot_command", "Draw the curves of runs."),
        "recipes": Offer(
            "agentrl.cli.recipes:recipes",
            "Run files for published models, on machines with GPUs.",
        ),
        "runs": Offer(
            "agentrl.cli.runs:runs", "The runs of a folder: list, show, watch, audit, resume, compare, clean."
        ),
        "gateway": Offer(
            "agentrl.cli.gateway:gateway_command", "Serve a model to tools, and record what they do with it."
        ),
        "serve": Offer("agentrl.cli.serve:serve_command", "Serve a model over HTTP."),
        "serve-env": Offer(
            "agentrl.cli.serve_env:serve_env_command", "Serve an environment over HTTP, as OpenEnv does."
        ),
        "serve-search": Offer(
            "agentrl.cli.serve_search:serve_search_command", "Serve passages over HTTP, as Search-R1 does."
        ),
        "settings": Offer("agentrl.cli.settings:settings_command", "Search the settings of runs."),
        "tools": Offer("agentrl.cli.tools:tools", "The tools that a run can offer by name."),
        "view": Offer(
            "agentrl.cli.view:view_command", "Write pages of episodes, to search and read in a browser."
        ),
    }
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Bad input is one sentence on stderr and exit code 2."""
    # A custom environment is named `module:Class`; the current folder comes first in the import path, as for
    # `python -m`.
    sys.path.insert(0, "")
    run(cli, arguments, name="agentrl")


def run(command: click.Command, arguments: Sequence[str] | None, *, name: str) -> None:
    """Run a command line under a name; end the process with its exit code.

    Bad input, and a disk that is full or read-only, is one sentence on stderr and exit code 2, any other
    error of agentrl exit code 1; after Ctrl-C it is 130, after SIGTERM 143, after SIGHUP 129.
    """
    try:
        with exits_on_signals():
            command.main(args=arguments, prog_name=name, standalone_mode=False)
    except (exceptions.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(BAD_INPUT)
    except exceptions.ClickException as error:
        _exit_with_error(error.format_message())
    except RecordError as error:
        _exit_with_error(f"{error}; restore that file, or remove it.")
    except UserError as error:
        _exit_with_error(str(error))
    except ModuleNotFoundError as error:
        # A dependency that was not checked before: of a user's own loss that imports torch, for example.
        missing = missing_extra(error)
        if missing is None:
            raise
        _exit_with_error(str(missing))
    except OSError as error:
        if not is_refused_write(error):
            raise
        _discard_output()
        place = error.filename or "the output"
        _exit_with_error(
            f"{place} cannot be written ({error.strerror}); make room there, or make it writable."
        )
    except AgentRLError as error:
        click.echo(f"agentrl: {error}", err=True)
        sys.exit(1)


def _discard_output() -> None:
    """Discard what standard output still holds: a full disk would refuse it again when the process ends."""
    with suppress(OSError), open(os.devnull, "wb") as discarding:
        os.dup2(discarding.fileno(), _STDOUT)


def _exit_with_error(sentence: str) -> None:
    click.echo(f"agentrl: {sentence}", err=True)
    sys.exit(BAD_INPUT)
