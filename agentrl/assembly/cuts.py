"""What the trainer learns of the engine's sampling: which tokens it kept, and which experts they took.

And what the engine drafts with: layers of the policy that learn as it does, or what stays behind it.
"""

from __future__ import annotations

from agentrl.engine.config import MAX_TOP_LOGPROBS, Arguments, EngineConfig
from agentrl.rollout.config import RolloutConfig
from agentrl.trainer.config import TrainerConfig

_WITHOUT_MODEL = ("NGRAM", "LOOKAHEAD")
"""Algorithms that draft from text that was sampled before."""
_PATH = "speculative_draft_model_path"


def are_replayed(rollout: RolloutConfig, engine: EngineConfig) -> bool:
    """Whether `replay_sampling_mask` acts, derived where it was left out."""
    if not rollout.cuts:
        return False
    chosen = rollout.replay_sampling_mask
    return engine.reports_kept_ids(rollout.rollout_top_k) if chosen is None else chosen


def warnings(rollout: RolloutConfig, engine: EngineConfig) -> tuple[str, ...]:
    """A sentence where a cut biases the gradient."""
    if not rollout.cuts or rollout.debug_rollout_only or are_replayed(rollout, engine):
        return ()
    remedy = "replay_sampling_mask corrects it"
    if not engine.reports_kept_ids(rollout.rollout_top_k):
        remedy = f"with rollout_top_k of 1 to {MAX_TOP_LOGPROBS}, {remedy}"
    return (
        f"rollout_top_p = {rollout.rollout_top_p:g} and rollout_top_k = {rollout.rollout_top_k} cut the "
        "distribution that is sampled, while logprobs and gradients are the whole policy's: the gradient is "
        f"biased towards tokens that the cut kept; {remedy}, and 1 and 0 switch both off.",
    )


def check(rollout: RolloutConfig, engine: EngineConfig) -> None:
    """Check that the engine can report what it keeps. Behind an address there may be one that always does.

    Raises:
        ValueError: replay_sampling_mask is on, and it cannot.
    """
    is_asked = rollout.cuts and rollout.replay_sampling_mask and engine.sglang_url is None
    if is_asked and not engine.reports_kept_ids(rollout.rollout_top_k):
        raise ValueError(
            "replay_sampling_mask needs to know which tokens are kept, and SGLang reports at most the "
            f"{MAX_TOP_LOGPROBS} likeliest; set rollout_top_k to 1 to {MAX_TOP_LOGPROBS}, or switch "
            "replay_sampling_mask off."
        )


def returns_experts(rollout: RolloutConfig, trainer: TrainerConfig) -> bool:
    """Whether `return_routed_experts` acts, derived where it was left out."""
    if rollout.replay is not None:
        return False
    chosen = rollout.return_routed_experts
    is_trained = not rollout.debug_rollout_only
    return is_trained and trainer.router_replay == "R3" if chosen is None else chosen


def check_routing(rollout: RolloutConfig, trainer: TrainerConfig, *, has_own_pass: bool) -> None:
    """Check that there is something to replay.

    has_own_pass: whether the trainer computes the logprobs of the policy before the first update.

    Raises:
        ValueError: router_replay takes experts that nobody records.
    """
    if trainer.router_replay == "R3" and rollout.return_routed_experts is False:
        raise ValueError(
            "router_replay = R3 replays the experts that the engine took, and return_routed_experts = false "
            "has it keep them to itself; drop one."
        )
    if trainer.router_replay == "R2" and not has_own_pass:
        raise ValueError(
            "router_replay = R2 replays the pass in which the trainer computes logprobs before an update, "
            "and this run has none; set use_rollout_logprobs = false, or router_replay = R3."
        )


def check_experts(engine: EngineConfig) -> None:
    """Check that the servers know the experts of all tokens.

    Raises:
        ValueError: they pass on what they have computed of a prompt, and its experts are not passed on.
    """
    if engine.engine != "sglang":
        return
    if kinds := {group.worker_type for group in engine.groups} - {"regular"}:
        raise ValueError(
            f"a server that only runs {min(kinds)} does not know the experts of whole requests "
            "(return_routed_experts); have regular ones."
        )
    names = {name.replace("-", "_") for group in engine.groups for name in engine.arguments_of(group)}
    if stores := names & {"enable_hierarchical_cache", "enable_hicache"}:
        raise ValueError(
            f"{min(stores)} brings back what was computed of a prompt without its experts "
            "(return_routed_experts); leave it out."
        )


def check_drafts(trainer: TrainerConfig, engine: EngineConfig, *, plays: bool) -> None:
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
    if any(_PATH in arguments for arguments in _given(engine)):
        raise ValueError(
            f"enable_mtp_training trains the policy's own layers, and {_PATH} has SGLang draft with another "
            "model: leave one out."
        )


def drafts_told(trainer: TrainerConfig, engine: EngineConfig) -> tuple[str, ...]:
    """A sentence where SGLang drafts with weights that stay as they are while the policy learns."""
    if engine.engine != "sglang" or trainer.enable_mtp_training:
        return ()
    drafting = [a for a in _given(engine) if _algorithm(a) not in ("", *_WITHOUT_MODEL)]
    if not drafting:
        return ()
    what = "layers of the policy that predict several tokens, and these are"
    remedy = "enable_mtp_training (trainer = megatron) trains them"
    if (path := drafting[0].get(_PATH)) is not None:
        what, remedy = f"{path}, and that is", "NGRAM drafts without a model"
    return (
        f"SGLang drafts with {what} not trained: as the policy learns, fewer drafts are accepted and it "
        f"decodes more slowly (rollout/spec_accept_rate); {remedy}.",
    )


def _given(engine: EngineConfig) -> list[Arguments]:
    """Of each group of the policy's servers, by SGLang's names."""
    return [
        {name.removeprefix("--").replace("-", "_"): value for name, value in given.items()}
        for given in (engine.arguments_of(group) for group in engine.groups)
    ]


def _algorithm(arguments: Arguments) -> str:
    return str(arguments.get("speculative_algorithm") or "").upper()
