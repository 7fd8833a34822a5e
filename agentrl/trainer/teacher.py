"""A teacher in the trainer's ranks: a network of theirs, in one of its roles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.algorithms.distillation import aligned, check_rows, teachers_row
from agentrl.types import FloatArray, Sample, ScoreRole
from agentrl.types.seams import Trainer


@dataclass(frozen=True, slots=True)
class TrainerTeacher:
    """Scores by the trainer: `teacher` is a model of its own, `old` the policy, `ref` its reference.

    max_tokens: of a row with a privileged prompt (count).
    """

    role: ScoreRole
    max_tokens: int

    @property
    def uses_trainer(self) -> bool:
        """Whether it has to wait for the trainer: it does."""
        return True

    async def logprobs(self, samples: Sequence[Sample], trainer: Trainer) -> tuple[FloatArray, ...]:
        """Logprobs of the sampled tokens at the sample's temperature, [T] for each sample.

        Raises:
            UserError: a privileged prompt leaves no room for the sample's tokens.
            TrainerError: a rank failed.
        """
        rows = [teachers_row(sample) for sample in samples]
        check_rows(samples, rows, self.max_tokens)
        scores = await trainer.score(rows, (self.role,))
        values = {"old": scores.proximal, "ref": scores.ref, "teacher": scores.teacher}[self.role]
        assert values is not None, "a trainer returns the roles that it is asked for"
        return aligned(samples, values)
