"""The command `mini` of mini-swe-agent, in a folder with a file for each box; it runs `cat` alone.

Each task is a process with the arguments of a command line. It is forked, so that importing is paid once.
"""

import json
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path

os.environ.update(
    MSWEA_CONFIGURED="true",
    MSWEA_COST_TRACKING="ignore_errors",
    MSWEA_SILENT_STARTUP="1",
    LITELLM_LOCAL_MODEL_COST_MAP="True",
)

from minisweagent.run.mini import app
from playing import CONTENTS, serve

for later in ("agents.interactive", "environments.local", "models.litellm_model"):
    import_module(f"minisweagent.{later}")

FLAGS = (
    "--model",
    "openai/policy",
    "--yolo",
    "--exit-immediately",
    "-c",
    "mini.yaml",
    "-c",
    "agent.step_limit=6",
)


def played(question):
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name).resolve()
        (folder / "bin").mkdir()
        (folder / "bin" / "cat").symlink_to("/bin/cat")
        for box, content in CONTENTS.items():
            (folder / box).write_text(content)
        child = os.fork()
        if child == 0:
            command(folder, question)
        _, status = os.waitpid(child, 0)
        if status:
            raise RuntimeError(f"mini has ended with {status}")
        return json.loads((folder / "played.json").read_text())["info"]["submission"].strip()


def command(folder, question):
    """Be the command."""
    os.chdir(folder)
    os.environ["PATH"] = str(folder / "bin")
    sys.argv = ["mini", *FLAGS, "--task", question, "--output", str(folder / "played.json")]
    status = 1
    try:
        app(standalone_mode=False)
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


serve({"command": played})
