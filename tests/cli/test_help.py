"""--help and --version, of every command, at 80 columns."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import rich_click as click

import agentrl
from agentrl.cli import cli, main
from agentrl.cli.lazy import LazyGroup
from agentrl.cli.sections import SettingsCommand, flag_of

WIDTH = 80


def commands(command, path=()):
    yield path, command
    if isinstance(command, click.Group):
        below_it = command.loaded() if isinstance(command, LazyGroup) else command.commands
        for name, below in below_it.items():
            yield from commands(below, (*path, name))


COMMANDS = dict(commands(cli))


def help_of(path, monkeypatch, capsys, *words):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    main([*path, "--help", *words])
    return capsys.readouterr().out


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_at_80_columns_no_name_is_cut_and_no_word_broken(path, monkeypatch, capsys):
    every = ("all",) if isinstance(COMMANDS[path], SettingsCommand) else ()
    out = help_of(path, monkeypatch, capsys, *every)
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= WIDTH
    words = {word for line in out.splitlines() for word in line.strip("│ ").split()}
    for option in COMMANDS[path].params:
        if isinstance(option, click.Option) and not option.hidden:
            assert {*option.opts, *option.secondary_opts} <= words | set("/"), option.name
            broken = {word for word in (option.help or "").split() if len(word) < WIDTH // 3} - words
            assert {word for word in broken if "[" not in word} == set(), option.name


@pytest.mark.parametrize(
    "path", [("train",), ("eval",), ("sft",), ("rollout",), ("benchmark", "run")], ids=" ".join
)
def test_help_is_short_and_has_sections(path, monkeypatch, capsys):
    command = COMMANDS[path]
    short, every = help_of(path, monkeypatch, capsys), help_of(path, monkeypatch, capsys, "all")
    assert len(short.splitlines()) < 150 < len(every.splitlines())
    assert all(section in short for section in command.sections)
    seen = set()
    for section, names in command.sections.items():
        page = help_of(path, monkeypatch, capsys, section)
        for name in names:
            assert flag_of(name) in page.split(), (section, name)
        seen |= {*names}
    assert len(seen) == sum(map(len, command.sections.values()))
    # What was shown last hides nothing from the next command line.
    command.make_context("x", ["X"] if path[0] in ("eval", "benchmark") else [])
    assert not any(option.hidden for option in command.params if isinstance(option, click.Option))


def test_a_section_that_is_none_is_one_sentence(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help", "rolout"])
    assert ended.value.code == 2
    assert "Did you mean `rollout`?" in capsys.readouterr().err


def test_settings_are_found_by_name_section_and_description(capsys):
    main(["settings", "--json"])
    settings = json.loads(capsys.readouterr().out)
    assert {item["name"] for item in settings} >= {
        *COMMANDS["train",].sections["rollout"],
        "sft_lr",
        "use_tis",
    }
    main(["settings", "learning", "rate", "--json"])
    assert "lr" in {item["name"] for item in json.loads(capsys.readouterr().out)}
    main(["settings", "--n-samples-per-prompt"])
    page = capsys.readouterr().out
    assert page.splitlines()[0] == "[rollout]"
    assert "n_samples_per_prompt = 16" in page
    with pytest.raises(SystemExit) as ended:
        main(["settings", "no", "such", "thing"])
    assert ended.value.code == 2


def test_a_long_list_of_choices_wraps_between_them(monkeypatch, capsys):
    out = help_of(("train",), monkeypatch, capsys)
    assert "--advantage-estimator grpo | dr_grpo | rloo" in out
    assert "reinforce_plus_plus_baseline | ppo" in out


def test_every_command_refuses_an_option_that_is_given_twice():
    kinds = {" ".join(path): command.context_class.__name__ for path, command in COMMANDS.items()}
    assert set(kinds.values()) == {"CommandContext"}
    for path, command in COMMANDS.items():
        assert "_refuse_repeated" in dir(command) or isinstance(command, click.Group), path


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "X", "--model", "a", "--model=b"],
        ["train", "--lr", "1", "--seed", "2", "--lr", "1"],
        ["train", "--use-tensorboard", "--no-use-tensorboard"],
        ["envs", "check", "X", "--n=2", "--n", "3"],
        ["runs", "list", "--output-dir=a", "--output-dir=b"],
    ],
)
def test_the_last_of_two_never_wins(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "is given twice; " in capsys.readouterr().err


def test_options_for_several_values_and_switches_may_be_repeated(capsys):
    main(["envs", "list", "HopSearch-v0", "--json", "--json"])
    assert "HopSearch-v0" in capsys.readouterr().out
    context = COMMANDS["benchmark", "run"].make_context("run", ["X", "--model", "a", "--model", "b"])
    assert context.params["models"] == ("a", "b")


def test_a_list_of_commands_and_a_completion_import_none_of_them():
    script = (
        "import sys, os; from agentrl.cli import main\n"
        "try: main({words})\nexcept SystemExit: pass\n"
        "print([name for name in sys.modules if name.startswith(('agentrl.assembly.config', 'torch'))])"
    )
    completing = {"_AGENTRL_COMPLETE": "bash_complete", "COMP_WORDS": "agentrl se", "COMP_CWORD": "1"}
    for words, environ in ((["--help"], {}), ([], completing)):
        done = subprocess.run(
            [sys.executable, "-c", script.format(words=words)],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            check=True,
        )
        *shown, loaded = done.stdout.splitlines()
        assert loaded == "[]"
        assert "serve-search" in "".join(shown)


def test_options_are_completed():
    completing = {
        "_AGENTRL_COMPLETE": "bash_complete",
        "COMP_WORDS": "agentrl train --n-samp",
        "COMP_CWORD": "2",
    }
    script = "from agentrl.cli import main; main([])"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **completing},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "--n-samples-per-prompt" in done.stdout


def test_the_version_is_printed(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"agentrl {agentrl.__version__}\n"
