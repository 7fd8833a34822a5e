"""What a run leaves for people and for programs when it ends: a table, a page, summary.json."""

from __future__ import annotations

import json

from agentrl.run.session import Session
from agentrl.types import JSON

_TABLE = ("before", "after warm start", "after RL")
_NUM_SHOWN = 3


def write_summary(session: Session) -> None:
    """summary.json: the table's numbers and what each stage took."""
    summary: dict[str, JSON] = {
        "env": session.config.env.env,
        "milestones": [
            {
                "name": milestone.name,
                "step": milestone.step,
                **{mode: found.report.as_json() for mode, found in milestone.evaluations.items()},
            }
            for milestone in session.milestones
        ],
        "stages": [stage._asdict() for stage in session.watch.stages],
    }
    path = session.folder.path / "summary.json"
    path.write_text(json.dumps(summary, indent=1), encoding="utf-8")
