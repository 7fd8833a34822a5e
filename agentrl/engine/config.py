"""The engine's settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from agentrl.config import Changes, Section
from agentrl.types import JSON

Seconds = Annotated[float, Field(gt=0)]
Arguments = dict[str, JSON]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


MAX_TOP_LOGPROBS = 128
"""Likeliest tokens that SGLang may be asked for: a prefill server hands over no more (count)."""


def reports_prefix(top_k: int) -> bool:
    """Whether the likeliest tokens that SGLang reports have all ids that top_k keeps."""
    return 0 < top_k <= MAX_TOP_LOGPROBS


GPU_DTYPE, CPU_DTYPE = "bfloat16", "float32"
"""What a server computes in where its argument `dtype` is left out. SGLang's own choice would be float16 for
a checkpoint in float32, whose range is too small for some models."""
_FP32 = ("float32", "float")
HALF_ONLY = (
    "a server on a GPU cannot compute in float32, since SGLang's CUDA kernels take half precision only; "
    f"leave its dtype out ({GPU_DTYPE}), or give it no GPU, and it computes on the CPU."
)
"""Why float32 is refused there."""


def dtype_of(arguments: Mapping[str, object], *, on_gpu: bool) -> str:
    """What a server with these arguments computes in, by SGLang's name."""
    chosen = {name.removeprefix("--"): value for name, value in arguments.items()}
    return str(chosen.get("dtype", GPU_DTYPE if on_gpu else CPU_DTYPE))


def is_too_wide(arguments: Mapping[str, object], *, on_gpu: bool) -> bool:
    """Whether a server with these arguments cannot start, since it would compute in float32 on a GPU."""
    return on_gpu and dtype_of(arguments, on_gpu=on_gpu) in _FP32


Role: TypeAlias = Literal["regular", "prefill", "decode"]
"""The stages of a request that a server runs: both, or only prefill or decode."""


def _addresses(value: object) -> object:
    """One address, or several; in text with commas between them."""
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        return value
    found = tuple(word.strip().rstrip("/") for word in words)
    if not all(found) or len({*found}) < len(found):
        raise ValueError(f"{value!r} has an empty address, or one twice; name each server once.")
    return found[0] if len(found) == 1 else found


def incomplete(roles: Collection[Role | None]) -> str:
    """An error message where servers of these roles cannot serve requests together; "" where they can.

    None is a place without a server.
    """
    if set(roles) == {None}:
        return "there are placeholders alone; add a group of servers, or leave it out."
    own = {role for role in roles if role is not None}
    if own in ({"regular"}, {"prefill", "decode"}, set()):
        return ""
    listed = " and ".join(sorted(own))
    return f"servers that are {listed} cannot serve together; have regular ones, or both prefill and decode."


class ServerGroup(Section):
    """A group of identical SGLang servers; several groups may serve the policy."""

    worker_type: Role | Literal["placeholder"] = "regular"
    """Stages of a request: `regular` runs both; `prefill` computes the prompt, `decode` the completion. No
    server is started for a `placeholder`, which keeps GPUs free."""
    num_engines: int = Field(default=1, ge=1)
    """Servers (count)."""
    num_gpus_per_engine: int | None = Field(default=None, ge=0)
    """GPUs of each (count); left out, rollout_num_gpus_per_engine."""
    sglang: Arguments = Field(default_factory=dict)
    """SGLang's own arguments, over those of all groups."""

    @property
    def role(self) -> Role | None:
        """Stages of a request that its servers run; None = it has no servers, only places."""
        return None if self.worker_type == "placeholder" else self.worker_type

    @model_validator(mode="after")
    def _a_placeholder_has_no_arguments(self) -> ServerGroup:
        if self.role is None and self.sglang:
            raise ValueError("a placeholder starts no server; leave its sglang out.")
        return self


