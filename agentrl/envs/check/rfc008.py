"""The checks of OpenEnv's RFC 008 (environment auto-validation), and how each is decided here.

`CHECKS` has a row for each id of its severity policy v2: level, lane and severity are theirs; `codes` are the
findings of ours that fail it, `probes` what must have been tried before it can pass. The report, and the
table in docs/rfc-008.md, are made from these rows.

    outcome    pass       its probes were all played, and none of its findings is there
               fail       one of them is, and the policy's severity is `fail`; warn = the severity is lower
               skipped    nothing here decides it, or not for this environment, with the reason
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from agentrl.envs.check.findings import Code
from agentrl.types import JSON

MAX_EPISODE_S = 3600.0
"""The bound of their policy on `limits.episode_timeout_s` (seconds)."""
MIN_FLOOR_MARGIN = 0.1
"""The bound of their policy on how far below the expert a policy that does nothing must stay."""
DETERMINISM = "runtime.episode_determinism"
"""The check on which all checks of level 3 depend."""
LEVELS = {1: "static", 2: "runtime", 3: "semantic", 4: "statistical"}

Facts = Mapping[str, JSON]
"""The figures of a check, and what the environment declares, by name."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check of the RFC, and what decides it here.

    id, level, lane, severity: theirs. here: how it is decided, or why it is not.
    hub_level: the level of one for hubs, whose id does not say it.
    probes: names of what must have been tried. codes: findings that fail it. figures: those it shows.
    needs: the key of what the environment must declare, with the reason to skip it otherwise.
    also: from the facts to a sentence of what else is wrong; "" = nothing.
    """

    id: str
    here: str
    severity: Literal["fail", "warn", "advisory"] = "fail"
    hub_level: int = 1
    probes: tuple[str, ...] = ()
    codes: tuple[Code, ...] = ()
    figures: tuple[str, ...] = ()
    needs: tuple[str, str] = ("", "")
    also: Callable[[Facts], str] | None = None

    @property
    def level(self) -> int:
        """One of `LEVELS`."""
        return {name: level for level, name in LEVELS.items()}.get(self.id.partition(".")[0], self.hub_level)

    @property
    def lane(self) -> Literal["local", "hub"]:
        """Who runs it: an author, or the operator of a hub."""
        return "hub" if self.id.startswith(("hub.", "statistical.")) else "local"


def _too_long(facts: Facts) -> str:
    limit = facts.get("timeout_s")
    if isinstance(limit, int | float) and limit <= MAX_EPISODE_S:
        return ""
    shown = "None, which is no limit" if limit is None else f"{limit} s"
    return f"limits.episode_timeout_s is {shown}; the policy allows {MAX_EPISODE_S:g} s."


def _narrow(facts: Facts) -> str:
    best, floor = facts.get("expert_score"), facts.get("floor_score")
    if not isinstance(best, float) or not isinstance(floor, float) or best - floor >= MIN_FLOOR_MARGIN:
        return ""
    return f"the expert earns {best:.3f}, doing nothing {floor:.3f}; at least {MIN_FLOOR_MARGIN:g} apart."


def _over(facts: Facts) -> str:
    used, allowed = facts.get("memory_peak_mib"), facts.get("memory_gb")
    if not isinstance(used, float) or not isinstance(allowed, int | float) or not allowed:
        return ""
    if used * 2**20 <= allowed * 1e9:
        return ""
    return f"episodes take {used:.3g} MiB of Python's memory, resources.memory_gb is {allowed:g}."


_NO_IMAGE = "an environment here is a class of an installed package: no image is built"
_NO_TELEMETRY = "a verdict has its parts by name: `env`, `env/NAME`, and that of each `Reward`"
_OPERATOR = "reserved for the operator of a hub"

CHECKS: tuple[Check, ...] = (
    Check(
        "static.manifest",
        "there is no openenv.yaml: the attributes of the class are the declarations, and are checked when it "
        "is made; `measured` has them",
    ),
    Check("static.reproducible_build", _NO_IMAGE),
    Check("static.image_hygiene", _NO_IMAGE, severity="warn"),
    Check("static.layout", _NO_IMAGE, severity="warn"),
    Check("static.sbom", f"{_NO_IMAGE}; `pip inspect` lists what is installed"),
    Check("static.oci_labels", _NO_IMAGE),
    Check(
        "static.resource_declaration",
        "`resources` declares the CPUs, GPUs and memory of a process that plays it",
        probes=("tasks",),
        needs=("memory_gb", "`resources.memory_gb` is 0, which means not counted"),
    ),
    Check(
        "static.timeout_ceiling",
        f"`limits.episode_timeout_s` is at most {MAX_EPISODE_S:g} s",
        probes=("tasks",),
        also=_too_long,
    ),
    Check(
        "static.dependency_pinning",
        "a package declares ranges of versions; the exact ones belong to an installation",
    ),
    Check(
        "static.task_distribution_pinning",
        "two instances have the same tasks in the same order",
        probes=("tasks",),
        codes=("tasks-differ",),
        figures=("tasks",),
    ),
    Check(
        "runtime.startup",
        "instances are made, reset and closed",
        probes=("tasks", "close"),
        codes=("make-fails", "class-fails", "close-fails"),
    ),
    Check(
        "runtime.reward_well_formed",
        "every reward of every policy is a finite number; anything else fails the episode",
        probes=("expert", "chance", "leaving"),
        codes=("crash", "expert-fails"),
    ),
    Check("runtime.rubric_introspectable", _NO_TELEMETRY, severity="warn", probes=("chance",)),
    Check(
        "runtime.observation_schema",
        "observations are messages, which check themselves, and are of bounded length",
        probes=("expert", "chance"),
        codes=("crash", "expert-fails", "observation-unbounded"),
    ),
    Check(
        "runtime.state_contract",
        "an episode that is saved and loaded goes on as it was; its id and steps are in every `Episode`",
        probes=("state",),
        codes=("state-lost",),
        needs=("saves_state", "it saves no state"),
    ),
    Check(
        "runtime.trajectory_record",
        "`play` returns an `Episode` of every turn, reward and ending, whatever happens",
        severity="warn",
        probes=("chance",),
    ),
    Check("runtime.reward_attribution", _NO_TELEMETRY, severity="warn", probes=("chance",)),
    Check(
        "runtime.tool_declaration_accuracy",
        "the expert calls no tool that the model is not told of, and with arguments that fit the schema",
        probes=("tools",),
        codes=("tool-undeclared",),
        needs=("expert_plays", "it has no expert"),
    ),
    Check(
        "runtime.task_declaration_accuracy",
        "each split has its tasks, with ids of their own, and those that are played can be reset",
        probes=("tasks", "expert"),
        codes=("no-tasks", "tasks-fails", "duplicate-task-id", "splits-overlap", "expert-fails"),
        figures=("tasks",),
    ),
    Check(
        "runtime.seed_control",
        "all chance comes from the seed that `reset` gets; `other_seed_differs` says whether another one "
        "gave another episode, which it need not",
        probes=("same",),
        codes=("global-random", "not-repeatable"),
        figures=("other_seed_differs",),
    ),
    Check(
        DETERMINISM,
        "task, seed and actions give the same episode again",
        probes=("same",),
        codes=("not-repeatable", "global-random"),
    ),
    Check(
        "runtime.network_policy",
        "an environment whose `needs` lack `server` connects to no other host; what a child process does is "
        "not seen",
        probes=("network",),
        codes=("network-undeclared",),
        figures=("connections",),
    ),
    Check(
        "runtime.host_containment",
        "no call and no answer reads or writes a file of the host whose path it names",
        probes=("host",),
        codes=("host-readable", "host-writable"),
    ),
    Check(
        "runtime.resource_bounds",
        "episodes end by their limits, answer in bounded length and leave no memory behind; processor time "
        "is bounded by deadlines alone",
        probes=("chance", "memory"),
        codes=("observation-unbounded", "memory-grows"),
        figures=("memory_mib_per_100_episodes", "memory_peak_mib"),
    ),
    Check(
        "runtime.episode_isolation",
        "episodes at the same time change nothing in each other, and one that is cancelled leaves nothing",
        probes=("same", "cancel"),
        codes=(
            *("episodes-interfere", "ignores-cancelling", "global-random"),
            *("leaves-thread", "leaves-process", "leaves-file", "leaves-socket", "leaves-task"),
        ),
        figures=("cancels",),
    ),
    Check(
        "runtime.oracle_containment",
        "what the model is told of tools does not hold the answer, and the expert earns its score by its "
        "actions alone",
        probes=("leaks", "replay"),
        codes=("answer-in-tools", "not-replayable"),
        needs=("answers", "its tasks have no answers"),
    ),
    Check(
        "semantic.oracle_max",
        "the expert reaches `expert_score`",
        probes=("expert",),
        codes=("no-expert", "expert-fails", "expert-falls-short"),
        figures=("expert_score", "expert_score_low", "expert_score_high"),
    ),
    Check(
        "semantic.floor_gap",
        f"empty answers earn at least {MIN_FLOOR_MARGIN:g} less than the expert",
        probes=("expert", "chance"),
        codes=("nothing-to-learn",),
        figures=("expert_score", "floor_score"),
        also=_narrow,
        needs=("expert_plays", "it has no expert"),
    ),
    Check(
        "semantic.canary_floor",
        "the policies of the check, which do not solve the task, earn no more than `chance_score`, and "
        "leaving no more than losing",
        probes=("chance", "leaving"),
        codes=("above-chance", "leaving-pays"),
        figures=("best_adversary_score", "random_score", "policies", "leaving_gain"),
    ),
    Check(
        "semantic.no_solution_leakage",
        "neither the prompt nor what the world says to a policy that does nothing holds the answer",
        probes=("tasks", "leaks"),
        codes=("answer-in-prompt", "answer-in-observation"),
        needs=("answers", "its tasks have no answers"),
    ),
    Check(
        "semantic.verifier_determinism",
        "the same episodes, scored again, get the same scores",
        probes=("replay",),
        codes=("scores-differ", "not-repeatable"),
    ),
    Check(
        "semantic.verifier_portability",
        "rewards and graders connect to no other host",
        probes=("network",),
        codes=("network-undeclared",),
        needs=("offline", "its `needs` have `server`: its verifier may be one"),
    ),
    Check(
        "semantic.resource_envelope",
        "the memory of Python objects in episodes stays below `resources.memory_gb`",
        probes=("memory",),
        figures=("memory_peak_mib",),
        also=_over,
        needs=("memory_gb", "`resources.memory_gb` is 0, which means not counted"),
    ),
    Check(
        "semantic.replayability",
        "the recorded actions of an episode, played again, give the same observations and rewards",
        probes=("replay",),
        codes=("not-replayable", "not-repeatable"),
    ),
    Check("hub.layer_isolation", f"{_OPERATOR}; {_NO_IMAGE}", severity="warn"),
    Check(
        "hub.time_to_first_work",
        f"{_OPERATOR}; `reset_ms` is what a reset takes here",
        severity="warn",
        hub_level=2,
    ),
    Check("hub.cosign_signature", f"{_OPERATOR}; {_NO_IMAGE}", severity="warn"),
    Check("hub.cross_host_determinism", f"{_OPERATOR}: it needs another machine", hub_level=2),
    Check("hub.immutable_versioning", f"{_OPERATOR}: a version is published there"),
    Check("statistical.reward_reachability", f"{_OPERATOR}; `agentrl eval` measures pass@k of a model"),
    Check(
        "statistical.difficulty_separation",
        f"{_OPERATOR}; `agentrl benchmark` compares models with an interval",
    ),
    Check("statistical.headroom", f"{_OPERATOR}; it needs reference models", severity="warn"),
    Check("statistical.variance_bound", f"{_OPERATOR}; it needs reference models"),
    Check(
        "statistical.training_signal", f"{_OPERATOR}; a short `agentrl train` shows it", severity="advisory"
    ),
    Check(
        "statistical.adversarial_floor",
        f"{_OPERATOR}; `agentrl envs attack` searches for what pays without solving",
    ),
    Check("statistical.gameability_gap", f"{_OPERATOR}; it needs reference models", severity="warn"),
)


def table() -> list[str]:
    """The rows of `CHECKS` as lines of a table in Markdown."""
    lines = ["| check | level | severity | findings that fail it | here |", "|---|---|---|---|---|"]
    for check in CHECKS:
        codes = ", ".join(f"`{code}`" for code in check.codes) or ("" if check.probes else "skipped")
        unless = f" Skipped where {check.needs[1]}." if check.needs[0] else ""
        level = LEVELS[check.level] + (", hub" if check.lane == "hub" else "")
        lines.append(f"| `{check.id}` | {level} | {check.severity} | {codes} | {check.here}.{unless} |")
    return lines
