"""The engine's settings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from agentrl.config import Section
from agentrl.types import JSON

Seconds = Annotated[float, Field(gt=0)]
Arguments = dict[str, JSON]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


Role: TypeAlias = Literal["regular", "prefill", "decode"]
"""All of it; or one server reads the prompt, and another writes the answer."""


def incomplete(roles: Collection[Role]) -> str:
    """What servers of these roles lack to serve requests together, in a sentence; nothing of it: ""."""
    if set(roles) in ({"regular"}, {"prefill", "decode"}, set()):
        return ""
    there = " and ".join(sorted(roles))
    return f"servers that are {there} cannot serve together; have regular ones, or both prefill and decode."


class ServerGroup(Section):
    """SGLang servers that are alike, of several groups that serve the policy."""

    worker_type: Role = "regular"
    """Does all of a request; or `prefill` only reads its prompt, and `decode` only writes the answer."""
    num_engines: int = Field(default=1, ge=1)
    """Servers (count)."""
    num_gpus_per_engine: int | None = Field(default=None, ge=0)
    """GPUs of each (count); left out, rollout_num_gpus_per_engine."""
    sglang: Arguments = Field(default_factory=dict)
    """SGLang's own arguments, over those of all groups."""


class ServedModel(Section):
    """A model beside the policy, such as a judge. It is never given weights."""

    hf_checkpoint: str
    """Its Hugging Face model directory."""
    num_engines: int = Field(default=1, ge=1)
    """Servers (count); a router stands before several."""
    num_gpus_per_engine: int = Field(default=0, ge=0)
    """GPUs of each (count), after those of the policy; 0 = they compute on the CPU."""
    sglang: Arguments = Field(default_factory=dict)
    """SGLang's own arguments; those of the policy are not its."""


_OF_POLICY_SERVERS = ("rollout_num_engines", "rollout_num_gpus_per_engine", "sglang_groups", "sglang")
_OF_SERVERS = (
    *("sglang_python", "rollout_health_check_interval", "rollout_health_check_timeout"),
    "rollout_health_check_first_wait",
)


class EngineConfig(Section):
    """Which engine samples, where it runs, and how it gets new weights."""

    engine: Literal["embedded", "sglang"] = "embedded"
    """The inference engine; `embedded` decodes on the CPU. `sglang` is servers: those that
    the run starts, or that run already, at sglang_url."""

    max_slots: int = Field(default=256, ge=1)
    """Requests decoded at once, or sent to servers at once; more of them wait in a queue (count)."""

    max_context_len: int | None = Field(default=None, ge=2)
    """Tokens one request may have, prompt and completion together; none = the episode's limit, or what a
    server's model has."""

    sglang_url: str | None = None
    """Address of an SGLang server, of `agentrl serve` or of a router, e.g. http://127.0.0.1:30000. In an
    eval-only run it serves the weights of the model that is scored; a run that trains sends it its own."""

    rollout_num_engines: int = Field(default=1, ge=1)
    """SGLang servers that the run starts; a router stands before several (count)."""

    rollout_num_gpus_per_engine: int = Field(default=0, ge=0)
    """GPUs of each (count); 0 = they compute on the CPU."""

    sglang_python: str | None = None
    """Python interpreter that SGLang is installed for; none = the one that runs agentrl."""

    sglang: dict[str, JSON] = Field(default_factory=dict)
    """SGLang's own arguments, by their names (a table; as flags: --sglang-mem-fraction-static 0.8)."""

    sglang_groups: list[ServerGroup] = Field(default_factory=list)
    """Groups of the policy's servers (a list of tables: worker_type, num_engines, num_gpus_per_engine,
    sglang), such as some that prefill and some that decode; left out, rollout_num_engines that are alike."""

    sglang_models: dict[Name, ServedModel] = Field(default_factory=dict)
    """Models served beside the policy (a table of tables, by name: hf_checkpoint, num_engines,
    num_gpus_per_engine, sglang). An environment's argument "sglang_models.NAME" becomes the address."""

    update_weights_transport: Literal["tensor", "distributed", "disk", "delta"] = "tensor"
    """How new weights get to the servers: through memory of this machine, a process group, a folder with
    whole checkpoints, or one with what has changed."""

    rollout_health_check_interval: Seconds = 10.0
    """Time between two looks at a server's health (seconds)."""

    rollout_health_check_timeout: Seconds = 30.0
    """How long a server may take to say that it is well; then it is started again (seconds)."""

    rollout_health_check_first_wait: Seconds = 600.0
    """How long a server may take to come up (seconds)."""

    @property
    def inactive(self) -> dict[str, str]:
        """What is said of servers, where there are none, or where they run already."""
        starts_servers = self.engine == "sglang" and self.sglang_url is None
        found: dict[str, str] = {}
        if self.engine != "sglang":
            others = ("sglang_url", "update_weights_transport", *_OF_POLICY_SERVERS)
            found |= dict.fromkeys(others, "without engine = sglang; choose it")
        elif not starts_servers:
            found |= dict.fromkeys(
                _OF_POLICY_SERVERS, "with sglang_url, whose servers run already; drop that"
            )
        if not starts_servers and not self.sglang_models:
            nobody = "without servers that the run starts (engine = sglang); choose that"
            found |= dict.fromkeys(_OF_SERVERS, nobody)
        return found

    @model_validator(mode="after")
    def _an_address_belongs_to_sglang(self) -> EngineConfig:
        if self.sglang_url is not None and self.engine != "sglang":
            raise ValueError(
                f"sglang_url = {self.sglang_url} needs engine = sglang; set it, or leave the address out."
            )
        return self

    @model_validator(mode="after")
    def _arguments_are_those_of_our_servers(self) -> EngineConfig:
        if self.engine == "sglang" and self.sglang_url is None:
            return self
        if self.sglang:
            raise ValueError(
                f"sglang = {self.sglang} are arguments of servers that the run starts; it starts some with "
                "engine = sglang and no sglang_url."
            )
        if self.sglang_groups:
            raise ValueError(
                "sglang_groups are of servers that the run starts; it starts some with engine = sglang and "
                "no sglang_url."
            )
        return self

    @model_validator(mode="after")
    def _groups_make_up_a_whole(self) -> EngineConfig:
        if self.sglang_groups and self.rollout_num_engines > 1:
            raise ValueError(
                f"rollout_num_engines = {self.rollout_num_engines} stands beside sglang_groups, each of "
                "which has num_engines; leave it out."
            )
        if problem := incomplete({group.worker_type for group in self.sglang_groups}):
            raise ValueError(f"sglang_groups: {problem}")
        return self

    @property
    def groups(self) -> Sequence[ServerGroup]:
        """The groups of the policy's servers, derived where they were left out."""
        return self.sglang_groups or [ServerGroup(num_engines=self.rollout_num_engines)]

    def gpus_of(self, group: ServerGroup) -> int:
        """GPUs of each of its servers (count)."""
        given = group.num_gpus_per_engine
        return self.rollout_num_gpus_per_engine if given is None else given
