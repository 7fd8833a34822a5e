"""Indexes against brute force, and saved ones against those in memory."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from agentrl.errors import UserError
from agentrl.tools import Bm25Index, DenseIndex, HybridIndex
from agentrl.tools.search import Corpus
from agentrl.tools.search.folder import MANIFEST
from agentrl.tools.search.index import hits_of
from agentrl.tools.search.opening import open_index
from tests.tools.search.corpora import bm25_scores, corpus, encoder, jsonl, queries, texts

KINDS = {
    "bm25": Bm25Index,
    "dense": lambda over: DenseIndex(over, encoder),
    "hybrid": lambda over: HybridIndex(Bm25Index(over), DenseIndex(over, encoder), depth=20),
}


@pytest.mark.parametrize("k", [1, 3, 1000])
def test_bm25_agrees_with_the_formula_in_float64(k):
    passages = texts(3)
    index = Bm25Index(passages)
    for query, ranked in zip(queries(4), index.rank(queries(4), k), strict=True):
        oracle = bm25_scores(passages, query)
        np.testing.assert_allclose([hit.score for hit in ranked], -np.sort(-oracle)[: len(ranked)], rtol=1e-5)
        np.testing.assert_allclose(
            [hit.score for hit in ranked], oracle[[hit.row for hit in ranked]], rtol=1e-5
        )
        assert len(ranked) == min(k, int((oracle > 0).sum())), (
            "no passage without a common word, none left out"
        )


@pytest.mark.parametrize("k", [1, 5, 1000])
def test_dense_agrees_with_all_inner_products(k):
    passages = texts(5)
    oracle = encoder(queries(6)).astype(np.float64) @ encoder(passages).astype(np.float64).T
    for products, ranked in zip(oracle, DenseIndex(passages, encoder).rank(queries(6), k), strict=True):
        assert len(ranked) == min(k, len(passages))
        np.testing.assert_allclose(
            [hit.score for hit in ranked], -np.sort(-products)[: len(ranked)], atol=1e-5
        )
        np.testing.assert_allclose(
            [hit.score for hit in ranked], products[[hit.row for hit in ranked]], atol=1e-5
        )


def test_hybrid_sums_reciprocal_ranks():
    over = corpus(7)
    parts = Bm25Index(over), DenseIndex(over, encoder)
    for query in queries(8):
        scores = {}
        for part in parts:
            for rank, (row, _) in enumerate(part.rank([query], 20)[0], start=1):
                scores[row] = scores.get(row, 0.0) + 1 / (60 + rank)
        best = sorted(scores, key=lambda row: (-scores[row], row))[:5]
        ranked = HybridIndex(*parts, depth=20).rank([query], 5)[0]
        assert [hit.row for hit in ranked] == best
        np.testing.assert_allclose([hit.score for hit in ranked], [scores[row] for row in best])


def test_hybrid_wants_one_corpus():
    with pytest.raises(ValueError, match="same corpus"):
        HybridIndex(Bm25Index(texts(1)), DenseIndex(texts(2), encoder))


def test_a_batch_gives_the_results_of_its_single_queries():
    for make in KINDS.values():
        index = make(corpus())
        assert hits_of(index, queries(9), 3) == [hits_of(index, [query], 3)[0] for query in queries(9)]
        assert index.rank([], 3) == []
        with pytest.raises(ValueError, match="k must be at least 1, got 0"):
            index.rank(["w1"], 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_index_answers_as_the_one_in_memory_and_stays_on_disk(kind, tmp_path):
    index = KINDS[kind](
        Corpus.read(jsonl(tmp_path / "corpus.jsonl", [*texts(1), "Title\nline\u2028two \U0001f600\n"]))
    )
    index.save(tmp_path / "saved")
    mapped = open_index(tmp_path / "saved", encoder=encoder)()
    assert type(mapped) is type(index)
    searched = [*queries(2), "line", ""]
    assert hits_of(mapped, searched, 4) == hits_of(index, searched, 4)
    assert not isinstance(mapped.corpus.contents, tuple)
    held = type(index).load(tmp_path / "saved", *([] if kind == "bm25" else [encoder]), mmap=False)
    assert hits_of(held, searched, 4) == hits_of(index, searched, 4)
    mapped.save(tmp_path / "again")
    assert hits_of(open_index(tmp_path / "again", encoder=encoder)(), searched, 4) == hits_of(
        index, searched, 4
    )
    assert {path.name for path in tmp_path.iterdir()} == {"corpus.jsonl", "saved", "again"}


def test_bm25_leaves_its_postings_on_disk(tmp_path):
    Bm25Index(texts(1)).save(tmp_path / "saved")
    index = Bm25Index.load(tmp_path / "saved")
    assert isinstance(index._weights.base, np.memmap)
    assert not index._weights.flags.writeable


def test_existing_files_are_never_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("text")
    for existing in (tmp_path / "mine", tmp_path / "mine" / "thesis.txt"):
        with pytest.raises(UserError, match="is there already; name another folder or delete it first"):
            Bm25Index(["a"]).save(existing)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    (tmp_path / "empty").mkdir()
    Bm25Index(["a"]).save(tmp_path / "empty")
    assert Bm25Index.load(tmp_path / "empty").search("a") == ["a"]


def test_an_index_that_could_not_be_written_leaves_nothing(tmp_path, monkeypatch):
    index = Bm25Index(["a"])

    def full(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index, "write", full)
    with pytest.raises(UserError, match="No space left on device"):
        index.save(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def files_of(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("indexes") / "saved"
    KINDS["hybrid"](corpus()).save(folder)
    return folder


def test_a_folder_with_a_file_missing_cut_or_grown_is_refused_in_a_sentence(saved, tmp_path):
    for number, name in enumerate(files_of(saved)):
        for how in ("missing", "cut", "grown"):
            broken = tmp_path / f"{number}-{how}"
            shutil.copytree(saved, broken)
            content = (broken / name).read_bytes()
            (broken / name).write_bytes(content[: len(content) // 2] if how == "cut" else content + b"7")
            if how == "missing":
                (broken / name).unlink()
            with pytest.raises(UserError, match="build it again with `agentrl serve-search"):
                open_index(broken, encoder=encoder)()


def test_corrupt_files_of_the_right_length_are_refused(saved, tmp_path):
    for number, name in enumerate(files_of(saved)):
        if name in (MANIFEST, "corpus.jsonl"):
            continue
        broken = tmp_path / str(number)
        shutil.copytree(saved, broken)
        (broken / name).write_bytes(b"\x00" * (broken / name).stat().st_size)
        with pytest.raises(UserError, match="build it again"):
            open_index(broken, encoder=encoder)()


def test_pickles_are_never_read(saved, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "exploded"), "w"))

    for name in (name for name in files_of(saved) if name.endswith(".npy")):
        broken = tmp_path / name
        shutil.copytree(saved, broken)
        np.save(broken / name, np.array([Bomb()], object), allow_pickle=True)
        manifest = json.loads((broken / MANIFEST).read_text())
        manifest["files"][name] = (broken / name).stat().st_size
        (broken / MANIFEST).write_text(json.dumps(manifest))
        with pytest.raises(UserError, match="build it again"):
            open_index(broken, encoder=encoder)()
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("manifest", "sentence"),
    [
        ('{"format": 0, "kinds": ["bm25"], "files": {}}', "has format 0, not 1"),
        ('{"format": 2}', "has format 2, not 1"),
        *[(text, "is incomplete") for text in ("{}", "[]", "7", '{"format": "x"}')],
        *[(text, "holds no saved index") for text in ("", "{", "\udcff")],
        ('{"format": 1, "kinds": ["bm25"], "files": {"../secret": 1}}', "is incomplete"),
        ('{"format": 1, "kinds": ["bm25"], "files": {}}', "is incomplete"),
        ('{"format": 1, "kinds": ["magic"], "files": {}}', "holds a magic index, not bm25"),
    ],
)
def test_a_folder_of_another_time_or_maker_is_refused(manifest, sentence, tmp_path):
    (tmp_path / MANIFEST).write_bytes(manifest.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=sentence):
        open_index(tmp_path, kind="hybrid" if "magic" in manifest else None, encoder=encoder)()


def test_an_index_of_another_encoder_is_refused(saved):
    def negated(several):
        return -encoder(several)

    def wider(several):
        return np.concatenate([encoder(several)] * 2, axis=1)

    for other in (negated, wider):
        with pytest.raises(UserError, match="built with another encoder"):
            DenseIndex.load(saved, other)


@pytest.mark.parametrize(
    ("vectors", "reason"),
    [
        (lambda several: np.zeros((len(several), 4)), "float64"),
        (lambda several: np.zeros((1, 4), np.float32), r"float32 \[1, 4\]"),
        (lambda several: np.zeros(len(several), np.float32), "float32"),
        (lambda several: np.full((len(several), 4), np.nan, np.float32), "finite"),
    ],
)
def test_an_encoder_with_an_invalid_result_is_refused(vectors, reason):
    with pytest.raises(ValueError, match=reason):
        DenseIndex(["a", "b"], vectors)


def test_other_kinds_of_faiss_index_are_trained_saved_and_mapped(tmp_path):
    index = DenseIndex(corpus(), encoder, factory="IVF4,Flat")
    index.save(tmp_path / "saved")
    searched = queries(3)
    assert DenseIndex.load(tmp_path / "saved", encoder).rank(searched, 3) == index.rank(searched, 3)
    rows = [hit.row for hit in index.rank(searched, 1000)[0]]
    assert -1 not in rows
    assert len(rows) < 1000


@pytest.mark.parametrize(
    ("line", "number"),
    [
        *[
            (line, 2)
            for line in ("{", "7", "[]", '{"contents": "no id"}', '{"id": "1"}', '{"id": "1", "contents": 7}')
        ],
        *[
            (line, 2)
            for line in ('{"id": null, "contents": ""}', '{"id": "1", "contents": "\\ud800"}', "[" * 100_000)
        ],
        ("\udcff", 2),
        ('\n\n{"id": 1}', 4),
    ],
)
def test_a_bad_line_of_a_corpus_is_named(line, number, tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"id": 0, "contents": "T\\ntext"}\n' + line.encode(errors="surrogateescape"))
    with pytest.raises(
        UserError, match=rf"corpus\.jsonl, line {number} is no passage: each line is one passage"
    ):
        Corpus.read(path)


def test_a_corpus_is_read_unchanged(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        '{"id": 0, "contents": "\\"A title\\"\\nIts\\ntext", "more": 1}\r\n\n{"id": "x", "contents": "y"}'
    )
    over = Corpus.read(path)
    assert [over[row].id for row in range(len(over))] == ["0", "x"]
    assert (over[0].title, over[0].text, over[1].title, over[1].text) == ('"A title"', "Its\ntext", "y", "")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: None, "no corpus and no saved index"),
        (lambda path: path.write_text(" \n"), "is empty"),
        (lambda path: path.write_text('{"id": 1, "contents": "..."}'), "at least one passage with a word"),
        (lambda path: path.mkdir(), "holds no saved index"),
    ],
)
def test_what_cannot_be_indexed_is_a_one_sentence_error(make, sentence, tmp_path):
    make(tmp_path / "it")
    with pytest.raises(UserError, match=sentence):
        open_index(tmp_path / "it")()


def test_a_dense_index_needs_an_encoder_at_once(saved):
    for kind in ("dense", "hybrid", None):
        with pytest.raises(UserError, match="needs an encoder"):
            open_index(saved, kind=kind)
    assert isinstance(open_index(saved, kind="bm25")(), Bm25Index)
