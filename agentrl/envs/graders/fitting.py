"""Whether labels, prompts and a grader fit each other, found out by grading, before anything is played."""

from __future__ import annotations

import math
import re

from agentrl.envs.graders.answer import answers_of, last_boxed
from agentrl.envs.graders.registry import expert_answers
from agentrl.envs.graders.text import TEXT_GRADERS
from agentrl.envs.scoring import AnswerReward, graded
from agentrl.errors import StageError
from agentrl.types import Limits, Task

_ASKED = r"\b(?:form|format|line|lines|write|written|end|ends|begin|begins|after|with|as)\b[^\n]{0,60}?"
# Not the end of a prompt, `Write the answer:`, which asks for the answer alone.
_LINE = re.compile(rf"{_ASKED}\bA(?:nswer|NSWER)[*\"'`]*\s?:[ \t]*[^\s]")
_MARK = re.compile(rf"{_ASKED}####")
_TAG = "</answer>"
_BOX = "\\boxed"
_MAX_SHOWN = 60


def as_asked(task: Task, label: str) -> str | None:
    r"""A label as the answer that the prompt asks for: in `\boxed{}`, after `Answer:` or `####`, inside of
    <answer> tags, or in several of these; None where the prompt asks for no form."""
    prompt = "\n".join(message.text for message in task.prompt)
    boxed, (_, _, final) = last_boxed(label), label.rpartition("####")
    text = (final if boxed is None else boxed).strip()
    asked = text
    if _BOX in prompt:
        asked = f"\\boxed{{{asked}}}"
    if _LINE.search(prompt):
        asked = f"Answer: {asked}"
    elif _MARK.search(prompt):
        asked = f"#### {asked}"
    if _TAG in prompt:
        asked = f"<answer>{asked}</answer>"
    return None if asked is text else asked


async def misfit(reward: AnswerReward, task: Task, *, has_full_marks: bool) -> str | None:
    """Why a reward cannot tell right from wrong on a task, in one clause; None where it can.

    has_full_marks: whether the right answer gets 1, and an empty one nothing; otherwise it gets more than an
        empty one.
    """
    answer = _right_answer(reward, task)
    try:
        empty = float(await graded(reward, task, "", Limits().reward_timeout_s))
        right = None if answer is None else await graded(reward, task, answer, Limits().reward_timeout_s)
    except StageError as error:
        return error.detail.removeprefix(f"{task.id}: ")
    if empty > 0 and (has_full_marks or right is None):
        return f"an empty answer gets {empty:g}"
    if (
        answer is None
        or right is None
        or right >= (1.0 if has_full_marks else math.nextafter(empty, math.inf))
    ):
        return None
    shown = answer if len(answer) <= _MAX_SHOWN else f"{answer[:_MAX_SHOWN]}..."
    return f"its label, written as the prompt asks for it, {shown!r}, gets {float(right):g}"


def _right_answer(reward: AnswerReward, task: Task) -> str | None:
    """A label as an answer; None where no label is one, or there is none."""
    write, labels = expert_answers(reward), answers_of(task)
    if write is None or not labels:
        return None
    # It reads a letter in every form, where the label may be the text of a choice.
    asked = None if reward is TEXT_GRADERS["gpqa"] else as_asked(task, labels[0])
    begin = "</think>\n" if getattr(getattr(reward, "__self__", None), "after_think", False) else ""
    return write(task) if asked is None else begin + asked
