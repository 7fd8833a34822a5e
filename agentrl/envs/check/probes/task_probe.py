"""Checks the tasks of an environment without playing: ids, splits, lengths and leaked answers.

Two rules decide whether a prompt leaks its answer, because a prompt may legitimately contain it (one of the
options, a word of a passage to be read, the 7 of "3 and 7" that happens to be the result):

1. The answer directly follows a label: "Answer: Paris", `"solution": "Paris"`. Always an error.
2. A policy that answers with a random word of the prompt earns 1 / (words of the prompt) in every task whose
   prompt contains the answer (complete words, after `squad_normalize`). Where the mean over tasks exceeds
   `chance_score`, the prompt leaks more than the environment declares: an error. So "yes", option letters
   and coincidences count by what they earn.

Where long prompts contain their own answers far more often than other tasks' answers, and `chance_score` is
0, the result is a warning.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from agentrl.envs.check.findings import Finding, ProbeResult, error, some, warning
from agentrl.envs.normal_form import squad_normalize
from agentrl.types import Image, Task

TOLERANCE = 0.02
"""How far above chance a mean may be, as a fraction of the distance from chance to the expert."""
CHARACTERS_PER_TOKEN = 4
"""For estimates of lengths: English text has about four characters a token in common vocabularies."""
MAX_TASKS = 20_000
"""Tasks of one split that are checked; of more, evenly spaced ones."""
_MUCH_MORE_OFTEN = 0.05
_LABEL = re.compile(
    r"\b(?:answer|solution|gold|ground[ _]?truth|target|label|expected)['\"]?\s*(?:\bis\b|:|=)+\s*['\"`]?",
    re.IGNORECASE,
)
_PLACEHOLDER = re.compile(r"<.*>|\.*|_*|\?*")

Splits = Mapping[str, Sequence[Task]]


def subsampled(tasks: Sequence[Task]) -> list[Task]:
    """All tasks, or evenly spaced ones of more than MAX_TASKS."""
    return [tasks[k] for k in range(0, len(tasks), max(1, -(-len(tasks) // MAX_TASKS)))]


def probe_tasks(
    splits: Splits, again: Splits, max_tokens: int | None, chance: float, span: float
) -> ProbeResult:
    """Ids, splits, order, lengths and leaks. span: expert_score - chance_score."""
    tasks = [task for of_split in splits.values() for task in of_split]
    if not tasks:
        names = ", ".join(splits) or "there is none"
        return ProbeResult((error("no-tasks", f"no split has a task ({names}); write `tasks`."),))
    findings = (
        *_identity(splits, again),
        *_lengths(tasks, max_tokens),
        *_leaks([task for task in tasks if task.answer], chance, span),
    )
    return ProbeResult(findings, {"tasks": float(len(tasks))})


def text_of(task: Task) -> str:
    """The text of the prompt."""
    return "\n".join(message.text for message in task.prompt)


def _identity(splits: Splits, again: Splits) -> Sequence[Finding]:
    findings = []
    changed = [name for name, tasks in splits.items() if list(tasks) != list(again[name])]
    if changed:
        text = f"`tasks` gives other tasks each time for {some(changed)}; draw them from a fixed seed."
        return [error("tasks-differ", text)]
    times = Counter(task.id for tasks in splits.values() for task in tasks)
    if repeated := [id for id, count in times.items() if count > 1]:
        text = f"several tasks have the id {some(repeated)}; number them, the split's name first."
        findings.append(error("duplicate-task-id", text))
    if shared := _shared(splits):
        text = f"tasks stand in two splits: {some(shared)}; a held-out task must not be trained on."
        findings.append(error("splits-overlap", text))
    elif shared := _shared(splits, _loosely):
        text = (
            f"tasks of two splits differ in case or the last mark alone: {some(shared)}; a held-out task "
            "must not be trained on."
        )
        findings.append(warning("splits-nearly-overlap", text))
    return findings


def _exactly(task: Task) -> object:
    return task.prompt


def _loosely(task: Task) -> object:
    # Spaces stay: they are the content of pictures made of characters.
    text = text_of(task).lower().strip().rstrip(".?!: ")
    contents = (message.content for message in task.prompt if not isinstance(message.content, str))
    return text, *(part.url for parts in contents for part in parts if isinstance(part, Image))


def _shared(splits: Splits, key: Callable[[Task], object] = _exactly) -> list[str]:
    """Tasks in two splits with the same prompt and the same answer or (without answers) metadata."""
    first: dict[tuple[object, ...], tuple[str, str]] = {}
    shared = []
    for name, tasks in splits.items():
        for task in tasks:
            rest = task.answer if task.answer is not None else repr(sorted(task.metadata.items()))
            where, id = first.setdefault((key(task), task.answer is None, rest), (name, task.id))
            if where != name:
                shared.append(f"{id} ({where}) = {task.id} ({name})")
    return shared


def _lengths(tasks: Sequence[Task], max_tokens: int | None) -> Sequence[Finding]:
    if max_tokens is None:
        return ()
    max_characters = max_tokens * CHARACTERS_PER_TOKEN
    long = [task.id for task in tasks if len(text_of(task)) >= max_characters]
    if not long:
        return ()
    text = (
        f"the prompts of {len(long)} tasks leave no room for an answer within max_tokens = {max_tokens}, at "
        f"{CHARACTERS_PER_TOKEN} characters a token: {some(long)}; raise limits.max_tokens or shorten them."
    )
    return (error("prompt-too-long", text),)


def _leaks(tasks: Sequence[Task], chance: float, span: float) -> Sequence[Finding]:
    answers, texts = [task.answer or "" for task in tasks], [text_of(task) for task in tasks]
    if labelled := [tasks[k].id for k in labelled_in(texts, answers)]:
        text = f"the prompt shows the answer behind a label in {some(labelled)}; leave it to Task.answer."
        return (error("answer-in-prompt", text),)
    prompts, wanted = normalized(texts), [squad_normalize(answer) for answer in answers]
    own = holding(prompts, wanted)
    leaking = [task.id for task, holds in zip(tasks, own, strict=True) if holds]
    if not leaking:
        return ()
    if (earned := random_word_score(prompts, own)) > chance + TOLERANCE * span:
        text = (
            f"a random word of the prompt would earn {earned:.3f}, chance_score is "
            f"{chance:g}: {len(leaking)} of {len(tasks)} prompts hold their answer ({some(leaking)}); "
            "take it out or raise chance_score."
        )
        return (error("answer-in-prompt", text),)
    others = fmean(holding(prompts, _shifted(wanted)))
    if chance <= 0 and fmean(own) - others > _MUCH_MORE_OFTEN:
        text = (
            f"{len(leaking)} of {len(tasks)} prompts hold their own answer ({some(leaking)}); make sure that "
            "it is there to be found by reading, and set chance_score to what a guess earns."
        )
        return (warning("answer-in-long-prompt", text),)
    return ()


def labelled_in(texts: Sequence[str], answers: Sequence[str]) -> list[int]:
    """The indices of texts in which the answer of the same index follows a label, such as `Answer:`."""
    pairs = zip(texts, answers, strict=True)
    return [k for k, (text, answer) in enumerate(pairs) if _is_labelled(text, answer)]


def normalized(texts: Sequence[str]) -> list[str]:
    """The texts by `squad_normalize`, with a space at both ends: words can be looked for in them."""
    return [f" {squad_normalize(text)} " for text in texts]


def holding(texts: Sequence[str], answers: Sequence[str]) -> list[bool]:
    """Whether each normalized text holds the normalized answer of the same index, as complete words."""
    return [bool(answer) and f" {answer} " in text for text, answer in zip(texts, answers, strict=True)]


def random_word_score(texts: Sequence[str], own: Sequence[bool]) -> float:
    """What a random word of each normalized text earns, on average. own: whether it holds its answer."""
    earned = [holds / len(text.split()) for text, holds in zip(texts, own, strict=True) if text.split()]
    return fmean(earned) if earned else 0.0


def _is_labelled(text: str, answer: str) -> bool:
    answer, text = answer.strip().lower(), text.lower()
    if _PLACEHOLDER.fullmatch(answer):
        return False
    label_ends = (match.end() for match in _LABEL.finditer(text))
    return any(
        text.startswith(answer, at) and not text[at + len(answer) : at + len(answer) + 1].isalnum()
        for at in label_ends
    )


def _shifted(answers: list[str]) -> list[str]:
    """Each answer shifted by half of the tasks: another task's answer, with the same distribution."""
    half = len(answers) // 2
    return answers[half:] + answers[:half]
