"""Scoring a model on an environment: the call behind `agentrl eval`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from agentrl.build.env import env_factory
from agentrl.build.policy import agent_factory, build_engine, build_renderer
from agentrl.build.model import open_model
from agentrl.engine.config import EngineConfig
from agentrl.envs import sum_of_steps
from agentrl.evaluate.episodes import Evaluation, Evaluator
from agentrl.evaluate.report import EvalReport, EvalSetting
from agentrl.rollout.agent import SamplingSettings
from agentrl.view.console import RunConsole

__all__ = ["EvalReport", "Evaluation", "Evaluator", "EvalSetting", "evaluate"]
