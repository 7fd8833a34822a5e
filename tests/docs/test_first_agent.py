"""A newcomer follows the guide "Your first own agent", from an empty environment to a package.

The fixture fails where one of its commands does; the tests are what the guide promises beyond that.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block, blocks
from tests.fresh import run_fresh

GUIDE = ROOT / "docs" / "your-first-agent.md"
TIMEOUT_S = 2400.0
pytestmark = [pytest.mark.full, pytest.mark.timeout(TIMEOUT_S + 300)]
PNG = b"\x89PNG\r\n\x1a\n"


def guide() -> list[Block]:
    return list(blocks(GUIDE.read_text(encoding="utf-8"), GUIDE.name))


def as_shell(block: Block) -> str:
    """A block as the reader types it into one shell; a file is written, then run."""
    if block.language != "python":
        return block.text
    if block.file is None:
        return f"python - <<'PYTHON'\n{block.text}PYTHON\n"
    return f"cat > {block.file} <<'PYTHON'\n{block.text}PYTHON\npython {block.file}\n"


def clone(folder: Path) -> None:
    """The files of this tree that a clone holds, or will hold."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The reader's folder, and what all commands of the guide have printed in it."""
    home = tmp_path_factory.mktemp("newcomer")
    clone(home / "agentrl")
    script = "\n".join(as_shell(block) for block in guide())
    return home / "first-agent", run_fresh(script, home / "agentrl", timeout_s=TIMEOUT_S)


def test_the_environment_is_the_readers_own(followed):
    folder, _ = followed
    shown = run_fresh(". .venv/bin/activate\npython -c 'import agentrl; print(agentrl.__file__)'", folder, 60)
    assert Path(shown.strip()) == folder.parent / "agentrl" / "agentrl" / "__init__.py"


def test_the_training_learned(followed):
    folder, _ = followed
    summary = json.loads((folder / "runs/parcels/summary.json").read_text(encoding="utf-8"))
    scores = {milestone["name"]: milestone for milestone in summary["milestones"]}
    imitated, trained = scores["after warm start"], scores["after RL"]
    assert imitated["sampled"]["mean"] < 0.4
    assert imitated["greedy"]["mean"] < 0.3
    assert trained["sampled"]["mean"] > 0.8
    assert trained["greedy"]["by"]["moves=4"] > 0.85


def test_the_curve_the_report_and_the_pages_are_there(followed):
    folder, _ = followed
    assert (folder / "curves.png").read_bytes().startswith(PNG)
    assert (folder / "runs/parcels/report.html").stat().st_size > 10_000
    assert (folder / "runs/parcels/view/index.html").exists()


def test_the_comparison_shows_what_was_learned(followed):
    folder, _ = followed
    sides = "runs/compared:untrained runs/compared:trained"
    again = f". .venv/bin/activate\nagentrl benchmark compare {sides} --json"
    (row,) = json.loads(run_fresh(again, folder, 120))["rows"]
    assert row["tasks"] == 400
    assert row["first_mean"] < 0.05
    assert row["difference"]["low"] > 0.7


def test_the_package_is_installed_tested_and_played(followed):
    folder, printed = followed
    assert "LostParcel-v0 passed: 0 errors, 0 warnings." in printed
    assert "3 passed" in printed
    assert "LostParcel-v0 (test), temperature 0" in printed
    original = (folder / "parcels.py").read_bytes()
    assert (folder / "lost_parcel/src/lost_parcel/env.py").read_bytes() == original
