"""Environments: their base classes, their registry, and the loop that plays episodes."""

from agentrl.envs.agents import ScriptedAgent
from agentrl.envs.base import AnyScript, BaseEnv, Env, Script, tasks_of
from agentrl.envs.dialect import Chat, Dialect, Tags
from agentrl.envs.generate import EpisodeEndedError, EpisodeInPlay, Generate
from agentrl.envs.multi_agent import AgentView, AnyEnv, MultiAgentEnv
from agentrl.envs.normal_form import exact_match, squad_normalize
from agentrl.envs.pettingzoo import PettingZooEnv
from agentrl.envs.play import PlayEpisode, play
from agentrl.envs.registry import EnvSpec, env_ids, find, make, matching, register
from agentrl.envs.resuming import EpisodeInProgress, StoppableEpisodes
from agentrl.envs.scoring import GroupReward, Reward, Scored, Scorer, score
from agentrl.envs.single_turn import SingleTurnEnv
from agentrl.envs.tool_env import ToolEnv

__all__ = [
    "AgentView",
    "AnyEnv",
    "AnyScript",
    "BaseEnv",
    "Chat",
    "Dialect",
    "Env",
    "EnvSpec",
    "EpisodeEndedError",
    "EpisodeInPlay",
    "EpisodeInProgress",
    "Generate",
    "GroupReward",
    "MultiAgentEnv",
    "PettingZooEnv",
    "PlayEpisode",
    "Reward",
    "Scored",
    "Scorer",
    "Script",
    "ScriptedAgent",
    "SingleTurnEnv",
    "StoppableEpisodes",
    "Tags",
    "ToolEnv",
    "env_ids",
    "exact_match",
    "find",
    "make",
    "matching",
    "play",
    "register",
    "score",
    "squad_normalize",
    "tasks_of",
]