class ServedModel(Section):
    """A further model, such as a judge. Its weights are never updated."""

    hf_checkpoint: str
    """Its Hugging Face model directory."""
    num_engines: int = Field(default=1, ge=1)
    """Servers (count); several get a router."""
    num_gpus_per_engine: int = Field(default=0, ge=0)
    """GPUs of each (count), after those of the policy; 0 = they compute on the CPU."""
    sglang: Arguments = Field(default_factory=dict)
    """SGLang's own arguments; those of the policy's servers do not apply."""

    @property
    def group(self) -> ServerGroup:
        """Its servers, as a group."""
        return ServerGroup(
            num_engines=self.num_engines, num_gpus_per_engine=self.num_gpus_per_engine, sglang=self.sglang
        )


_OF_POLICY_SERVERS = ("rollout_num_engines", "rollout_num_gpus_per_engine", "sglang_groups", "sglang")
_OF_HEALTH = (
    *("rollout_health_check_interval", "rollout_health_check_timeout"),
    "rollout_health_check_first_wait",
)


class EngineChoice(Section):
    """The inference engine: its kind, and its requests."""

    engine: Literal["embedded", "sglang"] = "embedded"
    """The inference engine; `embedded` decodes on the CPU. `sglang` is servers: those that
    the run starts, or that run already, at sglang_url."""

    max_slots: Annotated[int, Changes.SPEED] = Field(default=256, ge=1)
    """Requests decoded at once, or sent to servers at once; more of them wait in a queue (count)."""

    adaptive_concurrency: Annotated[bool, Changes.SPEED] = False
    """Whether fewer than max_slots requests are sent to SGLang servers where these have a queue, or where a
    cache is full: the youngest requests then stop, and go on when others have ended."""

    max_context_len: int | None = Field(default=None, ge=2)
    """Tokens one request may have, prompt and completion together; none = the episode's limit, or what a
    server's model has."""

    enable_deterministic_inference: bool = False
    """Whether the tokens and logprobs of a request are the same, bit for bit, whatever else the engine
    decodes; slower. Of the embedded engine; SGLang has a setting of that name for its servers."""

    engine_dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights and cache of the embedded engine; probabilities are computed in fp32 either way. bfloat16 takes
    half the memory, and logprobs are further from the trainer's. SGLang has a setting of its own,
    dtype in the table sglang."""

    sglang_url: Annotated[str | tuple[str, ...] | None, BeforeValidator(_addresses), Changes.SPEED] = None
    """Address of an SGLang server, of `agentrl serve` or of a router, e.g. http://127.0.0.1:30000; or several
    (a list; in a flag with commas between them), before which the run starts a router. In an eval-only run
    they serve the weights of the model that is scored; a run that trains sends them its own."""

    @property
    def addresses(self) -> Sequence[str]:
        """Those of sglang_url; none where it was left out."""
        url = self.sglang_url
        return (url,) if isinstance(url, str) else url or ()

    @model_validator(mode="after")
    def _an_address_belongs_to_sglang(self) -> EngineChoice:
        if self.sglang_url is not None and self.engine != "sglang":
            raise ValueError(
                f"sglang_url = {', '.join(self.addresses)} needs engine = sglang; set it, or leave "
                "sglang_url out."
            )
        return self


class EngineConfig(EngineChoice):
    """The inference engine: its kind, its servers, and the transport of new weights."""

    rollout_num_engines: Annotated[int, Changes.SPEED] = Field(default=1, ge=1)
    """SGLang servers that the run starts; several get a router (count)."""

    rollout_num_gpus_per_engine: Annotated[int, Changes.SPEED] = Field(default=0, ge=0)
    """GPUs of each (count); 0 = they compute on the CPU."""

    num_gpus_per_node: Annotated[int | None, Changes.SPEED] = Field(default=None, ge=1)
    """GPUs of a machine for one server (count): one with more of them is spread over several machines, as
    many on each (cluster = ray); left out, every server is on one machine."""

    sglang_python: Annotated[str | None, Changes.SPEED] = None
    """Python interpreter that SGLang, or its router, is installed for; none = the one that runs agentrl."""

    sglang: dict[str, JSON] = Field(default_factory=dict)
    """SGLang's own arguments, by their names (a table; as flags: --sglang-mem-fraction-static 0.8)."""

    router: Annotated[Arguments, Changes.SPEED] = Field(default_factory=dict)
    """Own arguments of sglang-router, which the run starts before several servers, by their names (a table;
    as flags: --router-policy cache_aware)."""

    sglang_groups: list[ServerGroup] = Field(default_factory=list)
    """Groups of the policy's servers (a list of tables: worker_type, num_engines, num_gpus_per_engine,
    sglang), such as some that prefill and some that decode; left out, rollout_num_engines identical ones."""

    sglang_models: dict[Name, ServedModel] = Field(default_factory=dict)
    """Further models to serve (a table of tables, by name: hf_checkpoint, num_engines,
    num_gpus_per_engine, sglang). An environment's argument "sglang_models.NAME" becomes the address."""

    update_weights_transport: Literal["tensor", "distributed", "disk", "delta", "lora"] | None = None
    """Transport of new weights to the servers: memory of this machine (tensor), which is that of the card
    where rank 0 of the trainer has one; a process group (distributed); a directory with complete checkpoints,
    or one with deltas; or, with lora_rank, adapters alone (lora), of which the servers keep those that
    episodes in flight may have begun with. Left out, tensor, or a process group where a server is on another
    machine."""

    pin_policy_version: bool = False
    """Sample a whole episode under the version of the policy that it began with, as long as the servers have
    it (update_weights_transport = lora)."""

    rollout_health_check_interval: Annotated[Seconds, Changes.SPEED] = 10.0
    """Interval between two health checks of a server (seconds)."""

    rollout_health_check_timeout: Annotated[Seconds, Changes.SPEED] = 30.0
    """Timeout of a health check; a server that exceeds it is restarted (seconds)."""

    rollout_health_check_first_wait: Annotated[Seconds, Changes.SPEED] = 600.0
    """How long a server may take to start; one at sglang_url, to answer again after its end (seconds)."""

    @property
    def inactive(self) -> dict[str, str]:
        """The settings of servers that have no effect here, with the reason of each."""
        starts_servers = self.engine == "sglang" and self.sglang_url is None
        reasons: dict[str, str] = {}
        if self.engine == "sglang":
            for own, name in (
                ("enable_deterministic_inference", "enable_deterministic_inference"),
                ("engine_dtype", "dtype"),
            ):
                flag = f"--sglang-{name.replace('_', '-')}"
                reasons[own] = f"with engine = sglang; set {name} in the table sglang ({flag})"
        if self.update_weights_transport != "lora":
            reasons["pin_policy_version"] = "without update_weights_transport = lora; choose it"
        if self.engine != "sglang":
            names = ("sglang_url", "update_weights_transport", "adaptive_concurrency", *_OF_POLICY_SERVERS)
            reasons |= dict.fromkeys(names, "without engine = sglang; choose it")
        elif not starts_servers:
            reasons |= dict.fromkeys(_OF_POLICY_SERVERS, self.without_servers)
        if all(self.machines_of(group) == 1 for group in self.all_groups):
            reasons["num_gpus_per_node"] = (
                "without a server of more GPUs than that; raise rollout_num_gpus_per_engine"
            )
        if not self.has_router:
            needed = "without several servers, before which a router is started; take several"
            reasons["router"] = needed
        if not starts_servers and "num_gpus_per_node" in reasons:
            reasons["num_gpus_per_node"] = self.without_servers
        if not (starts_servers or self.sglang_models or self.has_router):
            reasons["sglang_python"] = self.without_servers
            if self.engine != "sglang":
                reasons |= dict.fromkeys(_OF_HEALTH, self.without_servers)
        return reasons

    @property
    def without_servers(self) -> str:
        """Why no servers of the policy are started, as a reason in `inactive`."""
        if self.sglang_url is not None:
            return "with sglang_url, whose servers run already; drop that"
        return "without servers that are started (engine = sglang); choose that"

    @model_validator(mode="after")
    def _adapters_are_of_our_servers(self) -> EngineConfig:
        if self.update_weights_transport == "lora" and self.sglang_url is not None:
            raise ValueError(
                "update_weights_transport = lora is for servers that the run starts, with its model and with "
                "room for adapters; drop sglang_url, or choose another transport."
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
    def _servers_on_gpus_compute_in_half(self) -> EngineConfig:
        of_policy = [("", self.arguments_of(group), self.gpus_of(group)) for group in self.groups]
        of_models = [
            (f"sglang_models.{name}: ", model.sglang, model.num_gpus_per_engine)
            for name, model in self.sglang_models.items()
        ]
        for name, arguments, gpus in (*of_policy, *of_models):
            if is_too_wide(arguments, on_gpu=gpus > 0):
                raise ValueError(f"{name}{HALF_ONLY}")
        return self

    @model_validator(mode="after")
    def _servers_are_spread_evenly(self) -> EngineConfig:
        for group in self.all_groups:
            gpus, per_node = self.gpus_of(group), self.num_gpus_per_node
            if per_node is not None and gpus > per_node and gpus % per_node:
                raise ValueError(
                    f"a server of {gpus} GPUs cannot have as many on each machine of num_gpus_per_node = "
                    f"{per_node}; take a multiple of it."
                )
            if self.machines_of(group) > 1 and group.worker_type != "regular":
                raise ValueError(
                    f"a server that only runs {group.worker_type} is on one machine; give it {per_node} GPUs "
                    "at most (num_gpus_per_node), or have regular ones."
                )
        return self

    @model_validator(mode="after")
    def _groups_are_complete(self) -> EngineConfig:
        if self.sglang_groups and self.rollout_num_engines > 1:
            raise ValueError(
                f"rollout_num_engines = {self.rollout_num_engines} conflicts with sglang_groups, each of "
                "which has num_engines; leave it out."
            )
        if problem := incomplete({group.role for group in self.sglang_groups}):
            raise ValueError(f"sglang_groups: {problem}")
        return self

    @property
    def has_router(self) -> bool:
        """Whether the policy's servers are several, before which the run starts a router."""
        if self.sglang_url is not None:
            return len(self.addresses) > 1
        return self.engine == "sglang" and sum(group.num_engines for group in self.groups) > 1

    @property
    def groups(self) -> Sequence[ServerGroup]:
        """The groups of the policy's servers, derived where they were left out."""
        own = [group for group in self.sglang_groups if group.role is not None]
        return own or [ServerGroup(num_engines=self.rollout_num_engines)]

    @property
    def all_groups(self) -> Sequence[ServerGroup]:
        """The groups of all servers that are started: of the policy's, and of each further model's."""
        starts_servers = self.engine == "sglang" and self.sglang_url is None
        return [
            *(self.groups if starts_servers else ()),
            *(model.group for model in self.sglang_models.values()),
        ]

    def machines_of(self, group: ServerGroup) -> int:
        """Machines that each server of a group is on (count)."""
        gpus, per_node = self.gpus_of(group), self.num_gpus_per_node
        return 1 if per_node is None or gpus <= per_node else gpus // per_node

    @property
    def num_policy_gpus(self) -> int:
        """GPUs of the policy's servers (count)."""
        return sum(group.num_engines * self.gpus_of(group) for group in self.groups)

    def reports_kept_ids(self, top_k: int) -> bool:
        """Whether the engine is known to report which ids top_p and top_k keep, with this top_k."""
        return self.engine == "embedded" or reports_prefix(top_k)

    def arguments_of(self, group: ServerGroup) -> Arguments:
        """SGLang's own arguments of the servers of a group."""
        return {**self.sglang, **group.sglang}

    def gpus_of(self, group: ServerGroup) -> int:
        """GPUs of each server of a group (count)."""
        num_gpus = group.num_gpus_per_engine
        return self.rollout_num_gpus_per_engine if num_gpus is None else num_gpus
