"""Search-R1's prompt, its accepted answers, and an episode as one text with tags."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from agentrl import Episode, Message, Task, UserError
from agentrl.tools import JSON, inline
from envs_contrib.search_r1 import qa_em

PROMPT = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you "
    "get new information. After reasoning, if you find you lack some knowledge, you can call a search engine "
    "by <search> query </search> and it will return the top searched results between <information> and "
    "</information>. You can search as many times as your want. If you find no further external knowledge "
    "needed, you can directly provide the answer inside <answer> and </answer>, without detailed "
    "illustrations. For example, <answer> Beijing </answer>. Question: {question}\n"
)
"""The prompt that the published models were trained with (arXiv:2503.09516, table 1), unchanged."""
QUESTION = "{question}"


def golden_answers(task: Task) -> Sequence[str]:
    """The accepted answers of a task: `metadata["answers"]`, else its answer, which may be JSON.

    Raises:
        UserError: it has none.
    """
    labels = task.metadata.get("answers")
    if labels is None and task.answer is not None:
        labels = _parsed(task.answer)
    if isinstance(labels, dict):
        labels = labels.get("target")
    answers = [str(label) for label in labels if label is not None] if isinstance(labels, list) else []
    if isinstance(labels, str | int | float):
        answers = [str(labels)]
    answers = [answer for answer in answers if answer.strip()]
    if not answers:
        raise UserError(
            f"{task.id} has no accepted answer; name their column with label_key, such as golden_answers."
        )
    return answers


def prompted(observation: tuple[Message, ...], prompt: str) -> tuple[Message, ...]:
    """The messages with the last question inside the prompt; unchanged where they show `</answer>`."""
    *before, last = observation
    if last.images or any("</answer>" in message.text for message in observation):
        return observation
    question = last.text.strip()
    question += "" if question.endswith("?") else "?"
    return (*before, replace(last, content=prompt.replace(QUESTION, question)))


def text_of(message: Message) -> str:
    """A message after the prompt as text with tags, in any dialect; "" for a message of another role.

    Results contain no `<`: a document must not pass for a tag of the model.
    """
    if message.role == "tool":
        return f"<information>{message.text.replace('<', '')}</information>"
    if message.role != "assistant":
        return ""
    reasoning = message.reasoning or ""
    if message.tool_calls:
        return reasoning + "".join(
            call.raw or _as_tag(call.name, call.arguments) for call in message.tool_calls
        )
    has_tags = "<answer>" in message.text and "</answer>" in message.text
    return reasoning + (message.text if has_tags else f"<answer>{message.text}</answer>")


def response_of(episode: Episode) -> str:
    """All that follows the prompt of an episode, as text with tags."""
    return "".join(text_of(message) for turn in episode.turns for message in (*turn.observation, turn.action))


@inline
def em(episode: Episode) -> float:
    """The exact match of an episode's answer; 0.0 without one."""
    answer = qa_em.last_answer(response_of(episode))
    return 0.0 if answer is None else qa_em.em(answer, golden_answers(episode.task))


@inline
def f1(episode: Episode) -> float:
    """The F1 of an episode's answer; 0.0 without one."""
    answer = qa_em.last_answer(response_of(episode))
    return 0.0 if answer is None else qa_em.f1(answer, golden_answers(episode.task))


@inline
def is_valid(episode: Episode) -> float:
    """1.0 where the response is a valid sequence of tags."""
    return float(qa_em.is_valid_sequence(response_of(episode)))


def _parsed(answer: str) -> JSON:
    """The JSON of a list or an object, as `label_key` makes it of a column; any other answer as it is."""
    if not answer.startswith(("[", "{")):
        return answer
    try:
        parsed: JSON = json.loads(answer)
    except (ValueError, RecursionError):
        return answer
    is_labels = isinstance(parsed, list) or (isinstance(parsed, dict) and "target" in parsed)
    return parsed if is_labels else answer


def _as_tag(name: str, arguments: Mapping[str, JSON] | None) -> str:
    return f"<{name}>{' '.join(map(str, (arguments or {}).values()))}</{name}>"
