"""What openenv.yaml declares for a validation, in OpenEnv's normalized form (versions 1 and 2).

The classes have the fields and the rules of OpenEnv 0.10: what is read here is what `openenv validate` reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentrl.envs.check.rfc008 import MAX_EPISODE_S, MIN_FLOOR_MARGIN, Facts
from agentrl.types import JSON

_SECTIONS = (
    *("reward", "resources", "capabilities", "types", "network", "judge", "task_distribution", "execution"),
)
_MAX_ORACLE_TOLERANCE, _MAX_VARIANCE_TOLERANCE = 0.1, 0.2
_ROUNDED = 0.001
"""Scores are declared to three decimals."""
_SHOWN = 300
"""Characters of a declaration in a sentence."""

_Tag = Annotated[str, Field(min_length=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Reward(_Part):
    range: tuple[float, float] = (0.0, 1.0)
    oracle_tolerance: float = Field(default=0.0, ge=0.0)
    floor_margin: float = Field(ge=0.0)
    variance_tolerance: float | None = Field(default=None, ge=0.0)

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if not self.range[0] < self.range[1]:
            raise ValueError("range has to rise")
        return self


class _Judge(_Part):
    model: str
    version: str
    params: dict[str, JSON] = Field(default_factory=dict)


class _Resources(_Part):
    cpu: float = Field(gt=0.0)
    memory_mb: int = Field(gt=0)
    disk_mb: int = Field(gt=0)
    episode_timeout_s: float = Field(gt=0.0)
    gpus: int = Field(default=0, ge=0)
    gpu_types: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _types_have_gpus(self) -> Self:
        if self.gpu_types and not self.gpus:
            raise ValueError("gpu_types without gpus")
        return self


class _TaskDistribution(_Part):
    generator_seed: int | None = None
    dataset_version: str | None = None
    generator_model: str | None = None


class _Network(_Part):
    mode: Literal["public", "no-network", "allowlist"] = "public"
    allowed_hosts: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _hosts_are_those_of_a_list(self) -> Self:
        if (self.mode == "allowlist") != bool(self.allowed_hosts):
            raise ValueError("allowed_hosts go with mode allowlist, and only with it")
        return self


class _Oracle(_Part):
    form: Literal["injected_state", "script"]
    location: str


class _Verifier(_Part):
    kind: Literal["reward_channel", "script"]
    entry: str | None = None

    @model_validator(mode="after")
    def _a_script_has_a_path(self) -> Self:
        if (self.kind == "script") != (self.entry is not None):
            raise ValueError("entry goes with kind script, and only with it")
        return self


class _Capabilities(_Part):
    oracle: _Oracle | None = None
    verifier: _Verifier
    set_state: bool = False
    llm_judged: bool = False
    rubric_tree: bool = False
    task_api: bool = False
    canaries: str | None = None
    declared_tools: list[str] = Field(default_factory=list)
    declared_task_count: dict[str, int] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _a_state_can_be_set(self) -> Self:
        if self.oracle is not None and self.oracle.form == "injected_state" and not self.set_state:
            raise ValueError("an oracle of the form injected_state needs set_state: true")
        return self


class _Types(_Part):
    tags: list[_Tag] = Field(min_length=1)


class _Execution(_Part):
    kind: Literal["openenv_ws"] = "openenv_ws"
    probe_path: str = "validation/runtime.json"
    dockerfile: str = "Dockerfile"
    context: str = "."
    agent_boundary: Literal["api"] = "api"
    requires_credentials: bool = Field(default=False, strict=True)

    @model_validator(mode="after")
    def _paths_are_below_the_package(self) -> Self:
        for name in ("probe_path", "dockerfile", "context"):
            text = str(getattr(self, name))
            path = PurePosixPath(text)
            is_file = name == "context" or path != PurePosixPath(".")
            if (
                not text
                or set(text) & set("\\:\0")
                or path.is_absolute()
                or ".." in path.parts
                or not is_file
            ):
                raise ValueError(f"{name} has to be a path below the package")
        return self


class Manifest(_Part):
    """The normalized manifest: version 2 where `execution` declares how it is run, else version 1."""

    manifest_schema_version: Literal["1", "2"]
    name: str
    version: str | None = None
    signature: Literal["openenv.yaml"] = "openenv.yaml"
    reward: _Reward
    judge: _Judge | None = None
    resources: _Resources
    task_distribution: _TaskDistribution | None = None
    network: _Network = _Network()
    capabilities: _Capabilities
    types: _Types
    execution: _Execution | None = None

    @classmethod
    def of(cls, declared: object) -> Manifest:
        """The manifest in the content of an openenv.yaml.

        Raises:
            ValueError: it is none; a line for each fault.
        """
        validation = declared.get("validation") if isinstance(declared, Mapping) else None
        if not isinstance(declared, Mapping) or not isinstance(validation, Mapping):
            raise ValueError("openenv.yaml has no `validation` table, which declares reward and resources.")
        known = {name: value for name, value in validation.items() if name in _SECTIONS and value is not None}
        top = {"name": declared.get("name"), "version": declared.get("version")}
        schema = {"manifest_schema_version": "2" if "execution" in validation else "1"}
        try:
            return cls.model_validate({**top, **schema, **known})
        except ValidationError as error:
            lines = (
                f"{'.'.join(map(str, each['loc'])) or 'manifest'}: {each['msg']}." for each in error.errors()
            )
            raise ValueError("\n".join(lines)) from None

    def to_json(self) -> dict[str, JSON]:
        """As in OpenEnv's reports."""
        return self.model_dump(mode="json", exclude=set() if self.execution else {"execution"})

    @model_validator(mode="after")
    def _numbers_are_finite(self) -> Self:
        if not all(
            math.isfinite(number) for number in (*self.reward.range, self.resources.episode_timeout_s)
        ):
            raise ValueError("numbers have to be finite")
        return self

    @model_validator(mode="after")
    def _a_judge_is_pinned(self) -> Self:
        judged = self.capabilities.llm_judged
        if judged != (self.judge is not None):
            raise ValueError("judge goes with capabilities.llm_judged, and only with it")
        if judged and self.reward.variance_tolerance is None:
            raise ValueError("capabilities.llm_judged needs reward.variance_tolerance")
        return self

    def out_of_bounds(self) -> Iterator[str]:
        """A sentence for each declaration that their policy does not allow."""
        reward = self.reward
        if reward.oracle_tolerance > _MAX_ORACLE_TOLERANCE:
            yield f"oracle_tolerance is {reward.oracle_tolerance:g}, above {_MAX_ORACLE_TOLERANCE:g}."
        if reward.floor_margin < MIN_FLOOR_MARGIN:
            yield f"floor_margin is {reward.floor_margin:g}, at least {MIN_FLOOR_MARGIN:g} asked for."
        if (reward.variance_tolerance or 0.0) > _MAX_VARIANCE_TOLERANCE:
            yield (
                f"variance_tolerance is {reward.variance_tolerance:g}, at most {_MAX_VARIANCE_TOLERANCE:g} "
                "allowed."
            )
        yield from self.late()

    def misdeclared(self, declared: Facts, figures: Mapping[str, float]) -> dict[str, str]:
        """What the environment that was played has or does otherwise: a sentence each, by the check's id.

        declared, figures: as in the report of its check; what was not tried is not compared.
        """
        return {check: text for check, text in self._misdeclared(declared, figures) if text}

    def _misdeclared(self, declared: Facts, figures: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        tools, tasks = declared.get("tools"), declared.get("tasks_by_split")
        named, counts = self.capabilities.declared_tools, self.capabilities.declared_task_count
        if isinstance(tools, list) and sorted(named) != sorted(map(str, tools)):
            yield "runtime.tool_declaration_accuracy", _differs("declared_tools", list(named), tools)
        if isinstance(tasks, dict) and counts != tasks:
            yield "runtime.task_declaration_accuracy", _differs("declared_task_count", dict(counts), tasks)
        (low, high), reward, of = self.reward.range, self.reward, partial(_of_first, figures)
        lowest, highest = of("lowest_reward"), of("highest_reward")
        if lowest is not None and highest is not None and not (low <= lowest and highest <= high):
            yield "runtime.reward_well_formed", _differs("range", [low, high], [lowest, highest])
        best, at_most, floor = of("expert_score"), of("expert_score_high"), of("floor_score")
        if best is None or at_most is None:
            return
        if at_most < high - reward.oracle_tolerance - _ROUNDED:
            text = f"{_declares('range', [low, high])} and oracle_tolerance {reward.oracle_tolerance:g}"
            yield "semantic.oracle_max", f"{text}, the expert earns {best:g}; declare what it earns."
        if floor is not None and best - floor < reward.floor_margin - _ROUNDED:
            text = f"{_declares('floor_margin', reward.floor_margin)}, doing nothing earns {floor:g}"
            yield "semantic.floor_gap", f"{text}, the expert {best:g}; declare what lies between them."

    def late(self) -> Iterator[str]:
        """A sentence where an episode may take longer than their policy allows."""
        seconds = self.resources.episode_timeout_s
        if seconds > MAX_EPISODE_S:
            yield f"episode_timeout_s is {seconds:g}, at most {MAX_EPISODE_S:g} allowed."


def _of_first(figures: Mapping[str, float], name: str) -> float | None:
    """A figure of a check; of several agents that of the first one, which is served."""
    return next((number for key, number in figures.items() if key.rpartition("/")[2] == name), None)


def _declares(name: str, value: JSON) -> str:
    return f"openenv.yaml declares {name} {json.dumps(value):.{_SHOWN}}"


def _differs(name: str, declared: JSON, found: JSON) -> str:
    return f"{_declares(name, declared)}, the environment has {json.dumps(found):.{_SHOWN}}; declare that."
