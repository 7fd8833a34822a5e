"""Encoders and search tools by name: `package.module:name`, or the folder of a sentence encoder."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from agentrl.errors import UserError
from agentrl.runtime.extras import TRAINING, require
from agentrl.tools.search.config import ServeSearch
from agentrl.tools.search.corpus import Watch, unwatched
from agentrl.tools.search.dense import Encoder
from agentrl.tools.search.folder import check_free
from agentrl.tools.search.opening import open_index
from agentrl.tools.search.tool import SearchTool

_MODULES_FILE = "modules.json"


def load_encoder(name: str | Path) -> Encoder:
    """The encoder with a name.

    name: the folder of a sentence-transformers model, or `package.module:name` of a function from n texts to
        float32 [n, d].

    Raises:
        UserError: there is no such folder or function, or the model cannot be loaded.
    """
    folder = Path(name)
    if folder.is_dir():
        return sentence_encoder(folder)
    module, colon, attribute = str(name).partition(":")
    if not colon:
        raise UserError(
            f"There is no encoder {name!s}: name the folder of a sentence-transformers model, or "
            "`package.module:name`."
        )
    try:
        encoder = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise UserError(f"There is no encoder {name!s}: {error}; name it `package.module:name`.") from None
    if not callable(encoder):
        raise UserError(f"The encoder {name!s} is no function from texts to vectors; name one that is.")
    return cast(Encoder, encoder)


def sentence_encoder(folder: str | Path) -> Encoder:
    """The encoder of a sentence-transformers folder, on the CPU; it downloads nothing and runs no code of it.

    Its vectors have length 1, so that the inner product is the cosine.

    Raises:
        UserError: sentence-transformers is not installed, or the folder holds no such model.
    """
    if not (Path(folder) / _MODULES_FILE).is_file():
        raise UserError(f"{folder} holds no sentence-transformers model: it has no {_MODULES_FILE}.")
    require("a sentence encoder", "sentence_transformers", *TRAINING)
    from safetensors import SafetensorError
    from sentence_transformers import SentenceTransformer

    from agentrl.weights.quiet import quiet_transformers

    try:
        with quiet_transformers():
            model = SentenceTransformer(
                str(folder), device="cpu", local_files_only=True, trust_remote_code=False
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"The encoder in {folder} cannot be loaded: {error}.") from error

    def encode(texts: Sequence[str]) -> npt.NDArray[np.float32]:
        vectors = model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(vectors, np.float32)

    return encode


def search_tool(
    index: str, *, name: str = "search", k: int = 3, kind: str | None = None, encoder: str | None = None
) -> SearchTool:
    """A search over an index in this process, for run files: all arguments are names.

    index: the folder of a saved index, or a JSONL corpus. kind: `bm25`, `dense` or `hybrid`, see
        `agentrl.tools.search.opening.open_index`. encoder: see `load_encoder`.

    Raises:
        UserError: an index or an encoder does not exist.
        ValueError: k is less than 1.
    """
    loaded = load_encoder(encoder) if encoder is not None else None
    return SearchTool(open_index(index, kind=kind, encoder=loaded), name=name, k=k)


def serve_search(
    path: str | Path, settings: ServeSearch, *, ready: Callable[[str, int], None], watch: Watch = unwatched
) -> None:
    """Serve a corpus or a saved index until SIGINT, SIGTERM or SIGHUP.

    ready: called with the address and the number of passages when the server accepts requests.

    Raises:
        UserError: the index cannot be built or saved, or the address cannot be used.
    """
    from agentrl.http.serving import WAITING_CONNECTIONS, RequestChecks, address_of, bound, host_names, serve
    from agentrl.tools.search.server import RetrieveApp

    if settings.save is not None:
        check_free(settings.save)  # before the hours that indexing may take
    encoder = load_encoder(settings.encoder) if settings.encoder is not None else None
    make = open_index(path, kind=settings.index, encoder=encoder, watch=watch)
    with bound(settings.host, settings.port) as listener:
        index = make()
        if settings.save is not None:
            index.save(settings.save)
        listener.listen(WAITING_CONNECTIONS)
        ready(address_of(listener), len(index.corpus))
        checks = RequestChecks(host_names(settings.host, settings.allowed_hosts))
        serve(RetrieveApp(index, topk=settings.topk, checks=checks).app, listener)
