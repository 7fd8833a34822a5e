"""What can be seen of an environment without playing: its tasks.

Whether a prompt gives its answer away. Two rules, because a prompt may rightly contain its answer (one of
the options, a word of a passage to be read, the 7 of "3 and 7" that happens to be the result):

1. The answer stands right behind a label: "Answer: Paris", `"solution": "Paris"`. Always an error.
2. Somebody answers with a word of the prompt, at random. That earns 1 / (words of the prompt) in every task
   whose prompt contains the answer (whole words, after `squad_normalize`). Where the mean over tasks
   exceeds `chance_score`, the prompt gives away more than the environment admits: an error. So "yes",
   option letters and coincidences are counted for what they are worth.

Where a long prompt contains its own answer far more often than other tasks' answers, and `chance_score` does
not say that guessing pays, a warning asks for a look.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from agentrl.envs.check.report import Finding, Probed, error, some, warning
from agentrl.envs.scoring import squad_normalize
from agentrl.types import Task

TOLERANCE = 0.02
"""How far above chance a mean may be, as a part of the way from chance to the expert."""
CHARACTERS_PER_TOKEN = 4
"""The estimate of lengths: English text has some four characters a token in the usual vocabularies."""
MOST_TASKS = 20_000
"""Tasks of one split that are looked at; of more, as many evenly spaced ones."""
_MUCH_MORE_OFTEN = 0.05
_LABEL = re.compile(
    r"\b(?:answer|solution|gold|ground[ _]?truth|target|label|expected)['\"]?\s*(?:\bis\b|:|=)+\s*['\"`]?",
    re.IGNORECASE,
)
_PLACEHOLDER = re.compile(r"<.*>|\.*|_*|\?*")

Splits = Mapping[str, Sequence[Task]]


def looked_at(tasks: Sequence[Task]) -> list[Task]:
    """All tasks, or evenly spaced ones of very many."""
    return [tasks[k] for k in range(0, len(tasks), max(1, -(-len(tasks) // MOST_TASKS)))]


def probe_tasks(splits: Splits, again: Splits, max_tokens: int | None, chance: float, span: float) -> Probed:
    """Ids, splits, order, lengths and leaks. span: expert_score - chance_score."""
    tasks = [task for several in splits.values() for task in several]
    if not tasks:
        return Probed((error("no-tasks", f"no split has a task ({', '.join(splits)}); write `tasks`."),))
    found = (
        *_identity(splits, again),
        *_lengths(tasks, max_tokens),
        *_leaks([task for task in tasks if task.answer], chance, span),
    )
    return Probed(found, {"tasks": float(len(tasks))})


def text_of(task: Task) -> str:
    """All words of the prompt."""
    return "\n".join(message.text for message in task.prompt)


def _identity(splits: Splits, again: Splits) -> Sequence[Finding]:
    found = []
    changed = [name for name, tasks in splits.items() if list(tasks) != list(again[name])]
    if changed:
        text = f"`tasks` gives other tasks each time for {some(changed)}; draw them from a fixed seed."
        return [error("tasks-differ", text)]
    times = Counter(task.id for tasks in splits.values() for task in tasks)
    if twice := [id for id, count in times.items() if count > 1]:
        text = f"several tasks have the id {some(twice)}; number them, the split's name first."
        found.append(error("duplicate-task-id", text))
    if shared := _shared(splits):
        text = f"tasks stand in two splits: {some(shared)}; a held-out task must not be trained on."
        found.append(error("splits-overlap", text))
    return found


def _shared(splits: Splits) -> list[str]:
    """Tasks of two splits that ask the same: one prompt, and one answer or (without answers) one metadata."""
    first: dict[tuple[object, ...], tuple[str, str]] = {}
    shared = []
    for name, tasks in splits.items():
        for task in tasks:
            rest = task.answer if task.answer is not None else repr(sorted(task.metadata.items()))
            where, id = first.setdefault((task.prompt, task.answer is None, rest), (name, task.id))
            if where != name:
                shared.append(f"{id} ({where}) = {task.id} ({name})")
    return shared


def _lengths(tasks: Sequence[Task], max_tokens: int | None) -> Sequence[Finding]:
    if max_tokens is None:
        return ()
    room = max_tokens * CHARACTERS_PER_TOKEN
    long = [task.id for task in tasks if len(text_of(task)) >= room]
    if not long:
        return ()
    text = (
        f"the prompts of {len(long)} tasks leave no room for an answer within max_tokens = {max_tokens}, at "
        f"{CHARACTERS_PER_TOKEN} characters a token: {some(long)}; raise limits.max_tokens or shorten them."
    )
    return (error("prompt-too-long", text),)


def _leaks(tasks: Sequence[Task], chance: float, span: float) -> Sequence[Finding]:
    if labelled := [task.id for task in tasks if _is_labelled(task)]:
        text = f"the prompt shows the answer behind a label in {some(labelled)}; leave it to Task.answer."
        return (error("answer-in-prompt", text),)
    prompts = [f" {squad_normalize(text_of(task))} " for task in tasks]
    answers = [squad_normalize(task.answer or "") for task in tasks]
    own = [_holds(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    told = [task.id for task, holds in zip(tasks, own, strict=True) if holds]
    if not told:
        return ()
    paid = fmean(
        holds / len(prompt.split()) for prompt, holds in zip(prompts, own, strict=True) if prompt.split()
    )
    if paid > chance + TOLERANCE * span:
        text = (
            f"a random word of the prompt would earn {paid:.3f}, chance_score is {chance:g}: {len(told)} of "
            f"{len(tasks)} prompts hold their answer ({some(told)}); take it out or raise chance_score."
        )
        return (error("answer-in-prompt", text),)
    others = fmean(_holds(prompt, answer) for prompt, answer in zip(prompts, _shifted(answers), strict=True))
    if chance <= 0 and fmean(own) - others > _MUCH_MORE_OFTEN:
        text = (
            f"{len(told)} of {len(tasks)} prompts hold their own answer ({some(told)}); make sure that it is "
            "there to be found by reading, and set chance_score to what a guess earns."
        )
        return (warning("answer-in-long-prompt", text),)
    return ()


def _is_labelled(task: Task) -> bool:
    answer, text = (task.answer or "").strip().lower(), text_of(task).lower()
    if _PLACEHOLDER.fullmatch(answer):
        return False
    behind = (match.end() for match in _LABEL.finditer(text))
    return any(
        text.startswith(answer, at) and not text[at + len(answer) : at + len(answer) + 1].isalnum()
        for at in behind
    )


def _holds(prompt: str, answer: str) -> bool:
    return bool(answer) and f" {answer} " in prompt


def _shifted(answers: list[str]) -> list[str]:
    """Each task's neighbour's answer, half-way round: a stranger's, as often as answers are spread."""
    half = len(answers) // 2
    return answers[half:] + answers[:half]
