"""docs/reports.md: the check and the attack of each environment that ships.

`python -m tests.docs.reports [ID...]` plays those that are named, or all, and writes their rows: about ten
seconds for each. A row that is there is replaced.
"""

from __future__ import annotations

import re
import sys
from datetime import date

from agentrl.envs.check import attack_env, check_env
from agentrl.envs.registry import env_ids
from agentrl.errors import UserError
from tests.docs.blocks import ROOT

PAGE = ROOT / "docs" / "reports.md"
_ROW = re.compile(r"^\| `(?P<id>[^`]+)` \|.*\|$", re.MULTILINE)
_EPISODES = 600
_USUAL_TASKS = 32
# Where luck decides, few tasks tell little.
_NUM_TASKS = {"Blackjack": 512, "BabyAI": 128}
_MARK = "<!-- REPORTS -->"
_HEAD = """\
| id | findings | RFC 008 | expert | random | cheats | attack | its best strategy | played |
|---|---|---|---|---|---|---|---|---|"""


def rows() -> dict[str, list[str]]:
    """The cells of each row of the page, by the environment's id."""
    found = _ROW.finditer(PAGE.read_text(encoding="utf-8"))
    return {row["id"]: [cell.strip() for cell in row[0].split("|")[2:-1]] for row in found}


def played(env_id: str) -> list[str]:
    """The cells of an environment: its check with the defaults, but for games of chance, and an attack."""
    check = check_env(env_id, n=_NUM_TASKS.get(env_id.partition("-")[0], _USUAL_TASKS))
    figures, counts = check.figures, check.counts
    findings = ", ".join(f"`{code}`" for code in dict.fromkeys(check.codes)) or "none"
    cells = [
        findings,
        f"{counts.get('pass', 0)} of {sum(counts.values())}",
        *(_score(figures.get(name)) for name in ("expert_score", "random_score", "best_adversary_score")),
    ]
    try:
        attack = attack_env(env_id, budget=_EPISODES)
    except UserError as error:
        # An environment of one task, which no attack can be confirmed on.
        return [*cells, "", f"not attacked: {error}", date.today().isoformat()]
    best = max(attack.attempts, key=lambda attempt: attempt.mean)
    # Of strategies that earn nothing no one is the best.
    name = best.strategy if best.mean else ""
    strategy = name.replace("|", "\\|").replace("`", "'").replace("\n", " ")[:60]
    return [
        *cells,
        f"{best.mean:.2f}",
        f"{strategy}{' (**paid**)' if attack.paid else ''}",
        date.today().isoformat(),
    ]


def _score(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def main(ids: list[str]) -> None:
    """Play environments, and write the page after each."""
    for env_id in ids or env_ids():
        found = rows()
        found[env_id] = played(env_id)
        print(env_id, found[env_id], flush=True)
        lines = [f"| `{name}` | {' | '.join(cells)} |" for name, cells in sorted(found.items())]
        before, mark, _ = PAGE.read_text(encoding="utf-8").partition(_MARK)
        PAGE.write_text("\n".join([f"{before}{mark}", _HEAD, *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
