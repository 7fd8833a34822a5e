"""Programs that must leave every card alone, and what watches them: torch's own start, JAX, TensorFlow."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from tests.cards import with_cards

ROOT = Path(__file__).parents[2]
TOUCHED = "TOUCHED"
"""The variable with the file that gets a line for each touch."""
PACKAGE = f"""
import os

def touch(what):
    with open(os.environ["{TOUCHED}"], "a") as file:
        file.write(f"{{what}}\\n")

touch(f"import {{__name__}}")

def __getattr__(name):
    if not name.startswith("__"):
        touch(f"{{__name__}}.{{name}}")
    raise AttributeError(name)
"""
WATCH = f"""
import os, sys
from importlib.machinery import SourceFileLoader

load = SourceFileLoader.exec_module

def started():
    with open(os.environ["{TOUCHED}"], "a") as file:
        file.write(f"CUDA in {{sys.orig_argv[-1]}}\\n")

def exec_module(self, module):
    load(self, module)
    if module.__name__ == "torch.cuda":
        module._lazy_init = started
        module.device_count = lambda: int(os.environ.get("CUDA_VISIBLE_DEVICES") != "")

# A rank is on the card, and has none here.
if not sys.orig_argv[-1].startswith("rank"):
    SourceFileLoader.exec_module = exec_module
"""
"""A sitecustomize: torch sees the cards that its process may see, and writes down who starts CUDA."""
ELSEWHERE = "agentrl.envs.export.on_"
"""Modules that are imported under the interpreters of other libraries begin with it."""
USED = "\n\ndef top_k(scores, k):\n    touch('jax.lax.top_k')\n    return scores, scores\n"


def with_packages(folder: Path) -> Path:
    """A folder with a JAX, a TensorFlow and a watch of torch that write down whoever uses them."""
    for name, more in (("jax", ""), ("jax/lax", USED), ("tensorflow", "")):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(PACKAGE + more)
    (folder / "sitecustomize.py").write_text(WATCH)
    return folder


def touches(folder: Path, program: str) -> list[str]:
    """What a program of this module touched, on a machine with one card, JAX and TensorFlow."""
    touched = folder / "touched"
    touched.write_text("")
    path = os.pathsep.join((str(with_packages(folder / "packages")), str(ROOT)))
    variables = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    variables |= {"PATH": with_cards(folder / "bin", 1), "PYTHONPATH": path, TOUCHED: str(touched)}
    subprocess.run([sys.executable, "-m", __name__, program], cwd=folder, env=variables, check=True)
    return touched.read_text().splitlines()


def everything() -> None:
    """Import every module, and make an index and search it."""
    packages = [import_module(name) for name in ("agentrl", "agentrl_simulate", "envs_contrib")]
    for package in packages:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith(".__main__") and not module.name.startswith(ELSEWHERE):
                import_module(module.name)
    from agentrl.tools.search import Bm25Index

    assert "bm25s" not in sys.modules
    assert Bm25Index(["a card", "a host"]).search("host") == ["a host"]
    assert "bm25s" in sys.modules
    import torch

    assert not torch.cuda.is_initialized()


def after_jax() -> None:
    """Make an index where somebody has imported JAX, which stays theirs."""
    import jax.lax

    from agentrl.tools.search import Bm25Index

    Path(os.environ[TOUCHED]).write_text("")
    assert Bm25Index(["a card", "a host"]).search("host") == ["a host"]
    assert sys.modules["jax"] is jax
    import jax.lax as again

    assert again is jax.lax


def run() -> None:
    """Train for a step, with a rank that this process takes to be on the card."""
    import torch

    import agentrl
    from tests.flow.runs import TINY

    few = {"num_rollout": 1, "eval_episodes": 2, "env": "HopSearch-v0", "trainer": "megatron"}
    few |= {"inline": False, "num_rollout_workers": 1}
    agentrl.train(quiet=True, output_dir=".", name="run", **{**TINY, **few})
    assert not torch.cuda.is_initialized()


def touching() -> None:
    """Do all that the others must not."""
    import jax.lax
    import tensorflow
    import torch

    jax.lax.top_k([1], 1)
    with suppress(AttributeError):
        tensorflow.constant(1)
    # A torch without CUDA refuses it afterwards.
    with suppress(NameError, RuntimeError):
        torch.cuda.get_device_properties(0)


if __name__ == "__main__":
    {program.__name__: program for program in (everything, after_jax, run, touching)}[sys.argv[1]]()
