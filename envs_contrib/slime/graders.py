"""slime's graders by their names there, computed by those of agentrl."""

from __future__ import annotations

import re
from collections import Counter

from agentrl import Task
from agentrl.envs import squad_normalize
from agentrl.envs.graders import last_boxed, make_grader

_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
_DAPO_CHARS, _BOX_CHARS = 300, 100
_WHOLE = frozenset({"yes", "no", "noanswer"})


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False
) -> dict[str, float | bool | str | None]:
    """DAPO's score: +1 or -1, whether it is right, and what was read as the answer.

    strict_box_verify: the last box of the last 100 characters is the label itself.
    """
    text = solution_str[-_DAPO_CHARS:]
    if strict_box_verify:
        pred = last_boxed(text[-_BOX_CHARS:])
        is_right = pred == ground_truth
    else:
        found = _ANSWER.findall(text)
        pred = found[-1].strip() if found else "[INVALID]"
        is_right = float(str(make_grader("dapo")(_task(ground_truth), text))) > 0
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": pred}


def extract_answer(passage: str) -> str | None:
    """What stands in the last box."""
    return last_boxed(passage)


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """F1 of words as SQuAD has it, precision and recall; `yes`, `no` and `noanswer` match as a whole."""
    predicted, expected = (squad_normalize(text) for text in (prediction or "", ground_truth))
    words, gold = predicted.split(), expected.split()
    common = (Counter(words) & Counter(gold)).total()
    if not common or (predicted != expected and not _WHOLE.isdisjoint((predicted, expected))):
        return 0.0, 0.0, 0.0
    precision, recall = common / len(words), common / len(gold)
    return 2 * precision * recall / (precision + recall), precision, recall


def _task(label: str) -> Task:
    return Task.ask("slime", "", answer=label)
