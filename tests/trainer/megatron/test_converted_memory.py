"""A checkpoint of the tensors of Qwen3-30B-A3B is converted in the memory of two of them.

Of its 48 layers there are two: no tensor is larger in the others, and they are converted one after the other.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from math import prod
from pathlib import Path

import pytest

from agentrl.trainer.megatron.files.torch_dist import to_hugging_face, to_torch_dist
from agentrl.weights.hf.tensors import tensor_shapes
from tests.sizes import QWEN3_30B_A3B, opened
from tests.trainer.tiny import tokenizer

CONFIG = {**QWEN3_30B_A3B, "num_hidden_layers": 2}
IMPORTED = 64e6
"""Modules that are imported meanwhile, and small tensors (bytes)."""
SHAPES = tensor_shapes(opened(CONFIG))


def write_zeros(folder: Path) -> Path:
    """Its directory; the numbers take no room on the disk."""
    tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    header, end = {}, 0
    for name, shape in SHAPES.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def peak_of(*arguments: str) -> int:
    """What a process needs beside what it begins with, without pages of files (bytes)."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, *arguments], capture_output=True, text=True, check=True
    )
    return int(done.stdout.splitlines()[-1])


@pytest.mark.full
def test_it_takes_the_memory_of_two_of_its_tensors_either_way(tmp_path, capsys):
    model, most = write_zeros(tmp_path / "model"), 2 * max(2 * prod(shape) for shape in SHAPES.values())
    peaks = [
        peak_of("there", str(model), str(tmp_path / "megatron")),
        peak_of("back", str(tmp_path / "megatron"), str(tmp_path / "again"), str(model)),
    ]
    with capsys.disabled():
        print(f"\nat most {most / 1e6:,.0f} MB: {', '.join(f'{peak / 1e6:,.0f} MB' for peak in peaks)}")
    assert max(peaks) <= most + IMPORTED
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (model, tmp_path / "again")]
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-3)


def main(way: str, source: str, target: str, *like: str) -> None:
    """Runs in a process of its own."""
    most, is_done = [anonymous()], threading.Event()

    def watch() -> None:
        while not is_done.wait(0.005):
            most.append(anonymous())

    watching = threading.Thread(target=watch)
    watching.start()
    if way == "there":
        to_torch_dist(Path(source), Path(target))
    else:
        to_hugging_face(Path(source), Path(like[0]), Path(target))
    is_done.set()
    watching.join()
    print(max(most) - most[0])


def anonymous() -> int:
    """Memory of this process that is no page of a file (bytes)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * sum(
        int(kib) for kib in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB$", status, re.MULTILINE)
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
