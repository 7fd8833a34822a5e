"""Tiny worlds in which a training goes wrong, and the recording of such a run for `histories/`.

agentrl train --env tests.records.faulty:Riddles --name riddles ...
python -m tests.records.faulty runs/riddles riddles "agentrl train --env ..."
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict, replace
from pathlib import Path

from agentrl import Limits, SingleTurnEnv, Task, say
from agentrl.tools import inline

LETTERS = "abcd"
HISTORIES = Path(__file__).parent / "histories"


class Riddles(SingleTurnEnv):
    """Eight tasks whose answers can only be learned by heart, and others that cannot be learned at all."""

    chance_score = 1 / len(LETTERS)
    limits = Limits(max_turns=1, max_tokens=48)

    def tasks(self, split):
        numbers = range(8) if split == "train" else range(100, 132)
        return [Task.ask(f"{split}{n}", f"riddle {n}", random.Random(n).choice(LETTERS)) for n in numbers]

    @inline
    def grade(self, task, answer):
        return float(answer.strip() == task.answer)

    def demonstrator(self, task, rng):
        yield say(task.answer if rng.random() < 0.3 else rng.choice(LETTERS))


class Charging(Riddles):
    """Every answer is wrong and costs something; a turn that never ends costs nothing."""

    chance_score = 0.0

    @inline
    def grade(self, task, answer):
        return -0.3


class Wordy(Riddles):
    """The prompt of every fourth task is longer than an episode may be."""

    def tasks(self, split):
        return [
            replace(task, prompt=Task.ask("", f"{task.prompt[0].text} " * (1 + 40 * (n % 4 == 3))).prompt)
            for n, task in enumerate(super().tasks(split))
        ]


def record(run: Path, name: str, command: str) -> None:
    """Write the metrics of a run that diagnoses read, with its facts and what was diagnosed."""
    from agentrl.assembly.env import run_env_factory
    from agentrl.assembly.load import read_run
    from agentrl.records import read_metrics
    from agentrl.records.diagnoses import read_diagnoses
    from agentrl.records.trends import KEYS
    from agentrl.run.parts import facts_of

    config = read_run(run)
    facts = asdict(facts_of(config, run_env_factory(config, {})()))
    made = [diagnosis.name for diagnosis in read_diagnoses(run)]
    head = {"command": command, "facts": facts, "diagnoses": made}
    rows = []
    for row in read_metrics(run / "metrics.jsonl"):
        known = {key: value for key, value in sorted(row.items()) if key in KEYS}
        rows.append(
            {"step": row["step"]} | {k: v if v is None else float(f"{v:.4g}") for k, v in known.items()}
        )
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    text = f'{json.dumps(head, indent=1)[:-2]},\n "metrics": [\n{lines}\n ]\n}}\n'
    HISTORIES.mkdir(exist_ok=True)
    (HISTORIES / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    record(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
