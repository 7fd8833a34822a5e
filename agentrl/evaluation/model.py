"""Scoring a model on an environment: the call behind `agentrl eval`."""

from __future__ import annotations

import asyncio

from agentrl.build.env import env_factory
from agentrl.build.model import open_model, use_threads
from agentrl.build.policy import agent_factory, build_engine, build_renderer, dialect_of
from agentrl.config import parse, place
from agentrl.envs import Scorer, tasks_of
from agentrl.evaluation.config import EvalConfig
from agentrl.evaluation.episodes import Evaluation, Evaluator
from agentrl.evaluation.report import EvalReport, EvalSetting
from agentrl.rollout.agent import SamplingSettings
from agentrl.types import JSON
from agentrl.view.console import RunConsole


def evaluate(env: str, model: str, *, quiet: bool = False, **settings: JSON) -> EvalReport:
    """Play episodes of a registered environment with a Hugging Face model and score them.

    The same episode loop, agent and limits as in training. `settings` are those of `EvalConfig`
    by their leaf names: n, temperature, split, seed, env_kwargs, ...

        agentrl.evaluate("HopSearch-v0", "runs/quickstart/checkpoint", n=512, temperature=0.0).mean

    Raises:
        UserError: one sentence about what is wrong and what to do next.
    """
    config = parse(EvalConfig, place(EvalConfig, settings), source="the settings given")
    return asyncio.run(_evaluate(env, model, config, RunConsole(quiet=quiet))).report


async def _evaluate(env_id: str, directory: str, config: EvalConfig, console: RunConsole) -> Evaluation:
    section = config.eval
    make_env = env_factory(
        env_id,
        section.env_kwargs,
        max_turns=section.max_turns,
        max_tokens=section.rollout_max_context_len,
        tools=section,
    )
    env = make_env()
    model = open_model(directory)
    use_threads(model.network, section.num_threads)
    renderer = build_renderer(model, dialect_of(env, config.rendering), config.rendering)
    engine = build_engine(model, config.engine, env.limits)
    sampling = SamplingSettings(temperature=section.temperature)
    try:
        with console.stage(f"playing {env_id}", section.n) as bar:
            evaluator = Evaluator(
                make_env=make_env,
                make_agent=agent_factory(engine, renderer, sampling),
                scorer=Scorer(env.rewards),
                setting=EvalSetting(env_id, section.split, section.temperature, env.breakdown),
                progress=bar.advance,
            )
            return await evaluator.run(tasks_of(env, section.split), section.n, seed=section.seed)
    finally:
        await engine.close()
