"""Settings of an eval-only run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from agentrl.config import IN_COMMAS, Changes, Count, Section
from agentrl.data.config import COLUMNS, EvalData
from agentrl.data.eval_sets import EvalSet
from agentrl.engine.chat.config import EndpointConfig
from agentrl.engine.config import EngineConfig
from agentrl.engine.served.config import Listening
from agentrl.envs.config import EnvArguments, GenerateChoice, LimitChoice, OpponentChoice, RewardChoice
from agentrl.evaluation.broken_tools import check_broken
from agentrl.processes.config import ClusterConfig
from agentrl.rendering.config import RenderingConfig
from agentrl.rollout.config import CUTS, EvalSampling, check_episodes
from agentrl.tools.config import ToolChoice

SCRIPTS = ("expert", "null", "random")
"""What a benchmark plays beside models."""


class EvalSettings(ToolChoice, OpponentChoice, RewardChoice, GenerateChoice, LimitChoice, EvalSampling):
    """Settings of the episodes and of sampling."""

    n: Count = 512
    """Prompts to play, in their order (count): of data at most all of each set; the tasks of an environment
    start over at the end, each time in another world. Each is played n_samples_per_eval_prompt times."""
    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    """Sampling temperature; 0 = greedy."""
    split: str = "test"
    """Split whose tasks are played; of a folder of prompt_data, the split whose files are."""
    seed: int = 0
    """Seeds worlds and sampling."""
    env_kwargs: EnvArguments = Field(default_factory=dict)
    """Arguments that the environment is made with (JSON). A secret is the name of an environment variable:
    "$NAME"."""
    max_turns: Count | None = None
    """Most turns of the model in an episode (count); left out, the environment's own limit."""
    rollout_max_context_len: Count | None = None
    """Most tokens in an episode, prompt included (tokens); left out, the environment's own limit.

    With a chat endpoint, left out, there is no limit: it counts in other tokens than the environment.
    """
    output_dir: Annotated[str | None, Changes.PLACE] = None
    """Folder for settings, report and every episode with its verdict, from which it goes on with --resume;
    left out, a temporary one, which is removed at the end."""
    break_tool: Annotated[tuple[str, ...], IN_COMMAS, AfterValidator(check_broken)] = ()
    """Play everything once more with a tool broken, for each TOOL=HOW (a flag: with commas between them), and
    compare the scores. HOW: none (not offered), empty, random (words in another order), wrong (the answer of
    another call), slow (stopped at its deadline) or error (refused). AGENT:TOOL=HOW: that of one agent."""
    num_threads: Annotated[Count | None, Changes.SPEED] = None
    """Threads that torch computes with (count); left out, 1 for small models, else every core."""

    @property
    def without_effect(self) -> Mapping[str, str]:
        """Those of the rewards; the cut of a distribution, where the likeliest token is taken."""
        greedy = "with temperature = 0, which takes the likeliest token; raise it"
        return {**super().without_effect, **(dict.fromkeys(CUTS, greedy) if self.temperature == 0.0 else {})}

    @model_validator(mode="after")
    def _is_kept(self) -> EvalSettings:
        number = self.n * self.n_samples_per_eval_prompt
        check_episodes("an evaluation", number, "n or n_samples_per_eval_prompt")
        return self


# While a chat endpoint is scored, local servers may run other models, such as a judge's.
_LOCAL_MODEL_SETTINGS = {
    *("sglang_models", "sglang_python", "rollout_health_check_interval", "rollout_health_check_timeout"),
    "rollout_health_check_first_wait",
}

_OF_RUNS = ("num_cpus_per_rank", "num_gpus_per_rank", "num_cpus_per_rollout_worker")


