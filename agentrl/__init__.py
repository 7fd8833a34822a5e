"""agentrl: an agent gym on top of an RL engine.

This module exports the public API. `train` imports torch when it is called, and `evaluate` when it loads a
model, so that `import agentrl` is fast and works without torch for authors of environments.

`train`, `sft`, `evaluate` and `check_env` work anywhere, also in a cell of a notebook, whose event loop runs
already. Their twins with `_async` in their names are for coroutines, and leave the event loop free.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module, metadata
from os import PathLike
from typing import TYPE_CHECKING

from agentrl.envs import (
    Chat,
    Env,
    GroupReward,
    MultiAgentEnv,
    PettingZooEnv,
    Reward,
    Script,
    ScriptedAgent,
    SingleTurnEnv,
    Tags,
    ToolEnv,
    env_ids,
    exact_match,
    make,
    play,
    register,
)
from agentrl.envs.check import check_env
from agentrl.envs.gym import GymEnv
from agentrl.envs.registry import register_all_with_gymnasium
from agentrl.errors import AgentRLError, ToolRejected, UserError
from agentrl.runtime.event_loop import awaited, blocking
from agentrl.runtime.extras import TRAINING, require
from agentrl.tools import tool
from agentrl.types import (
    Episode,
    Image,
    JointStep,
    Limits,
    Message,
    Step,
    Task,
    Text,
    ToolCall,
    Verdict,
    call,
    say,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Unpack

    from agentrl.assembly.keywords import EvalSettings, SftSettings, TrainSettings
    from agentrl.evaluation.report import EvalReport
    from agentrl.run import TrainResult
    from agentrl.run.open_run import OpenRun
    from agentrl.run.sft import SftResult

__all__ = [
    "AgentRLError",
    "Chat",
    "Env",
    "Episode",
    "GroupReward",
    "GymEnv",
    "Image",
    "JointStep",
    "Limits",
    "Message",
    "MultiAgentEnv",
    "PettingZooEnv",
    "Reward",
    "Script",
    "ScriptedAgent",
    "SingleTurnEnv",
    "Step",
    "Tags",
    "Task",
    "Text",
    "ToolCall",
    "ToolEnv",
    "ToolRejected",
    "UserError",
    "Verdict",
    "call",
    "check_env",
    "env_ids",
    "evaluate",
    "evaluate_async",
    "exact_match",
    "make",
    "open_run",
    "play",
    "register",
    "say",
    "sft",
    "sft_async",
    "tool",
    "train",
    "train_async",
]

_RESULTS = {
    "EvalReport": "agentrl.evaluation.report",
    "OpenRun": "agentrl.run.open_run",
    "SftResult": "agentrl.run.sft",
    "TrainResult": "agentrl.run",
}
"""By name, where the classes of results are: their modules take a second to import, some load torch."""
_PACKAGES = ("envs", "errors", "records", "tools", "types")
"""What authors import from, besides this module."""

register_all_with_gymnasium()
# In a notebook without ipywidgets, tqdm would say so in a red box as soon as torch's companions load it.
warnings.filterwarnings("ignore", message="IProgress not found")


def train(
    run: str | PathLike[str] | None = None,
    *,
    resume: bool | int = False,
    quiet: bool = False,
    **settings: Unpack[TrainSettings],
) -> TrainResult:
    """Train an agent with the settings of a run file (TOML); `settings` override them by their leaf names.

        agentrl.train("examples/calculator/run.toml", seed=1)
        agentrl.train(env="Capitals-v0", warm_start_steps=100, num_rollout=20)
        agentrl.train(env=Capitals, env_kwargs={"seed": 3}, num_rollout=20)
        agentrl.train(env="SingleTurn-v0", prompt_data=[{"input": "2 + 2?"}], reward=my_reward)

        agentrl.train("runs/first", resume=True)

    Ctrl-C, or the "interrupt" of a notebook, stops it cleanly: the weights of the last finished step and the
    journal are complete. It works where an event loop runs; `train_async` does not block that.

    Args:
        run: the run file, or the folder of a run that is resumed.
        resume: whether the run of a run file is resumed, where its folder holds one. A number: a run goes
            on after that step, from a checkpoint that it has kept; what came later is put aside.
        quiet: whether nothing is printed.
        settings: by their leaf names. `env` is an id, or the class of an environment. Where a setting names a
            function, pass the name or the function; where it names files of rows, paths or the rows, such as
            a list or a dataset. Classes and functions are recorded as `module:name`, rows in a file below
            `data` in output_dir.

    Raises:
        UserError: a setting, the environment or the model is wrong; the message has the remedy.
        KeyboardInterrupt: it was interrupted.
    """
    from agentrl.assembly.arguments import plain_settings, run_path
    from agentrl.assembly.needed import checked_run

    path, plain = run_path(run, "train"), plain_settings(settings)
    # What is wrong or missing is reported at once, not after the seconds that importing torch takes.
    checked_run(path, plain, resume=resume is not False)
    require("training", *TRAINING)
    from agentrl.run import train as trained

    return blocking(lambda: trained(path, resume=resume, quiet=quiet, **plain))


async def train_async(
    run: str | PathLike[str] | None = None,
    *,
    resume: bool | int = False,
    quiet: bool = False,
    **settings: Unpack[TrainSettings],
) -> TrainResult:
    """`train` for coroutines: it runs in a thread of its own, and the caller's event loop goes on.

        result = await agentrl.train_async(env=Capitals, num_rollout=20)

    A cancellation, such as that of a task, of `asyncio.timeout` or of Ctrl-C, stops the run as Ctrl-C stops
    `train`, and takes effect when that has ended in good order.

    Raises:
        UserError: as `train`.
    """
    return await awaited(partial(train, run, resume=resume, quiet=quiet, **settings))


@asynccontextmanager
async def open_run(
    run: str | PathLike[str] | None = None,
    *,
    resume: bool | int = False,
    quiet: bool = False,
    **settings: Unpack[TrainSettings],
) -> AsyncIterator[OpenRun]:
    """A run whose loop is yours: play, credit, update and publish are calls, and `train` is one loop of them.

        async with agentrl.open_run("examples/calculator/run.toml", num_rollout=20) as run:
            while not run.is_over:
                groups = await run.play()
                batch = await run.credit(groups)
                metrics = await run.update(batch)
                version = await run.publish()

    The settings, the folder, the journal and the model at its end are those of `train`; with `max_staleness`
    the same loop is asynchronous. It warm-starts as configured. Evaluations and checkpoints are calls, too.

    Args:
        run: the run file, or the folder of a run that is resumed, whether it began here or by `train`.
        resume: whether the run of a run file is resumed, where its folder holds one. A number: a run goes
            on after that step, from a checkpoint that it has kept; what came later is put aside.
        quiet: whether nothing is printed.
        settings: by their leaf names, as for `train`.

    Raises:
        UserError: as `train`.
        NoSignalError: at the end of the block: the last iterations have trained on nothing.
    """
    from agentrl.assembly.arguments import plain_settings, run_path
    from agentrl.assembly.config import OpenRunConfig
    from agentrl.assembly.needed import checked_run

    path, plain = run_path(run, "train"), plain_settings(settings)
    checked_run(path, plain, OpenRunConfig, resume=resume is not False)
    require("training", *TRAINING)
    from agentrl.run.open_run import open_run as opened

    async with opened(path, plain, resume=resume, quiet=quiet) as open_:
        yield open_


def sft(
    run: str | PathLike[str] | None = None,
    *,
    resume: bool | int = False,
    quiet: bool = False,
    **settings: Unpack[SftSettings],
) -> SftResult:
    """Fine-tune a model on conversations, or on episodes of a run, with the settings of a run file (TOML).

        agentrl.sft(sft_data="conversations.jsonl", hf_checkpoint="model", num_epoch=3)
        agentrl.sft("examples/sft_then_rl/run.toml")
        agentrl.sft(sft_data="runs/first", min_reward=1.0, hf_checkpoint="runs/first/checkpoint")

    The same run file serves `agentrl.train`, which starts from the result with `hf_checkpoint`. It works
    where an event loop runs; `sft_async` does not block that.

    Args:
        run: the run file, or the folder of a run that is resumed.
        resume: whether the run of a run file is resumed, where its folder holds one. A number: a run goes
            on after that step, from a checkpoint that it has kept; what came later is put aside.
        quiet: whether nothing is printed.
        settings: by their leaf names, as for `train`.

    Raises:
        UserError: a setting, the data or the model is wrong; the message has the remedy.
        KeyboardInterrupt: it was interrupted.
    """
    from agentrl.assembly.arguments import plain_settings, run_path
    from agentrl.assembly.config import SftConfig
    from agentrl.assembly.needed import checked_run

    path, plain = run_path(run, "sft"), plain_settings(settings)
    checked_run(path, plain, SftConfig, resume=resume is not False)
    require("fine-tuning", *TRAINING)
    from agentrl.run.sft import sft as fine_tuned

    return blocking(lambda: fine_tuned(path, resume=resume, quiet=quiet, **plain))


async def sft_async(
    run: str | PathLike[str] | None = None,
    *,
    resume: bool | int = False,
    quiet: bool = False,
    **settings: Unpack[SftSettings],
) -> SftResult:
    """`sft` for coroutines, as `train_async` is for `train`.

    Raises:
        UserError: as `sft`.
    """
    return await awaited(partial(sft, run, resume=resume, quiet=quiet, **settings))


def evaluate(
    env: str | type[Env | MultiAgentEnv],
    model: str | PathLike[str] | None = None,
    *,
    resume: bool = False,
    quiet: bool = False,
    **settings: Unpack[EvalSettings],
) -> EvalReport:
    """Play episodes of an environment with a model and score them.

    The same episode loop and limits as in training. The model is a Hugging Face directory, or is served by
    a chat endpoint.

        agentrl.evaluate("HopSearch-v0", "runs/quickstart/checkpoint", n=512, temperature=0.0).mean
        agentrl.evaluate(Capitals, "runs/capitals/checkpoint", n=64)
        agentrl.evaluate("HopSearch-v0", openai_url="http://127.0.0.1:30000/v1", openai_model="qwen3").mean

    With several sets of prompts (`prompt_data` as a table of name and path) the report is over all of them,
    and `sets` has that of each. It works where an event loop runs; `evaluate_async` does not block that.

    Every episode is in the journal below `output_dir` as soon as it has ended; without `output_dir`, below a
    temporary folder. Where the evaluation is interrupted, a line on standard error names the folder.

    Args:
        env: the id of an environment, or its class.
        model: the directory; None = `openai_url` and `openai_model` name an endpoint.
        resume: whether the evaluation in `output_dir` goes on, where there is one: its episodes are not
            played again.
        quiet: whether nothing is printed.
        settings: those of `agentrl eval` by their names: n, temperature, split, seed, env_kwargs, ...; as for
            `train`, functions and rows may be passed.

    Raises:
        UserError: a setting, the environment or the model is wrong; the message has the remedy.
        KeyboardInterrupt: it was interrupted.
    """
    from agentrl.assembly.arguments import env_name, model_path, plain_settings, rows_beside
    from agentrl.evaluation.model import evaluate as evaluated

    name, directory = env_name(env), model_path(model)
    with rows_beside(settings.get("output_dir")) as folder:
        plain = plain_settings(settings, folder)
        return blocking(lambda: evaluated(name, directory, resume=resume, quiet=quiet, **plain))


async def evaluate_async(
    env: str | type[Env | MultiAgentEnv],
    model: str | PathLike[str] | None = None,
    *,
    resume: bool = False,
    quiet: bool = False,
    **settings: Unpack[EvalSettings],
) -> EvalReport:
    """`evaluate` for coroutines, as `train_async` is for `train`.

        report = await agentrl.evaluate_async(Capitals, "runs/capitals/checkpoint", n=64)

    Raises:
        UserError: as `evaluate`.
    """
    return await awaited(partial(evaluate, env, model, resume=resume, quiet=quiet, **settings))


def __getattr__(name: str) -> object:
    if name == "__version__":
        return metadata.version("agentrl")
    if name in _RESULTS:
        return getattr(import_module(_RESULTS[name]), name)
    raise AttributeError(f"module 'agentrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    special = (name for name in globals() if name.startswith("__"))
    packages = (name for name in _PACKAGES if f"agentrl.{name}" in sys.modules)
    return sorted({*__all__, *_RESULTS, *special, *packages, "__version__"})
