"""Scoring a model on an environment: the call behind `agentrl eval`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from agentrl.assembly.addresses import Addresses
from agentrl.assembly.data import num_prompts
from agentrl.assembly.opponents import OpponentSetup, opened_opponents
from agentrl.collector import rare_collections
from agentrl.config import by_section, parse, refuse_inactive
from agentrl.envs.opponents import policy_agents
from agentrl.errors import ConfigError
from agentrl.evaluation.config import EvalConfig
from agentrl.evaluation.episodes import Evaluation, over_sets
from agentrl.evaluation.folder import EvalFolder
from agentrl.evaluation.players import endpoint_players, local_models, model_players
from agentrl.evaluation.report import EvalReport
from agentrl.evaluation.world import EvalWorld
from agentrl.types import JSON
from agentrl.view.console import RunConsole


def evaluate(env: str, model: str | None = None, *, quiet: bool = False, **settings: JSON) -> EvalReport:
    """Play episodes of a registered environment with a model and score them.

    The same episode loop and limits as in training. The model is a Hugging Face directory, or is served by
    a chat endpoint. `settings` are those of `EvalConfig` by their leaf names: n, temperature, split, seed,
    env_kwargs, ...

        agentrl.evaluate("HopSearch-v0", "runs/quickstart/checkpoint", n=512, temperature=0.0).mean
        agentrl.evaluate("HopSearch-v0", openai_url="http://127.0.0.1:30000/v1", openai_model="qwen3").mean

    With several sets of prompts (`prompt_data` as a table of name and path) the report is over all of them,
    and `sets` has that of each.

    Raises:
        UserError: a setting, the environment or the model is wrong; the message has the remedy.
    """
    config = parse(EvalConfig, by_section(EvalConfig, settings), source="the settings given")
    refuse_inactive(config, settings, source="the settings given")
    if (model is None) == (config.openai.openai_url is None):
        raise ConfigError(
            "Name one model to score: a directory (--model), or an endpoint (--openai-url, --openai-model)."
        )
    folder = EvalFolder.create(config, model) if config.eval.output_dir is not None else None
    with rare_collections():
        evaluations = asyncio.run(_evaluate(env, model, config, RunConsole(quiet=quiet)))
    report = over_sets(evaluations)
    if folder is not None:
        asyncio.run(folder.write(evaluations, report))
    return report


async def _evaluate(
    env_id: str, directory: str | None, config: EvalConfig, console: RunConsole
) -> Mapping[str, Evaluation]:
    async with local_models(config, console.line) as addresses:
        return await _played(env_id, directory, config, console, addresses)


async def _played(
    env_id: str, directory: str | None, config: EvalConfig, console: RunConsole, addresses: Addresses
) -> Mapping[str, Evaluation]:
    """The evaluation of each set of prompts by its name."""
    section = config.eval
    world = await EvalWorld.build(env_id, config, addresses, counts_tokens=directory is not None)
    env = world.env
    opening = (
        endpoint_players(config, env.tool_schemas)
        if directory is None
        else model_players(directory, config, env.limits, on_event=console.line)
    )
    evaluations: dict[str, Evaluation] = {}
    async with (
        opened_opponents(section.opponents, env, addresses, OpponentSetup(config.rendering)) as opponents,
        opening as players_of,
    ):
        players = players_of(config, env)
        agents_of = policy_agents(players.make_agent, opponents)
        for name, tasks in world.sets.items():
            n, samples = num_prompts(name, tasks, section.n), section.n_samples_per_eval_prompt
            title = f"playing {env_id}, {name}" if name else f"playing {env_id}"
            with console.stage(title, n * samples) as bar:
                evaluator = world.evaluator(
                    agents_of, config, prompts=name, concurrency=players.concurrency, progress=bar.advance
                )
                evaluations[name] = await evaluator.run(
                    tasks, n, seed=section.seed, samples=samples, prompts=name
                )
    return evaluations
