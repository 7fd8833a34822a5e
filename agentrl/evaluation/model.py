"""Scoring a model on an environment: the call behind `agentrl eval`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agentrl.assembly.addresses import Addresses
from agentrl.assembly.data import file_source, first_tasks
from agentrl.assembly.env import env_factory
from agentrl.assembly.opponents import OpponentSetup, opened_opponents
from agentrl.assembly.rewards import build_scorer
from agentrl.assembly.rollout import build_play
from agentrl.collector import rare_collections
from agentrl.config import by_section, parse, refuse_inactive
from agentrl.envs import AnyEnv, tasks_of
from agentrl.errors import ConfigError
from agentrl.evaluation.config import EvalConfig
from agentrl.evaluation.episodes import Evaluation, Evaluator
from agentrl.evaluation.folder import EvalFolder
from agentrl.evaluation.players import endpoint_players, local_models, model_players, with_limits
from agentrl.evaluation.report import EvalReport, EvalSetting
from agentrl.types import JSON, Task
from agentrl.view.console import RunConsole


def evaluate(env: str, model: str | None = None, *, quiet: bool = False, **settings: JSON) -> EvalReport:
    """Play episodes of a registered environment with a model and score them.

    The same episode loop and limits as in training. The model is a Hugging Face directory, or is served by
    a chat endpoint. `settings` are those of `EvalConfig` by their leaf names: n, temperature, split, seed,
    env_kwargs, ...

        agentrl.evaluate("HopSearch-v0", "runs/quickstart/checkpoint", n=512, temperature=0.0).mean
        agentrl.evaluate("HopSearch-v0", openai_url="http://127.0.0.1:30000/v1", openai_model="qwen3").mean

    Raises:
        UserError: a setting, the environment or the model is wrong; the message has the remedy.
    """
    config = parse(EvalConfig, by_section(EvalConfig, settings), source="the settings given")
    refuse_inactive(config, settings, source="the settings given")
    if (model is None) == (config.openai.openai_url is None):
        raise ConfigError(
            "Name one model to score: a directory (--model), or an endpoint (--openai-url, --openai-model)."
        )
    folder = EvalFolder.create(config) if config.eval.output_dir is not None else None
    with rare_collections():
        evaluation = asyncio.run(_evaluate(env, model, config, RunConsole(quiet=quiet)))
    if folder is not None:
        asyncio.run(folder.write(evaluation))
    return evaluation.report


async def _evaluate(
    env_id: str, directory: str | None, config: EvalConfig, console: RunConsole
) -> Evaluation:
    async with local_models(config, console.line) as addresses:
        return await _played(env_id, directory, config, console, addresses)


async def _played(
    env_id: str, directory: str | None, config: EvalConfig, console: RunConsole, addresses: Addresses
) -> Evaluation:
    section = config.eval
    make_env = env_factory(
        env_id,
        section.env_kwargs,
        limits=section.chosen(max_turns=section.max_turns, max_tokens=section.rollout_max_context_len),
        tools=section,
        addresses=addresses,
        reward=section,
    )
    if directory is None:
        make_env = with_limits(make_env, max_tokens=section.rollout_max_context_len)
    env = make_env()
    tasks = _tasks(config, env)
    first = tasks[0] if tasks else None
    scorer = await build_scorer(section, make_env, first, addresses)
    play_episode = await build_play(section.custom_generate_function_path, make_env, first)
    opening = (
        endpoint_players(config, env)
        if directory is None
        else model_players(directory, config, env, on_event=console.line)
    )
    async with (
        opened_opponents(section.opponents, env, addresses, OpponentSetup(config.rendering)) as opponents,
        opening as players,
    ):
        with console.stage(f"playing {env_id}", section.n) as bar:
            evaluator = Evaluator(
                make_env=make_env,
                make_agent=players.make_agent,
                scorer=scorer,
                setting=EvalSetting(env_id, section.split, section.temperature, env.breakdown),
                concurrency=players.concurrency,
                progress=bar.advance,
                opponents=opponents,
                play_episode=play_episode,
            )
            return await evaluator.run(tasks, section.n, seed=section.seed)


def _tasks(config: EvalConfig, env: AnyEnv) -> Sequence[Task]:
    """The first prompts of the data; without data, the environment's split."""
    section, paths = config.eval, config.data.prompt_data
    if paths is None:
        return tasks_of(env, section.split)
    return first_tasks(file_source(paths, config.data, split=section.split), section.n)
