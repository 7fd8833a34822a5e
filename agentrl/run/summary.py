"""The results of a run, however it ended: a table, a page, summary.json."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from agentrl.assembly.config import RunConfig
from agentrl.config import defaults, effective_values
from agentrl.evaluation.episodes import Evaluation
from agentrl.evaluation.report import total_tools
from agentrl.records import Record, read_journal, read_metrics
from agentrl.records.history import JOURNAL, METRICS, Ending
from agentrl.run.folder import RunFolder
from agentrl.run.held_out import GREEDY, SAMPLED, by_set
from agentrl.run.parts import Milestone, Records
from agentrl.run.training import TrainingRun
from agentrl.runtime.files import write_text
from agentrl.types import JSON, Episode, Verdict
from agentrl.view.report import ReportData, ReportEpisode, write_report
from agentrl.view.scores import ScoreRow, ToolRow
from agentrl.weights.hf.tensors import num_parameters

_NUM_EPISODES = 3


@contextmanager
def results_written(write: Callable[[Ending], None], on_event: Callable[[str], None]) -> Iterator[None]:
    """Write the results of a run when the block has ended, however it did.

    Where a run broke off and the disk does not take them, on_event gets a warning instead.

    Raises:
        OSError: the results of a finished run cannot be written.
    """
    ending: Ending = "failed"
    try:
        yield
        ending = "finished"
    except (asyncio.CancelledError, KeyboardInterrupt):
        ending = "interrupted"
        raise
    finally:
        try:
            write(ending)
        except (OSError, ValueError) as error:
            if ending == "finished":
                raise
            on_event(f"Warning: the report could not be written ({error}).")


def write_results(run: TrainingRun, ending: Ending) -> None:
    """Write summary.json and report.html.

    Raises:
        OSError: one of them cannot be written.
    """
    _write_summary(run, ending)
    _write_page(run, ending)


def stopped(folder: RunFolder, command: str) -> Iterator[str]:
    """The lines about a run that was interrupted: how it goes on, and where its report is."""
    yield f"Stopped. Resume it with `agentrl {command} {folder.path} --resume`."
    if folder.report.exists():
        yield f"Report: {folder.report}"


def records_of(folder: RunFolder) -> list[Record]:
    """The metrics of a run; none of one that measured nothing."""
    path = folder.path / METRICS
    return read_metrics(path) if path.exists() else []


def _write_summary(run: TrainingRun, ending: Ending) -> None:
    """summary.json: how the run ended, the table's numbers, the diagnoses, and the duration of each stage."""
    summary: dict[str, JSON] = {
        "env": run.config.env.env,
        "ended": ending,
        "steps": run.progress.step,
        "milestones": [
            {
                "name": milestone.name,
                "step": milestone.step,
                **{mode: evaluation.report.as_json() for mode, evaluation in milestone.evaluations.items()},
            }
            for milestone in run.progress.milestones
        ],
        "diagnoses": [asdict(diagnosis) for diagnosis in run.records.diagnoses.made],
        "stages": [stage._asdict() for stage in run.records.watch.stages],
    }
    write_text(run.records.folder.summary, json.dumps(summary, indent=1))


def _write_page(run: TrainingRun, ending: Ending) -> None:
    """report.html: diagnoses, tables of scores and tools, curves, a few episodes token by token, settings."""
    write_report(
        ReportData(
            title=run.config.run_name,
            facts=_facts(run, ending),
            warnings=run.config.warnings,
            rows=_rows(run),
            tools=_tools(run),
            records=records_of(run.records.folder),
            episodes=_episodes(run),
            decode_token=lambda token: run.world.renderer.decode([token]),
            limits=_limits(run),
            config=effective_values(run.config),
            defaults=defaults(RunConfig),
            folder=str(run.records.folder.path),
            diagnoses=run.records.diagnoses.made,
            timeline=run.records.monitor.timeline(),
        ),
        run.records.folder.report,
    )


def idle_sentence(run: TrainingRun) -> str:
    """Why a run ended before its last iteration, and what to do."""
    step, idle = run.progress.step, run.progress.idle_rollouts
    return (
        f"{run.records.folder.path} ended after {step} of {run.config.rollout.num_rollout} iterations: the "
        f"last {idle} trained on nothing, since the siblings of every group earned the same. Begin a new run "
        "with a warm start (warm_start_steps) or easier tasks, or resume this one with max_idle_rollouts = 0."
    )


def show(run: TrainingRun) -> None:
    """Print the table, some episodes of the trained agent, and the paths of the files."""
    console = run.records.console
    if run.evaluations.held_out is not None:
        console.table(_rows(run), title=f"{run.config.env.env}, held-out tasks")
    for sample in _episodes(run)[:_NUM_EPISODES]:
        console.episode(sample.episode, sample.verdict, title=sample.label)
    show_files(run.records)


def show_files(records: Records) -> None:
    """Print the duration of each stage, and the paths of the run's files."""
    for stage in records.watch.stages:
        records.console.line(f"  {stage.name:<20} {stage.wall_s:6.1f} s wall {stage.cpu_s:6.1f} s CPU")
    records.console.line(f"Run:    {records.folder.path}")
    records.console.line(f"Report: {records.folder.report}")
    if (records.folder.path / JOURNAL).exists():
        records.console.line(f"All episodes: agentrl view {records.folder.path}")


