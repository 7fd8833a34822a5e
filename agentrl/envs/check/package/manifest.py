"""What openenv.yaml declares for a validation, in OpenEnv's normalized form (versions 1 and 2).

The classes have the fields and the rules of OpenEnv 0.10: what is read here is what `openenv validate` reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentrl.envs.check.rfc008 import MAX_EPISODE_S, MIN_FLOOR_MARGIN
from agentrl.types import JSON

_SECTIONS = (
    *("reward", "resources", "capabilities", "types", "network", "judge", "task_distribution", "execution"),
)
_MAX_ORACLE_TOLERANCE, _MAX_VARIANCE_TOLERANCE = 0.1, 0.2

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

    def late(self) -> Iterator[str]:
        """A sentence where an episode may take longer than their policy allows."""
        seconds = self.resources.episode_timeout_s
        if seconds > MAX_EPISODE_S:
            yield f"episode_timeout_s is {seconds:g}, at most {MAX_EPISODE_S:g} allowed."
