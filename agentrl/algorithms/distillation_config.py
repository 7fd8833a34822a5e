"""Settings of on-policy distillation: the table `[algorithm.opd]`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from agentrl.config import Needs, Positive, Section


class OpdConfig(Section):
    """The teacher of on-policy distillation, and its weight."""

    prefix: ClassVar[str] = "opd"

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
    teacher_key_env: Annotated[str | None, Needs("teacher_url")] = None
    """Environment variable with the key of the teacher's servers; left out, none is sent
    (opd_teacher_url)."""
    teacher_timeout_s: Annotated[Positive, Needs("teacher_url")] = 600.0
    """Time that the teacher's servers may take for one sample, with all retries, before the run stops with a
    sentence (seconds; opd_teacher_url)."""
    teacher_concurrency: Annotated[int, Field(ge=1), Needs("teacher_url")] = 64
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

    def check(
        self, privileged_context_path: str | None, temperature: float, *, is_renormalised: bool
    ) -> None:
        """Check that this teacher can score what is played with these settings.

        is_renormalised: the policy's logprobs are over the tokens that top-p and top-k kept.

        Raises:
            ValueError: it would read what the policy reads; or it is served, and the tokens are of another
                temperature or renormalised, which no server does.
        """
        if self.teacher is not None and privileged_context_path is None:
            raise ValueError(
                f"opd_teacher = {self.teacher} teaches by what it reads and the policy does not; name a "
                "function that returns it (privileged_context_path), such as "
                "agentrl.algorithms.distillation:answer."
            )
        if self.teacher_url is not None and temperature != 1.0:
            raise ValueError(
                "opd_teacher_url: servers give logprobs of prompts at temperature 1, and rollout_temperature "
                f"is {temperature:g}; sample at 1, or load the teacher (opd_teacher_load)."
            )
        if self.teacher_url is not None and is_renormalised:
            raise ValueError(
                "opd_teacher_url: servers give logprobs of all tokens, and replay_sampling_mask renormalises "
                "the policy's over those that were kept; load the teacher (opd_teacher_load), or sample with "
                "rollout_top_p = 1 and rollout_top_k = 0."
            )
