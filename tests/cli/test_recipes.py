"""`agentrl recipes`: what it lists is what it shows, and a run file."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from agentrl.assembly.load import load_config
from agentrl.cli import main
from agentrl.cli.recipes import FOLDER
from tests.flow.test_bad_input import complaint


def printed(capsys, *words):
    main(["recipes", *words])
    return capsys.readouterr().out


def test_what_is_listed_is_shown_as_a_run_file_of_that_name(tmp_path, capsys):
    listed = json.loads(printed(capsys, "list", "--json"))
    assert {row["name"] for row in listed} == {path.stem for path in FOLDER.iterdir()} - {"__pycache__"}
    assert len(listed) >= 7
    table = printed(capsys, "list")
    for row in listed:
        text = printed(capsys, "show", row["name"])
        assert f"# {row['summary']}\n" in text[:200]
        assert row["name"] in table
        if text.startswith("#!"):
            subprocess.run(["bash", "-n"], input=text, text=True, check=True)
            continue
        (tmp_path / "run.toml").write_text(text)
        assert load_config(str(tmp_path / "run.toml"), {}).run.name == row["name"]


def test_another_name_is_one_sentence(capsys):
    said = complaint(capsys, "recipes", "show", "math-qwen3-4")
    assert "there is no recipe `math-qwen3-4`. Did you mean `math-qwen3-4b`?" in said


NOTED = """#!/bin/bash
echo "$(basename $0) $*" >> "$FOLDER/calls"
[[ "$(basename $0) $1" == "ray job" ]] && exit 4
[[ "$(basename $0) $1" == "agentrl train" ]] && { sleep 0.5; exit 5; }
[[ "$(basename $0)" == scontrol ]] && printf 'one\\ntwo\\nthree\\n'
[[ "$(basename $0)" == openssl ]] && echo token
exit 0
"""


@pytest.mark.parametrize(
    ("script", "code", "expected"),
    [
        (
            "slurm",
            5,
            {
                "srun --nodes=1 --ntasks=1 --nodelist=one ray start --head --port=20042 --block",
                "srun --nodes=2 --ntasks=2 --exclude=one ray start --address=one:20042 --block",
                "agentrl train my run.toml --lr 1e-3 --resume --cluster ray --ray-address one:20042",
            },
        ),
        (
            "ray-job",
            4,
            {
                "ray job submit --address=http://127.0.0.1:8265 -- "
                "agentrl train my run.toml --lr 1e-3 --resume --cluster ray"
            },
        ),
    ],
)
def test_a_script_starts_what_its_scheduler_gives(tmp_path, script, code, expected):
    """Its programs note how they are called; tests/processes/test_guide_scripts.py runs it with real ones."""
    for name in ("srun", "scontrol", "ray", "openssl", "agentrl"):
        program = tmp_path / name
        program.write_text(NOTED)
        program.chmod(0o755)
    facts = {"SLURM_JOB_NODELIST": "one,two,three", "SLURM_JOB_ID": "42", "SLURM_NNODES": "3"}
    done = subprocess.run(
        ["bash", str(FOLDER / f"{script}.sh"), "my run.toml", "--lr", "1e-3"],
        check=False,
        env={**facts, "FOLDER": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert done.returncode == code
    assert expected <= set((tmp_path / "calls").read_text().splitlines())