class EvalConfig(Section):
    """All settings of an eval-only run."""

    eval: EvalSettings = EvalSettings()
    data: EvalData = EvalData()
    rendering: RenderingConfig = RenderingConfig()
    engine: EngineConfig = EngineConfig()
    cluster: ClusterConfig = ClusterConfig()
    openai: EndpointConfig = EndpointConfig()

    def of_set(self, own: EvalSet) -> EvalConfig:
        """These settings as a set of prompts is played that has some of its own."""
        found = {"n": own.num_prompts, "temperature": own.temperature}
        chosen = {name: value for name, value in found.items() if value is not None}
        update = {**chosen, **own.sampling, **own.grading}
        return self.model_copy(update={"eval": self.eval.model_copy(update=update)})

    @property
    def inactive(self) -> dict[str, str]:
        """Columns, which have no effect without files; settings of the engine, where an endpoint samples.

        Of a cluster all but those of servers, and all where none is started.
        """
        columns = () if self.data.prompt_data is not None else COLUMNS
        inactive = super().inactive | dict.fromkeys(columns, "without prompt_data; add it")
        is_remote = self.openai.openai_url is not None
        without_servers = "without sglang_models; set it" if is_remote else self.engine.without_servers
        if not self._starts_servers:
            inactive |= dict.fromkeys(ClusterConfig.model_fields, without_servers)
        inactive |= dict.fromkeys(_OF_RUNS, "in an evaluation, which starts servers alone; set it for a run")
        if not is_remote:
            return inactive
        unused = {*RenderingConfig.model_fields, *EngineConfig.model_fields, "num_threads"}
        unused -= _LOCAL_MODEL_SETTINGS
        if not self.engine.sglang_models:
            inactive |= dict.fromkeys(_LOCAL_MODEL_SETTINGS - {"sglang_models"}, without_servers)
        return inactive | dict.fromkeys(unused, "with openai_url, whose model it is; drop that")

    @property
    def _starts_servers(self) -> bool:
        """Whether the evaluation starts servers: of the policy, or of further models."""
        is_own = self.engine.engine == "sglang" and self.engine.sglang_url is None
        return bool(self.engine.sglang_models) or (is_own and self.openai.openai_url is None)


class GatewaySettings(Listening):
    """The address of the gateway, and its episodes."""

    port: Annotated[int, Field(ge=0, le=65535)] = 30001
    """Port to listen on; 0 = any free one."""
    output_dir: Annotated[str, Changes.PLACE] = "runs/gateway"
    """Folder for the settings and every episode. More are added where it has some of the same model."""
    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    """Sampling temperature, whatever a request says; 0 = greedy."""
    max_turns: Count = 1000
    """Most replies of an episode (count)."""
    rollout_max_context_len: Count | None = None
    """Most tokens of a conversation, the reply included (tokens); left out, what the model takes, and at most
    8,192. A chat endpoint has its own limit."""
    idle_s: Annotated[float, Field(gt=0.0)] = 600.0
    """An episode ends when it has had no request for so long (seconds)."""
    num_threads: Annotated[Count | None, Changes.SPEED] = None
    """Threads that torch computes with (count); left out, 1 for small models, else every core."""


class GatewayConfig(Section):
    """All settings of `agentrl gateway`."""

    gateway: GatewaySettings = GatewaySettings()
    rendering: RenderingConfig = RenderingConfig()
    engine: EngineConfig = EngineConfig()
    openai: EndpointConfig = EndpointConfig()

    @property
    def of_players(self) -> EvalConfig:
        """The same model, engine and sampling, as those of an eval-only run."""
        own = self.gateway
        sampling = EvalSettings(temperature=own.temperature, num_threads=own.num_threads)
        return EvalConfig(eval=sampling, rendering=self.rendering, engine=self.engine, openai=self.openai)

    @property
    def inactive(self) -> dict[str, str]:
        """Settings of the engine, where an endpoint samples."""
        inactive = super().inactive
        if self.openai.openai_url is None:
            return inactive
        unused = {*RenderingConfig.model_fields, *EngineConfig.model_fields}
        unused |= {"num_threads", "rollout_max_context_len"}
        return inactive | dict.fromkeys(unused, "with openai_url, whose model it is; drop that")
