"""Files in shared memory: of this user alone, and gone with their process; what others put there is left."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.engine.sglang.inside import agentrl_sglang
from agentrl.engine.sglang.transports import inside
from agentrl.errors import EngineError
from agentrl.runtime.temporary import sweep

ALLOWED = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.storage", "_load_from_bytes"),
    ("collections", "OrderedDict"),
}
REPLY, FILE = f"{agentrl_sglang.PREFIX}reply", f"{agentrl_sglang.PREFIX}file"


def test_shared_files_are_private_and_go_with_their_block(tmp_path: Path) -> None:
    with inside.shared_files(tmp_path, 2) as paths:
        assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o600, 0o600]
        sweep(tmp_path, agentrl_sglang.PREFIX)
        assert all(path.exists() for path in paths), "a file in use was removed"
    assert list(tmp_path.iterdir()) == []
    stale, other = (tmp_path / name for name in ("agentrl-weights-a", "x"))
    for path in (stale, other):
        path.touch()
    sweep(tmp_path, agentrl_sglang.PREFIX)
    assert list(tmp_path.iterdir()) == [other]
    with pytest.raises(EngineError, match="no file can be created"), inside.shared_file(tmp_path / "none"):
        pass


OPENING = """
import asyncio, sys
from pathlib import Path
from agentrl.engine.sglang.transports.shared_memory import SharedMemory
asyncio.run(SharedMemory(Path(sys.argv[1])).open((), None))
"""


def test_a_pipe_that_another_user_put_into_shared_memory_holds_nothing_up(tmp_path: Path) -> None:
    pipe = tmp_path / f"{agentrl_sglang.PREFIX}x"
    os.mkfifo(pipe, 0o666)
    subprocess.run([sys.executable, "-c", OPENING, str(tmp_path)], check=True, timeout=120)
    assert list(tmp_path.iterdir()) == [pipe]
