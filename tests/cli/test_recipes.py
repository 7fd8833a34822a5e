"""`agentrl recipes`: what it lists is what it shows, and a run file."""

from __future__ import annotations

import json

from agentrl.assembly.load import load_config
from agentrl.cli import main
from agentrl.cli.recipes import FOLDER
from tests.flow.test_bad_input import complaint


def printed(capsys, *words):
    main(["recipes", *words])
    return capsys.readouterr().out


def test_what_is_listed_is_shown_as_a_run_file_of_that_name(tmp_path, capsys):
    listed = json.loads(printed(capsys, "list", "--json"))
    assert {row["name"] for row in listed} == {path.stem for path in FOLDER.glob("*.toml")}
    assert len(listed) >= 5
    table = printed(capsys, "list")
    for row in listed:
        text = printed(capsys, "show", row["name"])
        assert text.startswith(f"# {row['summary']}\n")
        assert row["name"] in table
        (tmp_path / "run.toml").write_text(text)
        assert load_config(str(tmp_path / "run.toml"), {}).run.name == row["name"]


def test_another_name_is_one_sentence(capsys):
    said = complaint(capsys, "recipes", "show", "math-qwen3-4")
    assert "there is no recipe `math-qwen3-4`. Did you mean `math-qwen3-4b`?" in said
