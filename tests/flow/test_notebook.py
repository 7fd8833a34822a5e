"""A real kernel of Jupyter: cells train, evaluate and show their results."""

from __future__ import annotations

from pathlib import Path

import pytest
from jupyter_client.manager import KernelManager

from tests.flow.runs import TINY, WARM

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300
OPTIONS = {**TINY, **WARM, "num_rollout": 2, "eval_episodes": 8}
SETUP = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import agentrl
from tests.flow.worlds import Bandit

class Cell(Bandit):
    '''An environment of this very cell.'''
"""


class Notebook:
    """Cells, run one after the other by a kernel that is a process of its own."""

    def __init__(self, folder):
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(folder))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE_S)

    def begin(self, code):
        return self.client.execute(code)

    def end(self, cell):
        """The reply to a cell, what it showed as HTML, and what it printed."""
        html, printed = "", ""
        while True:
            message = self.client.get_iopub_msg(timeout=PATIENCE_S)
            content = message["content"]
            if message["parent_header"].get("msg_id") != cell:
                continue
            html += (
                content.get("data", {}).get("text/html", "")
                if message["msg_type"] == "execute_result"
                else ""
            )
            printed += content.get("text", "") if message["msg_type"] == "stream" else ""
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                break
        reply = self.client.get_shell_msg(timeout=PATIENCE_S)["content"]
        return reply, html, printed

    def run(self, code):
        reply, html, printed = self.end(self.begin(code))
        assert reply["status"] == "ok", "\n".join(reply["traceback"])
        return html, printed


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    opened = Notebook(tmp_path_factory.mktemp("notebook"))
    opened.run(SETUP)
    yield opened
    opened.client.stop_channels()
    opened.manager.shutdown_kernel(now=True)


def arguments(folder, settings):
    """The arguments of a run in this folder, as a cell has them."""
    place = {"output_dir": str(folder), "name": "x"}
    return ", ".join(f"{name}={value!r}" for name, value in {**place, **settings}.items())


@pytest.mark.full
def test_cells_train_and_evaluate_a_class_and_show_curves(notebook, tmp_path):
    html, printed = notebook.run(f"agentrl.train(env=Cell, {arguments(tmp_path, OPTIONS)})")
    assert "Warning" not in printed
    assert html.count("<svg") >= 4
    assert "__main__:Cell" in html
    assert "after RL" in html
    checkpoint = str(tmp_path / "x" / "checkpoint")
    html, _ = notebook.run(f"agentrl.evaluate(Cell, {checkpoint!r}, n=4, quiet=True)")
    assert "episodes scored" in html
    html, _ = notebook.run(f"await agentrl.evaluate_async(Cell, {checkpoint!r}, n=4, quiet=True)")
    assert "episodes scored" in html
    _, printed = notebook.run("print(agentrl.check_env(Cell, n=2))")
    assert "__main__:Cell: " in printed
    assert "leaves-" not in printed
