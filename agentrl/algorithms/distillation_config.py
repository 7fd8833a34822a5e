"""Settings of on-policy distillation: the table `[algorithm.opd]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentrl.algorithms.correction_config import Positive
from agentrl.config import Section


class OpdConfig(Section):
    """The teacher of on-policy distillation, and its weight."""

    kl_coef: Positive = 1.0
    """Weight of the teacher in the advantages (use_opd)."""
    only: bool = False
    """Train towards the teacher alone: rewards are logged, and give no advantages (use_opd)."""
    teacher: Literal["self", "reference"] | None = None
    """The policy as its own teacher, or its reference, which ref_update_interval moves: it reads prompts that
    hold more, see privileged_context_path (use_opd)."""
    teacher_load: str | None = None
    """Hugging Face directory of a teacher in the trainer's processes, with the policy's vocabulary
    (use_opd)."""
    teacher_url: str | None = None
    """Address of a teacher that runs already, with the policy's tokenizer: of SGLang, a router or `agentrl
    serve`; several with commas (use_opd)."""
    teacher_key_env: str | None = None
    """Environment variable with the key of the teacher's servers; left out, none is sent
    (opd_teacher_url)."""
    teacher_timeout_s: Positive = 600.0
    """Time that the teacher's servers may take for one sample, with all retries, before the run stops with a
    sentence (seconds; opd_teacher_url)."""
    teacher_concurrency: Annotated[int, Field(ge=1)] = 64
    """Samples that are at the teacher's servers at a time (count; opd_teacher_url)."""

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of the teacher's servers."""
        return tuple(url.strip() for url in (self.teacher_url or "").split(",") if url.strip())

    @property
    def num_teachers(self) -> int:
        """How many are named, of which a run has one."""
        return sum(name is not None for name in (self.teacher, self.teacher_load, self.teacher_url))

    @model_validator(mode="after")
    def _has_addresses(self) -> OpdConfig:
        if self.teacher_url is not None and not self.urls:
            raise ValueError("opd_teacher_url holds no address; write one such as http://127.0.0.1:30000.")
        return self
