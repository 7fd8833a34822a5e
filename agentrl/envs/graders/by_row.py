"""A grader for data sets of several kinds: each row names its own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace

from agentrl.envs.graders.answer import ANSWERS, answers_of, last_boxed
from agentrl.envs.graders.registry import expert_answers, grader_names, make_grader
from agentrl.envs.scoring import AnswerReward, Grade
from agentrl.errors import GradingError, did_you_mean
from agentrl.types import JSON, Task

_BOXED = "boxed_"
_ELSEWHERE = {"remote_rm": "remote"}


class RowGrader:
    r"""The grader that a row's metadata names, such as `{"rm_type": "math"}`, as in slime.

    `boxed_NAME` grades what is in the last `\boxed{}` of an answer, in the form that NAME reads; without one
    the answer gets 0.

    key: of the metadata. default: the grader of rows without that key; left out, such a row fails. settings:
    those of each grader, by its name.

    Raises:
        UserError: settings are of a name that is no grader's, or do not fit it.
    """

    def __init__(
        self,
        key: str = "rm_type",
        default: str | None = None,
        settings: dict[str, dict[str, JSON]] | None = None,
    ) -> None:
        self._key, self._default = key, default
        self._settings: Mapping[str, Mapping[str, JSON]] = settings or {}
        self._made: dict[str, AnswerReward] = {}
        for name in (*self._settings, *([] if default is None else [default])):
            self._grader(name)

    async def grade(self, task: Task, answer: str) -> Grade:
        """The reward of an answer, by the grader of the task.

        Raises:
            GradingError: the metadata names no grader.
        """
        name = self._name_of(task)
        if name.startswith(_BOXED):
            name, boxed = name.removeprefix(_BOXED), last_boxed(answer)
            if boxed is None:
                return 0.0
            answer = self._in_form(name, task, boxed)
        grade = self._grader(name)(task, answer)
        return await grade if inspect.isawaitable(grade) else grade

    def expert_answer(self, task: Task) -> str | None:
        """An answer of full marks; None where the task names no grader, or one that labels cannot satisfy."""
        try:
            name = self._name_of(task)
        except GradingError:
            return None
        write = expert_answers(self._grader(name.removeprefix(_BOXED)))
        text = None if write is None else write(task)
        if text is None or not name.startswith(_BOXED):
            return text
        (gold, *_) = answers_of(task)
        content = last_boxed(gold)
        return f"\\boxed{{{gold if content is None else content}}}"

    def _in_form(self, name: str, task: Task, content: str) -> str:
        """The content of a box as the grader of a name reads an answer: as if it were the label."""
        write = expert_answers(self._grader(name))
        metadata = {key: value for key, value in task.metadata.items() if key != ANSWERS}
        text = None if write is None else write(replace(task, answer=content, metadata=metadata))
        return content if text is None else text

    def _name_of(self, task: Task) -> str:
        name = task.metadata.get(self._key, self._default)
        if not isinstance(name, str):
            what = f"the metadata has no `{self._key}`, the name of a grader"
            raise GradingError("invalid", f"{task.id}: {what}")
        name = _ELSEWHERE.get(name, name)
        known = [each for each in grader_names() if each != "by_row"]
        if name.removeprefix(_BOXED) not in known:
            near = did_you_mean(name, known)
            raise GradingError("invalid", f"{task.id}: `{self._key}` = {name[:80]!r} names no grader.{near}")
        return name

    def _grader(self, name: str) -> AnswerReward:
        name = name.removeprefix(_BOXED)
        if name not in self._made:
            self._made[name] = make_grader(name, **dict(self._settings.get(name, {})))
        return self._made[name]
