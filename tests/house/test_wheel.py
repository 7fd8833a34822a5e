"""The wheel: it trains outside the source tree, its core works without torch, newer Pythons are allowed."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from agentrl.runtime.extras import EXTRAS
from tests.house.source import ROOT, name_of, python_files

SHIPPED = ("agentrl", "agentrl_simulate", "envs_contrib")
DATA_SUFFIXES = {".html", ".css", ".js", ".toml", ".typed", ".jinja"}
# Modules of the standard library that 3.12 and 3.13 removed.
REMOVED = {
    *("asynchat", "asyncore", "distutils", "imp", "smtpd"),
    *("aifc", "audioop", "cgi", "cgitb", "chunk", "crypt", "imghdr", "mailcap", "msilib", "nis", "nntplib"),
    *("ossaudiodev", "pipes", "sndhdr", "spwd", "sunau", "telnetlib", "uu", "xdrlib", "lib2to3"),
}
MAX_MEGABYTES = 200
GYMNASIUM = """
import gymnasium
world = gymnasium.make("agentrl:agentrl/HopSearch-v0")
world.reset(seed=0)
world.step("<search> Fapi Pevi born</search>")
"""
# A chat endpoint with a constant answer, and the command line that scores it.
SERVER = """
import http.server, json, threading
from agentrl.cli import main

ANSWER = {"role": "assistant", "content": "Bako"}
REPLY = {
    "id": "1", "object": "chat.completion", "created": 0, "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": ANSWER}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}

class Chat(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps(REPLY).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Chat)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
main(["eval", "HopSearch-v0", "--openai-url", url, "--openai-model", "m", "--n", "4", "--json"])
"""
WITHOUT_EXTRAS = """
import importlib.util, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in BLOCKED else find_spec(name, package)
sys.meta_path.insert(0, Blocked())
"""
"""Whatever the extras install is not there."""
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
        assert imported(tree) & REMOVED == set(), name_of(path)


def test_newer_pythons_are_allowed() -> None:
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
    of the source tree is not visible.
    """
    home = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", home / "bin" / "python"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--ignore-installed", wheel], check=True)
    return home / "bin"


@pytest.fixture(scope="module")
def light(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment that `pip install agentrl` has filled, and nothing else."""
    home = tmp_path_factory.mktemp("light")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    pip = [sys.executable, "-m", "pip", "--python", home / "bin" / "python"]
    own = shlex.split(os.environ.get("PIP_ARGS", ""))
    pins = ["-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, "install", "--quiet", wheel, *pins, *own], check=True, timeout=600)
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
    expected = {name_of(path) for path in python_files(*SHIPPED)} | {
        name_of(path)
        for folder in SHIPPED
        for path in (ROOT / folder).rglob("*")
        if path.suffix in DATA_SUFFIXES
    }
    assert expected - inside == set()
    assert {name.split("/")[0] for name in inside if ".dist-info" not in name} == {*SHIPPED}


@pytest.mark.full
def test_the_wheel_trains_outside_the_source_tree(commands: Path, tmp_path: Path) -> None:
    where = run(commands, tmp_path, "python", "-c", "import agentrl; print(agentrl.__file__)")
    assert Path(where.strip()).is_relative_to(commands.parent)

    listing = json.loads(run(commands, tmp_path, "agentrl", "envs", "list", "--json"))
    assert {"HopSearch-v0", "Calculator-v0"} <= {env["id"] for env in listing}

    run_file = tmp_path / "run.toml"
    run_file.write_bytes((ROOT / "examples" / "hop_search" / "run.toml").read_bytes())
    flags = [word for flag in TINY.items() for word in flag]
    run(commands, tmp_path, "agentrl", "train", "run.toml", *flags)
    (report,) = tmp_path.glob("runs/*/report.html")
    assert report.stat().st_size > 0


@pytest.mark.full
def test_the_core_is_small_and_holds_no_torch(light: Path) -> None:
    (site,) = light.parent.glob("lib/python*/site-packages")
    assert {path.name for path in site.iterdir()} & {
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
    } == set()
    megabytes = sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) / 1e6
    assert megabytes <= MAX_MEGABYTES


@pytest.mark.full
def test_the_core_is_a_gym(light: Path, tmp_path: Path) -> None:
    listing = json.loads(run(light, tmp_path, "agentrl", "envs", "list", "--json"))
    assert {"HopSearch-v0", "Calculator-v0", "FrozenLake-v0"} <= {env["id"] for env in listing}
    assert "HopSearch-v0" in run(light, tmp_path, "agentrl", "envs", "show", "HopSearch-v0", "--json")
    assert "passed" in run(light, tmp_path, "agentrl", "envs", "check", "HopSearch-v0", "--n", "4")
    run(light, tmp_path, "agentrl", "envs", "new", "stock-room")
    run(light, tmp_path, "python", "-c", GYMNASIUM)
    (tmp_path / "server.py").write_text(SERVER)
    report = json.loads(run(light, tmp_path, "python", "server.py"))
    assert (report["n"], report["failures"]) == (4, {})

    train = [light / "agentrl", "train", "--env", "HopSearch-v0"]
    done = subprocess.run(train, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "agentrl: training needs torch: pip install 'agentrl[train]'.\n",
    )


def test_an_evaluation_behind_an_endpoint_imports_nothing_of_an_extra(tmp_path: Path) -> None:
    blocked = {module for modules in EXTRAS.values() for module in modules}
    program = f"BLOCKED = {blocked}\n{WITHOUT_EXTRAS}\n{SERVER}"
    report = json.loads(run(Path(sys.executable).parent, tmp_path, "python", "-c", program))
    assert (report["n"], report["failures"]) == (4, {})


@pytest.mark.full
def test_sglang_and_training_resolve_into_one_environment(wheel: Path, tmp_path: Path) -> None:
    # A dry run of the resolver for a Linux machine with a GPU. Another Python version requires wheels only,
    # and one dependency of reasoning-gym has none, so that extra is left out.
    report = tmp_path / "report.json"
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"),
        *("--report", report, "--target", tmp_path / "nowhere"),
        *("--only-binary=:all:", "--python-version", "3.12"),
        f"{wheel}[train,mcp,megatron,search,sglang]",
        *shlex.split(os.environ.get("PIP_ARGS", "")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    chosen = {
        package["metadata"]["name"].lower(): package["metadata"]["version"]
        for package in json.loads(report.read_text())["install"]
    }
    without_gpu = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "sglang-cpu.txt").read_text(), re.MULTILINE))
    for name in ("sglang", "sglang-router"):
        assert chosen[name] == without_gpu[name]
    assert {"agentrl", "torch", "transformers", "megatron-core", "mcp", "sglang-kernel"} <= set(chosen)
