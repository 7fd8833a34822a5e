"""Reads documents and folders with the models of the `harbor` package, and prints what they found as JSON."""

import json
import sys
from pathlib import Path


def atif(path):
    """The trajectories of a file: ids, steps, tokens and what is in them."""
    from harbor.models.trajectories import Trajectory

    return [
        _trajectory(Trajectory.model_validate_json(line))
        for line in Path(path).read_text().split("\n")
        if line
    ]


def _trajectory(read):
    return {
        "id": read.trajectory_id,
        "schema": read.schema_version,
        "steps": [step.source for step in read.steps],
        "ids": [step.metrics.completion_token_ids for step in read.steps if step.metrics],
        "subagents": [_trajectory(inner) for inner in read.subagent_trajectories or []],
    }


def tasks(folder):
    """The folders of tasks: name, instruction, and what harbor takes from the settings."""
    from harbor.models.task.task import Task

    found = {}
    for path in sorted(path for path in Path(folder).iterdir() if path.is_dir()):
        task = Task(path)
        settings = task.config
        found[path.name] = {
            "instruction": task.instruction,
            "memory_mb": settings.environment.memory_mb,
            "timeout_s": settings.verifier.timeout_sec,
            "env": settings.environment.env,
        }
    return found


def options(_):
    """The options of task.toml, by section."""
    from harbor.models.task.config import TaskConfig

    found = []
    for name, field in TaskConfig.model_fields.items():
        inner = getattr(field.annotation, "model_fields", {}) if name != "task" else {}
        found += [f"{name}.{option}" for option in inner] or [name]
    return found


print(json.dumps({"atif": atif, "tasks": tasks, "options": options}[sys.argv[1]](sys.argv[2])))
