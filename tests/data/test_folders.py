"""Folders of datasets: the files of each split, and errors for ambiguous folders."""

from __future__ import annotations

import json

import pytest

from agentrl.data import Columns, FileSource
from agentrl.data.rows.folder import split_of
from agentrl.errors import DataError
from tests.data.files import write_arrow, write_lines, write_parquet


def rows(name, n=5):
    return [{"input": f"{name} {k}"} for k in range(n)]


def write_files(folder, names):
    """Write these files to a folder; the rows of each contain its name."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write = {".parquet": write_parquet, ".arrow": write_arrow}.get(path.suffix, write_lines)
        write(path, rows(name))
    return folder


def names_read(folder, split="train"):
    """The names of the files that a source of the folder reads."""
    source = FileSource(str(folder), Columns(), shuffle=False, split=split)
    texts = [source.task(k).prompt[0].text for k in range(source.num_tasks)]
    assert texts == [
        f"{name} {k}" for name in dict.fromkeys(t.rsplit(" ", 1)[0] for t in texts) for k in range(5)
    ]
    return list(dict.fromkeys(text.rsplit(" ", 1)[0] for text in texts))


@pytest.mark.parametrize(
    ("names", "train", "test"),
    [
        (["b.jsonl", "a.jsonl"], ["a.jsonl", "b.jsonl"], ["a.jsonl", "b.jsonl"]),
        (["train.json", "test.json"], ["train.json"], ["test.json"]),
        (
            [
                "data/train-00000-of-00002.parquet",
                "data/train-00001-of-00002.parquet",
                "data/test-00000-of-00001.parquet",
            ],
            ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
            ["data/test-00000-of-00001.parquet"],
        ),
        (
            ["train/0.parquet", "train/1.parquet", "test/0.parquet"],
            ["train/0.parquet", "train/1.parquet"],
            ["test/0.parquet"],
        ),
        (["my_training_set.arrow", "my-eval.arrow"], ["my_training_set.arrow"], ["my-eval.arrow"]),
        ([".cache/x.jsonl", "a.jsonl", "dataset_info.json"], ["a.jsonl"], ["a.jsonl"]),
        (["a.parquet", "tokens.json"], ["a.parquet"], ["a.parquet"]),
    ],
)
def test_a_snapshot_gives_the_files_of_a_split(tmp_path, names, train, test):
    folder = write_files(tmp_path, names)
    assert names_read(folder) == train
    assert names_read(folder, "test") == test


def test_a_pattern_names_files(tmp_path):
    write_files(tmp_path, ["a-1.parquet", "a-2.parquet", "b-1.parquet"])
    assert names_read(tmp_path / "a-*.parquet") == ["a-1.parquet", "a-2.parquet"]


def test_a_slice_goes_over_all_files_of_a_folder(tmp_path):
    write_files(tmp_path, ["a.jsonl", "b.jsonl"])
    source = FileSource(f"{tmp_path}@[3:-3]", Columns(), shuffle=False)
    assert [source.task(k).prompt[0].text for k in range(4)] == [
        "a.jsonl 3",
        "a.jsonl 4",
        "b.jsonl 0",
        "b.jsonl 1",
    ]


@pytest.mark.parametrize(
    ("names", "split", "message"),
    [
        ([], "train", "holds no .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow file"),
        (
            ["train-1.jsonl", "test-1.jsonl"],
            "tset",
            "has no split `tset`. Did you mean `test`? It has test, train.",
        ),
        (["train.jsonl", "more.jsonl"], "train", "holds the splits train, and more.jsonl, which names none"),
        (
            ["main/train.parquet", "easy/train.parquet"],
            "train",
            "holds several datasets; name the folder of one: ",
        ),
        (["a.jsonl", "b.parquet"], "train", "holds lines and parquet files; name those of one kind"),
    ],
)
def test_an_ambiguous_folder_is_an_error(tmp_path, names, split, message):
    with pytest.raises(DataError) as caught:
        names_read(write_files(tmp_path, names), split)
    assert message in str(caught.value)


def write_saved(folder, names, **more):
    """Write one dataset in the format of `save_to_disk`."""
    write_files(folder, names)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None, **more}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_saved_dataset_is_read_in_the_order_of_its_state(tmp_path):
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    assert names_read(write_saved(tmp_path / "one", names)) == names
    both = tmp_path / "both"
    for split in ("train", "test"):
        write_saved(both / split, [f"{split}.arrow"])
    (both / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert names_read(both) == ["train.arrow"]
    assert names_read(both, "test") == ["test.arrow"]
    with pytest.raises(DataError, match=r"has no split `validation`. It has train, test"):
        names_read(both, "validation")


def test_a_saved_dataset_with_an_index_is_refused(tmp_path):
    folder = write_saved(
        tmp_path / "one", ["data.arrow"], _indices_data_files=[{"filename": "indices.arrow"}]
    )
    with pytest.raises(DataError, match="flatten_indices"):
        names_read(folder)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-00000-of-00001.parquet", "train"),
        ("validation-00000-of-00001-1234abcd.parquet", "validation"),
        ("hard-00000-of-00001.parquet", "hard"),
        ("dev.jsonl", "validation"),
        ("gsm8k_test.jsonl", "test"),
        ("latest.jsonl", None),
        ("trainer.jsonl", None),
    ],
)
def test_the_split_in_the_name_of_a_file(tmp_path, name, split):
    assert split_of(tmp_path / "data" / name) == split
