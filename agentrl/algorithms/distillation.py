"""Privileged prompts: what the teacher of self-distillation reads and the policy does not.

The teacher scores the policy's own tokens, verbatim, after a first prompt that holds more:

    policy's row    w1 w2          p1 p2 w3 p3
    teacher's row   w1 v1 v2 w2    p1 p2 w3 p3

So the tokens from the first sampled one on correspond one to one, whatever the prompts' lengths are. The
agent renders the teacher's prompt beside its own, so that tools and rewritten histories are those of the
episode.

Sources: on-policy self-distillation, where the prompt holds a reference solution,
https://arxiv.org/abs/2601.18734; self-distillation fine-tuning, where it holds a demonstration,
https://arxiv.org/abs/2601.19897.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from agentrl.errors import UserError
from agentrl.types import (
    AGENT,
    NO_VERSION,
    Author,
    Extra,
    FloatArray,
    IntArray,
    Message,
    Observation,
    Sample,
    Task,
    Text,
    joined_extras,
)

N = TypeVar("N", bound=np.generic)

PrivilegedContext: TypeAlias = Callable[[Task, str], str | None]
"""The text that the teacher's prompt has and the policy's has not, from a task and the name of an agent.

None = the teacher reads the policy's own prompt.
"""

_SEPARATOR = "\n\n"
_TASK = Task.ask("check_privileged_context", "What is 1 + 1?", answer="2")


def answer(task: Task, agent: str) -> str | None:
    """The answer of the task, where it has one, and the request to solve it by oneself."""
    del agent
    if task.answer is None:
        return None
    return f"The right answer is: {task.answer}\nWork it out in your own words."


def privileged_text(context: PrivilegedContext, task: Task, agent: str) -> str | None:
    """What a function of a user says of a task.

    Raises:
        ValueError: it is neither text nor None.
    """
    text: object = context(task, agent)
    if text is not None and not (isinstance(text, str) and text):
        raise ValueError(f"a privileged context is text, or None for none, and it returned {text!r:.80}")
    return text


def check_privileged_context(context: PrivilegedContext, task: Task = _TASK) -> None:
    """Check a function of your own: it is called with a task and the name of an agent.

    Raises:
        ValueError: it returned neither text nor None. Its own errors are not caught.
    """
    privileged_text(context, task, AGENT)


def privileged_prompt(prompt: Observation, text: str) -> Observation:
    """The prompt with the text at the end of the question.

    That is the last message of the user before the model's first; where there is none, the last of the user;
    where there is none either, the first message.
    """
    first_turn = next((n for n, message in enumerate(prompt) if message.role == "assistant"), len(prompt))
    of_user = [n for n, message in enumerate(prompt) if message.role == "user"]
    at = max((n for n in of_user if n < first_turn), default=of_user[-1] if of_user else 0)
    return (*prompt[:at], _extended(prompt[at], text), *prompt[at + 1 :])


def teachers_row(sample: Sample) -> Sample:
    """The sample as the teacher reads it: with its privileged prompt, where it has one."""
    ids, start = sample.privileged_ids, first_sampled(sample)
    if ids is None:
        return sample

    def world(fill: int) -> IntArray:
        return np.full(len(ids), fill, dtype=np.int32)

    def row(prompt: IntArray, array: npt.NDArray[N]) -> npt.NDArray[N]:
        return np.concatenate([prompt.astype(array.dtype), array[start:]])

    return Sample(
        token_ids=row(ids, sample.token_ids),
        author=row(world(Author.WORLD), sample.author),
        loss_mask=row(world(False), sample.loss_mask),
        logprobs=row(world(0), sample.logprobs),
        versions=row(world(NO_VERSION), sample.versions),
        turns=row(world(int(sample.turns[0])), sample.turns),
        temperatures=row(world(1), sample.temperatures),
        rollout_id=sample.rollout_id,
        # Where the policy renormalises over what was kept, its teacher does, too.
        extras=joined_extras([(len(ids), {}), (len(sample) - start, _from(start, sample.extras))]),
    )


def _from(start: int, extras: Mapping[str, Extra]) -> dict[str, Extra]:
    return {name: extra.take(np.arange(start, len(extra))) for name, extra in extras.items()}


def check_rows(samples: Sequence[Sample], rows: Sequence[Sample], max_tokens: int) -> None:
    """Check that the teacher's rows are no longer than the trainer's may be.

    Raises:
        UserError: a privileged prompt makes one longer.
    """
    for sample, row in zip(samples, rows, strict=True):
        if sample.privileged_ids is not None and len(row) > max_tokens:
            raise UserError(
                f"the teacher's row of episode {sample.rollout_id.episode} has {len(row):,} tokens, "
                f"{len(sample.privileged_ids):,} of them its privileged prompt, and a row may have "
                f"{max_tokens:,}; shorten what privileged_context_path returns, or raise max_tokens_per_gpu, "
                "then resume the run."
            )


def first_sampled(sample: Sample) -> int:
    """The position of the first token that the policy sampled; the sample's length where there is none."""
    sampled = np.flatnonzero(sample.author == Author.POLICY)
    return int(sampled[0]) if len(sampled) else len(sample)


def aligned(samples: Sequence[Sample], values: Sequence[FloatArray]) -> tuple[FloatArray, ...]:
    """Values of the teacher's rows at the tokens of the samples, [T] each; 0 in their first prompts."""
    arrays = []
    for sample, own in zip(samples, values, strict=True):
        array = np.zeros(len(sample), dtype=np.float32)
        if count := len(sample) - first_sampled(sample):
            array[-count:] = own[-count:]
        arrays.append(array)
    return tuple(arrays)


def _extended(message: Message, text: str) -> Message:
    if isinstance(message.content, str):
        return replace(message, content=f"{message.content}{_SEPARATOR}{text}")
    return replace(message, content=(*message.content, Text(f"{_SEPARATOR}{text}")))
