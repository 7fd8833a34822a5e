"""Graders: the reward of an answer, by name. `docs/graders.md` has a table of all names."""

from agentrl.envs.graders.answer import last_boxed
from agentrl.envs.graders.mathematics import is_math_equal
from agentrl.envs.graders.registry import (
    expert_answers,
    grader_names,
    group_grader_names,
    make_grader,
    make_group_grader,
)
from agentrl.envs.graders.text import exact_match, f1

__all__ = [
    "exact_match",
    "expert_answers",
    "f1",
    "grader_names",
    "group_grader_names",
    "is_math_equal",
    "last_boxed",
    "make_grader",
    "make_group_grader",
]
