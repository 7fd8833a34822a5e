"""The names of graders, for run files and the command line."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, cast

from agentrl.envs import GroupReward
from agentrl.envs.graders.answer import ExpertAnswers
from agentrl.envs.graders.text import TEXT_ANSWERS, TEXT_GRADERS
from agentrl.envs.scoring import AnswerReward, Measure
from agentrl.errors import ConfigError, UserError
from agentrl.tools.names import Names, fitted_arguments
from agentrl.types import Episode

_NAMES = Names("reward", "package.module:function", ConfigError)
_GROUP_NAMES = Names("group reward", "package.module:function", ConfigError)
_WITH_SETTINGS: Mapping[str, str] = {
    "math": "agentrl.envs.graders.mathematics:MathGrader",
    "deepscaler": "agentrl.envs.graders.mathematics:DeepScalerGrader",
    "ifeval": "agentrl.envs.graders.ifeval:InstructionGrader",
    "code": "agentrl.envs.graders.programs:ProgramGrader",
    "remote": "agentrl.envs.graders.remote:RemoteGrader",
    "judge": "agentrl.envs.graders.judge:JudgeGrader",
    "by_row": "agentrl.envs.graders.by_row:RowGrader",
}
CALL_SERVERS = ("remote", "judge")
"""The graders of an answer that call a server."""

_OF_GROUPS: Mapping[str, str] = {
    "pairwise": "agentrl.envs.graders.judge:PairwiseJudge",
    "diversity": "agentrl.envs.graders.diversity:DiversityGrader",
}


class _Grader(Protocol):
    @property
    def grade(self) -> AnswerReward: ...


class _GroupGrader(Protocol):
    @property
    def grade(self) -> Callable[[Sequence[Episode]], Sequence[Measure] | Awaitable[Sequence[Measure]]]: ...


def grader_names() -> list[str]:
    """The names of all graders of an answer."""
    return [*TEXT_GRADERS, *_WITH_SETTINGS]


def group_grader_names() -> list[str]:
    """The names of all graders of a group."""
    return [*_OF_GROUPS]


def find_grader(name: str) -> Callable[..., object]:
    """The function of a grader without settings, or the class that makes one; of an answer or of groups.

    Raises:
        ConfigError: no grader has that name; the sentence lists the names.
    """
    if name in TEXT_GRADERS:
        return TEXT_GRADERS[name]
    path = {**_WITH_SETTINGS, **_OF_GROUPS}.get(name)
    if path is None:
        raise _NAMES.unknown(name, [*grader_names(), *group_grader_names()])
    return cast("Callable[..., object]", _NAMES.imported(path))


def make_grader(name: str, **settings: object) -> AnswerReward:
    """The grader of a name: a function of a task and an answer, sync or async.

        grade = make_grader("math", timeout_s=2.0)
        reward = await grade(task, answer)

    Raises:
        ConfigError: no grader has that name.
        UserError: it does not take these settings, or one of them is invalid.
        MissingExtraError: its extra is not installed.
    """
    if name in TEXT_GRADERS:
        if settings:
            raise UserError(f"the grader `{name}` takes no settings, got {settings}.")
        return TEXT_GRADERS[name]
    if name not in _WITH_SETTINGS:
        raise _NAMES.unknown(name, grader_names())
    factory = cast("Callable[..., _Grader]", find_grader(name))
    return factory(**fitted_arguments(f"grader `{name}`", factory, settings)).grade


def expert_answers(reward: AnswerReward) -> ExpertAnswers | None:
    """What writes answers of full marks for a grader; None where the labels of a task make none.

        write = expert_answers(make_grader("math"))
        write(Task.ask("t", "Half of 1?", "1/2"))  # \\boxed{1/2}

    reward: a grader of `make_grader`, or a function of one's own, whose answer is the label itself.
    """
    grader = getattr(reward, "__self__", None)
    if f"{type(grader).__module__}:{type(grader).__qualname__}" in _WITH_SETTINGS.values():
        return cast("ExpertAnswers | None", getattr(grader, "expert_answer", None))
    own = (answers for grade, answers in TEXT_ANSWERS.items() if grade is reward)
    return next(own, lambda task: task.answer)


def make_group_grader(name: str, *, weight: float = 1.0, **settings: object) -> GroupReward:
    """The group reward of a name, from the siblings of a group to a number for each.

    weight: its factor in the total.

    Raises:
        ConfigError: no group reward has that name.
        UserError: it does not take these settings, or one of them is invalid.
    """
    if name not in _OF_GROUPS:
        raise _GROUP_NAMES.unknown(name, group_grader_names())
    factory = cast("Callable[..., _GroupGrader]", find_grader(name))
    grader = factory(**fitted_arguments(f"grader `{name}`", factory, settings))
    return GroupReward(grader.grade, weight, name)
