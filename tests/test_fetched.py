"""A file that Git LFS has not fetched is named as what it is, wherever a file of that kind is read."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

from agentrl.data.rows import open_rows
from agentrl.errors import DataError, ModelLoadError, UserError
from agentrl.runtime.files import check_fetched
from agentrl.tools.search.bm25 import Bm25Index
from agentrl.tools.search.corpus import Corpus
from agentrl.weights.hf.loading import open_directory
from agentrl.weights.hf.source import open_config, open_tokenizer
from agentrl.weights.hf.tensors import TensorFiles
from tests.engine.serving import save_tiny

# As version 1 of its format has it: a version, keys in the order of the alphabet, one line each.
SPEC = "https" + "://git-lfs.github.com/spec/v1"


def pointed(path):
    """Put a pointer in the place of a file."""
    data = path.read_bytes() if path.exists() else b"x" * 5_000_000
    oid = hashlib.sha256(data).hexdigest()
    path.write_text(f"version {SPEC}\noid sha256:{oid}\nsize {len(data)}\n")
    return f"{path} is a pointer of Git LFS, and not the file of {len(data):,} bytes"


def said(kind, read, sentence):
    with pytest.raises(kind) as error:
        read()
    assert str(error.value).startswith(sentence)
    assert str(error.value).endswith("`git lfs pull` in its repository.")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.arrow"])
def test_data(tmp_path, name):
    path = tmp_path / name
    said(DataError, lambda: open_rows(str(path), ("prompt",), split="train"), pointed(path))
    said(DataError, lambda: open_rows(str(tmp_path), ("prompt",), split="train"), f"{path} is a pointer")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_model(tmp_path, name):
    model = save_tiny(tmp_path / "model")
    readers = {
        "model.safetensors": [lambda: open_directory(model, torch.float32), lambda: TensorFiles(model)],
        "config.json": [lambda: open_config(model), lambda: open_directory(model, torch.float32)],
        "tokenizer.json": [lambda: open_tokenizer(model)],
    }
    for read in readers[name]:
        read()
    sentence = pointed(model / name)
    for read in readers[name]:
        said(ModelLoadError, read, sentence)


def test_the_index_of_a_model_in_parts(tmp_path):
    model = save_tiny(tmp_path / "model")
    sentence = pointed(model / "model.safetensors.index.json")
    said(ModelLoadError, lambda: TensorFiles(model), sentence)


def test_a_corpus_and_its_index(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": str(n), "contents": f"word {n}"}) + "\n" for n in range(4)))
    Bm25Index(Corpus.read(path)).save(tmp_path / "index")
    Bm25Index.load(tmp_path / "index")
    largest = max((tmp_path / "index").iterdir(), key=lambda file: file.stat().st_size)
    said(UserError, lambda: Bm25Index.load(tmp_path / "index"), pointed(largest))
    said(UserError, lambda: Corpus.read(path), pointed(path))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "version 1\n",
        f"version {SPEC}\nsize 4\n",
        f"version {SPEC}\noid sha256:{'a' * 64}\nsize 4\nmore",
        f"A pointer:\nversion {SPEC}\noid sha256:{'a' * 64}\nsize 4\n",
    ],
)
def test_no_other_file_is_taken_for_one(tmp_path, text):
    (tmp_path / "file").write_text(text)
    check_fetched([tmp_path / "file", tmp_path / "nowhere", tmp_path], UserError)


def test_a_pointer_with_extensions_is_one(tmp_path):
    text = f"version {SPEC}\next-0-foo sha256:{'b' * 64}\noid sha256:{'a' * 64}\nsize 4\n"
    (tmp_path / "file").write_text(text)
    with pytest.raises(UserError, match="the file of 4 bytes"):
        check_fetched([tmp_path / "file"], UserError)
