"""Compare the weights of two runs, bit for bit: python same_weights.py runs/one runs/other."""

import sys
from pathlib import Path

from safetensors import safe_open


def tensors(run: Path) -> dict[str, bytes]:
    """The bytes of each tensor of a run's model."""
    with safe_open(run / "checkpoint" / "model.safetensors", "numpy") as file:
        names = file.keys()
        return {name: file.get_tensor(name).tobytes() for name in names}


if __name__ == "__main__":
    one, other = (tensors(Path(run)) for run in sys.argv[1:])
    differing = [name for name in one if one[name] != other.get(name)]
    print("the same, bit for bit" if not differing else f"{len(differing)} of {len(one)} tensors differ")
    sys.exit(bool(differing))