def _in_table(run: TrainingRun) -> list[Milestone]:
    """The milestones of the table: all but those in the middle of RL."""
    return [milestone for milestone in run.progress.milestones if milestone.in_table]


def _episodes(run: TrainingRun) -> list[ReportEpisode]:
    """Some episodes of each milestone, the last one first; of a run without evaluations, of its last step."""
    of_milestones = [
        ReportEpisode(milestone.name, episode, verdict)
        for milestone in reversed(_in_table(run))
        for episode, verdict in _samples_of(milestone)
    ]
    steps = _steps(run)
    if of_milestones or not steps:
        return of_milestones
    scored = (entry for entry in read_journal(steps[-1]) if entry.verdicts)
    label = f"step {run.progress.step}"
    return [ReportEpisode(label, entry.episode, entry.verdict) for entry in islice(scored, _NUM_EPISODES)]


def _steps(run: TrainingRun) -> list[Path]:
    """The files of the journal with the episodes of each step, in order."""
    return sorted((run.records.folder.path / JOURNAL).glob("step_*"))


def _rows(run: TrainingRun) -> list[ScoreRow]:
    return [
        ScoreRow(milestone.name, dict(_scores(modes)), _parts(modes.get(GREEDY)), name)
        for milestone in _in_table(run)
        for name, modes in by_set(milestone.evaluations).items()
    ]


def _scores(evaluations: Mapping[str, Evaluation]) -> Iterator[tuple[str, float]]:
    for mode in (SAMPLED, GREEDY):
        # A function of the user may have played one of them.
        if mode in evaluations:
            report = evaluations[mode].report
            yield mode, report.mean
            yield from ((f"{mode} pass@{k}", value) for k, value in report.pass_at.items())


def _parts(greedy: Evaluation | None) -> dict[str, dict[str, float]]:
    """The means by kind of task and by agent. Greedy episodes show the choices without sampling noise."""
    parts: dict[str, dict[str, float]] = {}
    for part, mean in () if greedy is None else greedy.report.by.items():
        key, _, value = part.partition("=")
        parts.setdefault(f"{GREEDY}, by {key}", {})[value] = mean
    return parts


def _tools(run: TrainingRun) -> list[ToolRow]:
    """The calls of each tool in the episodes of each milestone; without these, in the first and last step."""
    episodes = {
        milestone.name: [episode for played in milestone.evaluations.values() for episode in played.episodes]
        for milestone in _in_table(run)
    }
    if not episodes:
        steps = _steps(run)
        names = {_step_name(path): path for path in [*steps[:1], *steps[1:][-1:]]}
        episodes = {name: [entry.episode for entry in read_journal(path)] for name, path in names.items()}
    by_stage = {stage: total_tools(played) for stage, played in episodes.items()}
    return [
        ToolRow(tool, stage, len(episodes[stage]), tools[tool])
        for tool in sorted({tool for tools in by_stage.values() for tool in tools})
        for stage, tools in by_stage.items()
        if tool in tools
    ]


def _limits(run: TrainingRun) -> dict[str, JSON]:
    limits = asdict(run.world.make_env().limits)
    return {name: "no limit" if value is None else value for name, value in limits.items()}


def _step_name(path: Path) -> str:
    return f"step {int(path.name.removeprefix('step_').partition('.')[0])}"


def _samples_of(milestone: Milestone) -> list[tuple[Episode, Verdict]]:
    """Some episodes of the first task of every kind, the same at every milestone; greedy ones, if any."""
    first = next(iter(by_set(milestone.evaluations).values()), {})
    evaluation = first.get(GREEDY, first.get(SAMPLED))
    if evaluation is None:
        return []
    verdicts = {verdict.episode_id: verdict for verdict in reversed(evaluation.verdicts)}
    pairs = [(episode, verdicts[episode.id]) for episode in evaluation.episodes if episode.id in verdicts]
    firsts: dict[str, tuple[Episode, Verdict]] = {}
    for episode, verdict in pairs:
        firsts.setdefault(str(episode.task.metadata.get(evaluation.breakdown or "")), (episode, verdict))
    picked = list(firsts.values())
    return (picked + [pair for pair in pairs if pair not in picked])[:_NUM_EPISODES]


def _facts(run: TrainingRun, ending: Ending) -> dict[str, str]:
    config, rollout = run.config, run.config.rollout
    size = num_parameters(run.progress.source.config)
    batch = f"{rollout.prompts} x {rollout.n_samples_per_prompt} episodes"
    source = f"of {batch}" if rollout.replay is None else f"from the journal of {rollout.replay}"
    number = f"{run.progress.step}"
    if ending != "finished":
        number = f"{ending} after {number} of {rollout.num_rollout}"
    iterations = f"{number} iterations {source}"
    facts = {
        "environment": config.env.env,
        "model": config.model.hf_checkpoint or f"fresh, {size:,} parameters",
    }
    if rollout.debug_rollout_only:
        facts["played, not trained on"] = iterations
    else:
        facts["warm start"] = f"{config.warm_start.warm_start_steps} steps"
        facts["RL"] = iterations
    return {**facts, "seed": str(config.run.seed), **run.records.dashboard}
