"""Layers of a folder that predict tokens further ahead (multi-token prediction), kept as they are.

transformers reads none of them, so a trained model would be saved without what its config.json promises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from agentrl.types.seams import TensorSpec
from agentrl.weights.codec import bytes_of
from agentrl.weights.hf.folders import base_folder
from agentrl.weights.hf.tensors import TensorFiles, holds_tensors

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COPIES = {".embed_tokens.weight": (_EMBEDDING,), ".shared_head.head.weight": (_HEAD, _EMBEDDING)}
"""Ends of the names of copies in such layers, and what they are copies of: the first that there is."""
_OTHERS = re.compile(r"(model\.)?mtp(_layers)?\.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")

Piece = tuple[TensorSpec, npt.NDArray[np.uint8]]


class StillLayers:
    """Those tensors of the folder `like` that predict further ahead, and that a manifest lacks.

    None where the folder has no weights.

    Raises:
        ModelLoadError: see `TensorFiles`.
    """

    def __init__(self, like: Path, manifest: Sequence[TensorSpec]) -> None:
        written = {spec.name: spec for spec in manifest}
        self._like, self._originals = like, dict[str, str]()
        self.specs: list[TensorSpec] = []
        folder = base_folder(like)
        if not holds_tensors(folder):
            return
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        layers = config.get("num_hidden_layers")
        with TensorFiles(like) as files:
            for spec in files.all_specs:
                if spec.name in written or not _is_ahead(spec.name, layers):
                    continue
                if (original := _original(spec.name, written)) is not None:
                    self._originals[spec.name] = original
                same = spec if original is None else written[original]._replace(name=spec.name)
                self.specs.append(same)

    def after(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """The tensors of the manifest, then these: copies as the originals are now, others as they were."""
        originals: dict[str, npt.NDArray[np.uint8]] = {}
        for spec, data in pieces:
            if spec.name in self._originals.values():
                # Its memory is that of a bucket, which is filled again.
                originals[spec.name] = data.copy()
            yield spec, data
        if not self.specs:
            return
        with TensorFiles(self._like) as files:
            for spec in self.specs:
                original = self._originals.get(spec.name)
                yield spec, bytes_of(files.read(spec.name)) if original is None else originals[original]


def _is_ahead(name: str, layers: object) -> bool:
    if _OTHERS.match(name):
        return True
    layer = _LAYER.match(name)
    return layer is not None and isinstance(layers, int) and int(layer[1]) >= layers


def _original(name: str, written: dict[str, TensorSpec]) -> str | None:
    found = next((sources for end, sources in _COPIES.items() if name.endswith(end)), ())
    return next((source for source in found if source in written), None)
