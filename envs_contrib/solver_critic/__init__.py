"""A solver answers, a critic judges, and the solver may correct itself: one model in two roles."""

from envs_contrib.solver_critic.env import SolverCritic

__all__ = ["SolverCritic"]
