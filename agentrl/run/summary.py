"""The results of a finished run: a table, a page, summary.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice

from agentrl.checkpoints.tensors import num_parameters
from agentrl.config import effective_values
from agentrl.evaluation.episodes import Evaluation
from agentrl.observe import read_journal, read_metrics
from agentrl.observe.history import JOURNAL
from agentrl.run.held_out import GREEDY, SAMPLED, by_set
from agentrl.run.parts import Milestone, Records
from agentrl.run.training import TrainingRun
from agentrl.types import JSON, Episode, Verdict
from agentrl.view.report import ReportData, ReportEpisode, write_report
from agentrl.view.scores import ScoreRow

_NUM_EPISODES = 3


def write_summary(run: TrainingRun) -> None:
    """summary.json: the table's numbers and the duration of each stage."""
    summary: dict[str, JSON] = {
        "env": run.config.env.env,
        "milestones": [
            {
                "name": milestone.name,
                "step": milestone.step,
                **{mode: evaluation.report.as_json() for mode, evaluation in milestone.evaluations.items()},
            }
            for milestone in run.progress.milestones
        ],
        "stages": [stage._asdict() for stage in run.records.watch.stages],
    }
    path = run.records.folder.path / "summary.json"
    path.write_text(json.dumps(summary, indent=1), encoding="utf-8")


def write_page(run: TrainingRun) -> None:
    """report.html: the table, the curves, and a few episodes token by token."""
    write_report(
        ReportData(
            title=run.config.run_name,
            facts=_facts(run),
            rows=_rows(run),
            records=read_metrics(run.records.folder.path / "metrics.jsonl"),
            episodes=_episodes(run),
            decode_token=lambda token: run.world.renderer.decode([token]),
            config=effective_values(run.config),
            folder=str(run.records.folder.path),
        ),
        run.records.folder.report,
    )


def show(run: TrainingRun) -> None:
    """Print the table, some episodes of the trained agent, and the paths of the files."""
    console = run.records.console
    if run.held_out is not None:
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
    steps = sorted((run.records.folder.path / JOURNAL).glob("step_*"))
    if of_milestones or not steps:
        return of_milestones
    scored = (entry for entry in read_journal(steps[-1]) if entry.verdicts)
    label = f"step {run.progress.step}"
    return [ReportEpisode(label, entry.episode, entry.verdict) for entry in islice(scored, _NUM_EPISODES)]


def _rows(run: TrainingRun) -> list[ScoreRow]:
    return [
        ScoreRow(f"{milestone.name}, {name}" if name else milestone.name, dict(_scores(modes)))
        for milestone in _in_table(run)
        for name, modes in by_set(milestone.evaluations).items()
    ]


def _scores(evaluations: Mapping[str, Evaluation]) -> Iterator[tuple[str, float]]:
    # Greedy episodes show the agent's choices without sampling noise: only they are split into parts.
    sampled = evaluations[SAMPLED].report
    yield SAMPLED, sampled.mean
    yield from ((f"{SAMPLED} pass@{k}", value) for k, value in sampled.pass_at.items())
    yield GREEDY, evaluations[GREEDY].report.mean
    for part, mean in evaluations[GREEDY].report.by.items():
        yield f"{GREEDY} {part}", mean


def _samples_of(milestone: Milestone) -> list[tuple[Episode, Verdict]]:
    """Some greedy episodes: of the first task of every kind, the same ones at every milestone."""
    evaluation = next(iter(by_set(milestone.evaluations).values()))[GREEDY]
    verdicts = {verdict.episode_id: verdict for verdict in reversed(evaluation.verdicts)}
    pairs = [(episode, verdicts[episode.id]) for episode in evaluation.episodes if episode.id in verdicts]
    firsts: dict[str, tuple[Episode, Verdict]] = {}
    for episode, verdict in pairs:
        firsts.setdefault(str(episode.task.metadata.get(evaluation.breakdown or "")), (episode, verdict))
    picked = list(firsts.values())
    return (picked + [pair for pair in pairs if pair not in picked])[:_NUM_EPISODES]


def _facts(run: TrainingRun) -> dict[str, str]:
    config, rollout = run.config, run.config.rollout
    size = num_parameters(run.progress.source.config)
    batch = f"{rollout.prompts} x {rollout.n_samples_per_prompt} episodes"
    source = f"of {batch}" if rollout.replay is None else f"from the journal of {rollout.replay}"
    iterations = f"{run.progress.step} iterations {source}"
    facts = {
        "environment": config.env.env,
        "model": config.model.hf_checkpoint or f"fresh, {size:,} parameters",
    }
    if rollout.debug_rollout_only:
        facts["played, not trained on"] = iterations
    else:
        facts["warm start"] = f"{config.warm_start.warm_start_steps} steps"
        facts["RL"] = iterations
    return {**facts, "seed": str(config.run.seed)}
