"""Settings of what a run shows of itself: trackers, the model's config, recordings of single steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from agentrl.config import Changes, ImportPath, Section, Spelling

Step = Annotated[int, Field(ge=1)]


class ObserveConfig(Section):
    """What a run shows of itself, besides metrics.jsonl and the journal."""

    all_change: ClassVar[Changes | None] = Changes.COURSE

    callback: ImportPath | None = None
    """Function that is called with each step and its metrics, as they are logged (package.module:function),
    such as to send them elsewhere; where it returns True, the run ends after that step. One that fails is not
    called again, and the run goes on."""
    use_wandb: bool = False
    """Send the metrics to Weights & Biases, too; its key is read from WANDB_API_KEY or from `wandb login`,
    and written nowhere."""
    wandb_project: str = "agentrl"
    """Project of the run there."""
    wandb_group: str | None = None
    """Group of the run there, such as several seeds of one experiment."""
    wandb_mode: Literal["online", "offline", "disabled"] = "online"
    """offline writes the run's folder wandb/ only, without a network, for `wandb sync`; disabled drops it."""
    use_prometheus: bool = False
    """Serve the metrics of the last step, and what the run does now, for Prometheus: the page /metrics at
    prometheus_host and prometheus_port, for anyone who reaches that."""
    prometheus_host: str = "127.0.0.1"
    """Address that is listened at; the loopback address admits this machine only."""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] = 9464
    """Port there; 0 = any free one, which is printed."""
    log_model_config: bool = False
    """Print the model's shape and its parameters by component at the start, and write all of its config to
    model_config.json."""
    profile_step: Step | None = None
    """RL step that is traced (from 1): profile/ gets a Chrome trace of each of the trainer's ranks, with the
    phases of the run."""
    profile_engine_step: Step | None = None
    """RL step in which each SGLang server traces 200 forward passes, from the step's begin (from 1): a Chrome
    trace in profile/engine/ of the run's folder, which the server has to be able to write."""
    memory_snapshot_step: Step | None = None
    """RL step whose memory is recorded (from 1): memory/ gets what each operator allocated, the memory of
    every process, and of ranks on a GPU a snapshot for torch's memory viewer."""

    hang_warning_s: Annotated[float, Field(ge=0.0)] = 300.0
    """Seconds in which nothing begins or ends before a warning names what hangs: the oldest group, its
    episode, their stage and since when (0 = never). The run goes on."""

    spellings: ClassVar[Mapping[str, Spelling]] = {
        "record_memory_history": Spelling(
            "Same as memory_snapshot_step = 1.", lambda on, _: {"memory_snapshot_step": 1} if on else {}
        )
    }

    @property
    def inactive(self) -> dict[str, str]:
        """Settings of W&B and of Prometheus, where they are not used."""
        of_wandb = () if self.use_wandb else ("wandb_project", "wandb_group", "wandb_mode")
        of_prometheus = () if self.use_prometheus else ("prometheus_host", "prometheus_port")
        return dict.fromkeys(of_wandb, "without use_wandb; add it") | dict.fromkeys(
            of_prometheus, "without use_prometheus; add it"
        )
