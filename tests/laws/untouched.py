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
ELSEWHERE = {"agentrl.envs.export.on_nemo_gym", "agentrl.envs.export.on_verifiers"}
"""Modules that are imported under the interpreters of other libraries."""
USED = "\n\ndef top_k(scores, k):\n    touch('jax.lax.top_k')\n    return scores, scores\n"


def with_packages(folder: Path) -> Path:
    """A folder with a JAX and a TensorFlow that write down whoever uses them."""
    for name, more in (("jax", ""), ("jax/lax", USED), ("tensorflow", "")):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(PACKAGE + more)
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


def watch_torch() -> None:
    """Write down who starts CUDA in this process, which torch sees one card in."""
    import torch

    def started() -> None:
        with open(os.environ[TOUCHED], "a", encoding="utf-8") as file:
            file.write("CUDA\n")

    torch.cuda._lazy_init = started
    torch.cuda.device_count = lambda: 1


def everything() -> None:
    """Import every module of agentrl, and make an index and search it."""
    watch_torch()
    import agentrl

    names = [module.name for module in pkgutil.walk_packages(agentrl.__path__, "agentrl.")]
    for name in names:
        if not name.endswith(".__main__") and name not in ELSEWHERE:
            import_module(name)
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
    watch_torch()
    import torch

    import agentrl
    from tests.flow.runs import TINY

    few = {"num_rollout": 1, "eval_episodes": 2, "env": "HopSearch-v0", "trainer": "megatron"}
    agentrl.train(quiet=True, output_dir=".", name="run", **{**TINY, **few})
    assert not torch.cuda.is_initialized()


def touching() -> None:
    """Do all that the others must not."""
    watch_torch()
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
