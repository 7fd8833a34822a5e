"""What SGLang drafts with: layers of the policy that learn as it does, or what stays behind it."""

from __future__ import annotations

from agentrl.engine.config import Arguments, EngineConfig
from agentrl.trainer.config import TrainerConfig

_WITHOUT_MODEL = ("NGRAM", "LOOKAHEAD")
"""Algorithms that draft from text that was sampled before."""
_PATH = "speculative_draft_model_path"


def check(trainer: TrainerConfig, engine: EngineConfig, *, plays: bool) -> None:
    """Check that layers which predict further ahead are trained where something is done with them.

    plays: whether the run has an engine.

    Raises:
        ValueError: they are not.
    """
    if not trainer.enable_mtp_training:
        return
    if trainer.trainer != "megatron":
        raise ValueError("enable_mtp_training needs trainer = megatron: choose it, or leave it out.")
    if not plays:
        return
    if engine.engine != "sglang":
        raise ValueError(
            "enable_mtp_training trains layers that SGLang drafts with, and engine = embedded has no use for "
            "them: choose engine = sglang, or leave it out."
        )
    if engine.update_weights_transport == "distributed":
        raise ValueError(
            "update_weights_transport = distributed reaches no layers that SGLang drafts with, and "
            "enable_mtp_training changes these: choose tensor or disk, or leave one out."
        )
    if any(_PATH in arguments for arguments in _arguments(engine)):
        raise ValueError(
            f"enable_mtp_training trains the policy's own layers, and {_PATH} has SGLang draft with another "
            "model: leave one out."
        )


def warnings(trainer: TrainerConfig, engine: EngineConfig) -> tuple[str, ...]:
    """A sentence where SGLang drafts with weights that stay as they are while the policy learns."""
    if engine.engine != "sglang" or trainer.enable_mtp_training:
        return ()
    drafting = [a for a in _arguments(engine) if _algorithm(a) not in ("", *_WITHOUT_MODEL)]
    if not drafting:
        return ()
    what = "layers of the policy that predict several tokens, and these are"
    remedy = "enable_mtp_training (trainer = megatron) trains them"
    if (path := drafting[0].get(_PATH)) is not None:
        what, remedy = f"{path}, and that is", "speculative_algorithm = NGRAM needs no model"
    return (
        f"SGLang drafts with {what} not trained: as the policy learns, fewer drafts are accepted and it "
        f"decodes more slowly (rollout/spec_accept_rate); {remedy}.",
    )


def _arguments(engine: EngineConfig) -> list[Arguments]:
    """Of each group of the policy's servers, by SGLang's names."""
    return [
        {name.removeprefix("--").replace("-", "_"): value for name, value in given.items()}
        for given in (engine.arguments_of(group) for group in engine.groups)
    ]


def _algorithm(arguments: Arguments) -> str:
    return str(arguments.get("speculative_algorithm") or "").upper()
