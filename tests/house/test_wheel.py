"""The wheel is whole: it installs and trains outside the source tree, and bars no newer Python."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.house.source import ROOT, name_of, python_files

DATA_SUFFIXES = {".html", ".css", ".js", ".toml", ".typed", ".jinja"}
# Modules of the standard library that 3.12 and 3.13 took away.
GONE = {
    *("asynchat", "asyncore", "distutils", "imp", "smtpd"),
    *("aifc", "audioop", "cgi", "cgitb", "chunk", "crypt", "imghdr", "mailcap", "msilib", "nis", "nntplib"),
    *("ossaudiodev", "pipes", "sndhdr", "spwd", "sunau", "telnetlib", "uu", "xdrlib", "lib2to3"),
}
TINY = {
    "--num-rollout": "2",
    "--rollout-batch-size": "2",
    "--n-samples-per-prompt": "2",
    "--warm-start-steps": "2",
    "--num-demonstrations": "16",
    "--eval-episodes": "8",
}


def imported(tree: ast.AST) -> set[str]:
    """The top-level modules that a file imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def test_every_file_is_python_3_11_and_uses_nothing_that_newer_ones_dropped() -> None:
    for path in python_files():
        tree = ast.parse(path.read_text(encoding="utf-8"), name_of(path), feature_version=(3, 11))
        assert imported(tree) & GONE == set(), name_of(path)


def test_no_newer_python_is_barred() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == ">=3.11"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, made from its source archive, as package indexes do."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True, capture_output=True)
    (built,) = folder.glob("agentrl-*.whl")
    return built


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment: agentrl from the wheel, its dependencies from this one.

    A path named in a .pth file is searched, its own .pth files are not: so the editable install
    of the source tree stays out of sight.
    """
    home = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", home / "bin" / "python"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--ignore-installed", wheel], check=True)
    return home / "bin"


def run(commands: Path, folder: Path, *arguments: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [commands / arguments[0], *arguments[1:]],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_the_wheel_holds_every_module_and_every_data_file(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    wanted = {name_of(path) for path in python_files("agentrl", "envs_contrib")} | {
        name_of(path)
        for folder in ("agentrl", "envs_contrib")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in DATA_SUFFIXES
    }
    assert wanted - inside == set()
    assert {name.split("/")[0] for name in inside if ".dist-info" not in name} == {"agentrl", "envs_contrib"}


@pytest.mark.full
def test_the_wheel_trains_outside_the_source_tree(commands: Path, tmp_path: Path) -> None:
    where = run(commands, tmp_path, "python", "-c", "import agentrl; print(agentrl.__file__)")
    assert Path(where.strip()).is_relative_to(commands.parent)

    listed = json.loads(run(commands, tmp_path, "agentrl", "envs", "list", "--json"))
    assert {"HopSearch-v0", "Calculator-v0"} <= {one["id"] for one in listed}

    run_file = tmp_path / "run.toml"
    run_file.write_bytes((ROOT / "examples" / "hop_search" / "run.toml").read_bytes())
    flags = [word for flag in TINY.items() for word in flag]
    run(commands, tmp_path, "agentrl", "train", "run.toml", *flags)
    (report,) = tmp_path.glob("runs/*/report.html")
    assert report.stat().st_size > 0
