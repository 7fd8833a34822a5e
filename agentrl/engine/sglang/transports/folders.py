"""Versions of weights as folders of safetensors, each of which appears whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentrl.engine.sglang.transports.base import Delivery
from agentrl.errors import EngineError
from agentrl.weights import checksum, unpack

_WEIGHTS = "model.safetensors"
_BESIDE = ("config.json", "generation_config.json")


class Folders:
    """The newest versions under one folder.

    model: a model directory whose configuration lies beside the weights; None = weights alone.
    keep: how many versions stay (count); older ones are removed.
    """

    def __init__(self, folder: Path, model: Path | None, keep: int = 2) -> None:
        # Servers work in folders of their own.
        self.folder = folder.absolute()
        self._model = model
        self._keep = keep

    def put(self, delivery: Delivery) -> Path:
        """The folder of a version; written where it is not there yet, and read back in any case.

        Raises:
            EngineError: it cannot be written, or holds other weights afterwards.
        """
        path = self.folder / f"full-{delivery.version:09d}-{delivery.checksum:016x}"
        try:
            if not path.is_dir():
                self._write(path, delivery)
            # A server that meets a broken file may end; that goes for one that broke since, too.
            found = checksum(load_file(path / _WEIGHTS).items())
        except (OSError, SafetensorError) as error:
            shutil.rmtree(path, ignore_errors=True)
            raise EngineError(f"{path} cannot be written or read ({error}); see to the disk.") from error
        if found != delivery.checksum:
            shutil.rmtree(path)
            raise EngineError(f"{path} held other weights than were written; see to the disk.")
        self._remove_old(path)
        return path

    def versions(self) -> Sequence[Path]:
        """The folders of all versions, oldest first."""
        return sorted(self.folder.glob("full-*"))

    def clear(self) -> None:
        """Remove all versions."""
        for path in self.versions():
            shutil.rmtree(path, ignore_errors=True)

    def _write(self, path: Path, delivery: Delivery) -> None:
        unfinished = path.with_name(f".{path.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        # transformers asks for the format.
        save_file(dict(_tensors(delivery)), unfinished / _WEIGHTS, {"format": "pt"})
        for name in _BESIDE:
            if self._model is not None and (self._model / name).is_file():
                shutil.copyfile(self._model / name, unfinished / name)
        unfinished.rename(path)

    def _remove_old(self, newest: Path) -> None:
        others = [path for path in self.versions() if path != newest]
        for path in others[: max(0, len(others) - self._keep + 1)]:
            shutil.rmtree(path, ignore_errors=True)


def _tensors(delivery: Delivery) -> Iterator[tuple[str, Tensor]]:
    for bucket in delivery.buckets:
        yield from unpack(bucket)
