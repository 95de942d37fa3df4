"""Tests which files of a folder belong to a split, and which errors report missing shards."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from megatron_async.errors import UserError
from megatron_async.tasks.rows import open_rows


def folder_of(folder: Path, *names: str) -> Path:
    """Write these files into `folder`, each with one row that contains the file's name."""
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"name": name}).encode()
        file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
    return folder


def names_in(folder: Path, split: str = "") -> list[str]:
    rows = open_rows(str(folder), split, "task.path")
    return [rows[index]["name"] for index in range(len(rows))]


@pytest.mark.parametrize(
    "names",
    [
        ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"],
        ["part_1_of_3.jsonl", "part_2_of_3.jsonl", "part_3_of_3.jsonl"],
        ["data/train-0-of-1.jsonl"],
        ["0.jsonl", "1.jsonl"],
        ["part-0.jsonl", "part-1.jsonl"],
        ["train/part-00000-8f1c.jsonl", "train/part-00001-8f1c.jsonl"],
        ["train/00000-of-00002.jsonl", "train/00001-of-00002.jsonl"],
        ["train-00000-of-00002-ab12cd34.jsonl", "train-00001-of-00002-ef56ab78.jsonl"],
        ["train-00000-of-00002.json", "train-00001-of-00002.jsonl"],
    ],
)
def test_open_rows_reads_all_shards_of_a_split_in_order(tmp_path: Path, names: list[str]) -> None:
    assert names_in(folder_of(tmp_path, *names)) == names


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["train-00000-of-00002.jsonl"], "lacks 1 of 2 shards of .*train; .* numbered 0"),
        (["train-00001-of-00002.jsonl"], "lacks 1 of 2 shards of .*train; .* numbered 1"),
        (["a_2_of_3.jsonl", "a_3_of_3.jsonl"], "lacks 1 of 3 shards of .*a; .* numbered 2, 3"),
        (["a_1_of_3.jsonl", "a_2_of_3.jsonl"], "lacks 1 of 3 shards of .*a; .* numbered 1, 2"),
        (["train-00000-of-00002-ab12cd34.jsonl"], "lacks 1 of 2 shards of .*train;"),
        (["train/00000-of-00002.jsonl"], "lacks 1 of 2 shards"),
        (
            ["t-0-of-2.jsonl", "t-1-of-2.jsonl", "t-0-of-1.jsonl"],
            "holds shards of 1 and of 2 of .*t: files of two",
        ),
        (
            ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl.gz"],
            "train-00001-of-00002.jsonl.gz is compressed; rows are read at any offset",
        ),
        (["train.jsonl.gz"], "train.jsonl.gz is compressed"),
        (["0.jsonl", "1.jsonl.zst"], "1.jsonl.zst is compressed"),
        (["part-0.jsonl", "part-1.jsonl.gz"], "part-1.jsonl.gz is compressed"),
        (["a.jsonl", "b.jsonl.gz"], "several splits: set split to one of a, b"),
    ],
)
def test_open_rows_is_refused_when_a_shard_is_missing_or_compressed(
    tmp_path: Path, names: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        names_in(folder_of(tmp_path, *names))


def test_open_rows_ignores_hidden_files_and_folders(tmp_path: Path) -> None:
    hidden = [".cache/huggingface/train.jsonl", ".train.jsonl", "a/.ipynb_checkpoints/x.json"]
    assert names_in(folder_of(tmp_path, "train.jsonl", *hidden)) == ["train.jsonl"]


def test_open_rows_reads_a_hidden_folder_when_it_is_the_path(tmp_path: Path) -> None:
    folder_of(tmp_path, ".data/train.jsonl")
    assert names_in(tmp_path / ".data") == [".data/train.jsonl"]


def test_open_rows_ignores_a_compressed_copy_of_a_file(tmp_path: Path) -> None:
    assert names_in(folder_of(tmp_path, "train.jsonl", "train.jsonl.gz")) == ["train.jsonl"]


def test_open_rows_reads_chosen_split_when_another_is_compressed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "train.jsonl", "raw.jsonl.gz")
    assert names_in(folder, "train") == ["train.jsonl"]
    with pytest.raises(UserError, match=r"raw\.jsonl\.gz is compressed"):
        names_in(folder, "raw")
