"""Scoring a model on an environment: the call behind `agentrl eval`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from agentrl.assembly.addresses import Addresses
from agentrl.assembly.opponents import OpponentSetup, opened_opponents
from agentrl.config import by_section, parse, refuse_inactive
from agentrl.envs import find
from agentrl.envs.opponents import AgentsOf, policy_agents
from agentrl.errors import ConfigError, DiskError
from agentrl.evaluation.config import SCRIPTS, EvalConfig
from agentrl.evaluation.episodes import Evaluation, over_sets
from agentrl.evaluation.folder import EvalFolder, killed_evaluations
from agentrl.evaluation.identity import (
    EvalIdentity,
    code_version,
    data_fingerprint,
    model_version,
    settings_of,
)
from agentrl.evaluation.players import endpoint_players, eval_cluster, local_models, model_players
from agentrl.evaluation.report import EvalReport
from agentrl.evaluation.world import EvalWorld
from agentrl.runtime.collector import rare_collections
from agentrl.runtime.interrupts import run_until_signal
from agentrl.tools.running import in_thread
from agentrl.types import JSON
from agentrl.view.console import RunConsole

if TYPE_CHECKING:
    from agentrl.assembly.cluster import RunCluster


def evaluate(
    env: str, model: str | None = None, *, resume: bool = False, quiet: bool = False, **settings: JSON
) -> EvalReport:
    """The implementation of `agentrl.evaluate`. settings: those of `EvalConfig` by their leaf names."""
    config = parse(EvalConfig, by_section(EvalConfig, settings), source="the settings given")
    refuse_inactive(config, settings, source="the settings given")
    if (model is None) == (config.openai.openai_url is None):
        raise ConfigError(
            "Name one model to score: a directory (--model), or an endpoint (--openai-url, --openai-model)."
        )
    if model in SCRIPTS and not Path(model).exists():
        raise ConfigError(
            f"{model} is a script, not a model; `agentrl benchmark {env} --model {model}` plays it."
        )
    if resume and config.eval.output_dir is None:
        raise ConfigError("resume goes on with the evaluation in output_dir; name that folder, too.")
    with rare_collections():
        return run_until_signal(_evaluate(env, model, config, RunConsole(quiet=quiet), resume=resume))


async def _evaluate(
    env_id: str, directory: str | None, config: EvalConfig, console: RunConsole, *, resume: bool
) -> EvalReport:
    for sentence in killed_evaluations() if config.eval.output_dir is None else ():
        console.line(sentence)
    with (
        EvalFolder.opened(config.eval.output_dir, resume=resume) as folder,
        # Ray ends with the thread that starts it, so it blocks this one.
        eval_cluster(config, env_id, folder.path) as cluster,
    ):
        if cluster is not None and (notice := cluster.session.notice) is not None:
            console.line(notice)
        async with local_models(config, console.line, cluster) as addresses:
            world = await EvalWorld.build(env_id, config, addresses, counts_tokens=directory is not None)
            # In threads: over many tasks and episodes they take seconds, in which the event loop goes on.
            work = partial(_identity, env_id, directory, config, world)
            identity = await in_thread(work, "identity")
            finished = folder.begin(identity, config, directory)
            if finished is not None:
                return finished
            playing = _Playing(env_id, config, world, folder, console, cluster)
            evaluations = await playing.play(directory, addresses)
            report = await in_thread(partial(over_sets, evaluations, world.again), "report")
            folder.finish(report)
            return report


def _identity(env_id: str, directory: str | None, config: EvalConfig, world: EvalWorld) -> EvalIdentity:
    """What the result depends on. directory: of the model; None = an endpoint."""
    tasks = [task for held in world.sets.values() for task in held.tasks[: config.of_set(held.own).eval.n]]
    code, data = code_version(find(env_id)), data_fingerprint(tasks)
    if directory is None:
        kind, model = "endpoint", config.openai.openai_model or ""
    else:
        kind, model = "directory", model_version(directory)
    return EvalIdentity(env_id, "", kind, settings_of(config), code, data, model)


@dataclass(slots=True)
class _Playing:
    """An evaluation in progress. cluster: has the places of its servers; None = they run on this machine.

    num_ended: episodes of all sets, recorded ones included (count).
    """

    env_id: str
    config: EvalConfig
    world: EvalWorld
    folder: EvalFolder
    console: RunConsole
    cluster: RunCluster | None = None
    num_ended: int = 0

    async def play(self, directory: str | None, addresses: Addresses) -> Mapping[str, Evaluation]:
        """Play the sets of prompts one after another; the evaluation of each by its name.

        directory: of the model; None = an endpoint. addresses: of models that are served next to it.
        """
        config, env, console = self.config, self.world.env, self.console
        opening = (
            endpoint_players(config, env.tool_schemas)
            if directory is None
            else model_players(directory, config, env.limits, on_event=console.line, cluster=self.cluster)
        )
        setup = OpponentSetup(config.rendering)
        async with (
            opened_opponents(config.eval.opponents, env, addresses, setup) as opponents,
            opening as players_of,
        ):
            with self._notice():
                evaluations = {}
                for name, held in self.world.sets.items():
                    own = config.of_set(held.own)
                    players = players_of(own, env)
                    agents_of = policy_agents(players.make_agent, opponents)
                    evaluations[name] = await self._play_set(name, own, agents_of, players.concurrency)
                return evaluations

    async def _play_set(
        self, name: str, config: EvalConfig, agents_of: AgentsOf, concurrency: int
    ) -> Evaluation:
        """Play a set. config: as it is played."""
        section, held = config.eval, self.world.sets[name]
        n, samples = held.num_prompts(name, section.n), section.n_samples_per_eval_prompt
        title = f"playing {self.env_id}, {name}" if name else f"playing {self.env_id}"
        with self.console.stage(title, n * samples) as bar:

            def progress(number: int) -> None:
                self.num_ended += number
                bar.advance(number)

            evaluator = self.world.evaluator(
                agents_of, config, prompts=name, concurrency=concurrency, progress=progress
            )
            record = self.folder.record(evaluator.setting.split)
            return await evaluator.run(
                held.tasks,
                n,
                seed=section.seed,
                samples=samples,
                prompts=held.seeded_by(name),
                record=record,
            )

    @contextmanager
    def _notice(self) -> Iterator[None]:
        """Print where the episodes are if the block ends before all have been played."""
        num_planned = 0
        for name, held in self.world.sets.items():
            section = self.config.of_set(held.own).eval
            num_planned += held.num_prompts(name, section.n) * section.n_samples_per_eval_prompt
        is_named = False
        try:
            yield
        except DiskError:
            # Its sentence has the folder.
            is_named = True
            raise
        finally:
            if 0 < self.num_ended < num_planned and not is_named:
                RunConsole(console=Console(stderr=True, highlight=False)).line(
                    f"Stopped after {self.num_ended} of {num_planned} episodes. Go on from there with the "
                    f"same settings, --output-dir {self.folder.path} and --resume."
                )
