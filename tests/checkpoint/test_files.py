"""Tests that any box is read from any cut of a tensor, and that damaged files are refused."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from megatron_async.checkpoint import files as module
from megatron_async.checkpoint.files import PieceReader, RankFiles, max_entry_bytes, piece_key
from megatron_async.checkpoint.manifest import CorruptCheckpoint

NAME = "weights/w"
WHOLE = torch.arange(35, dtype=torch.float32).reshape(5, 7)


def write(folder: Path, pieces: list[tuple[tuple[int, ...], Tensor]], ranks: int = 1) -> list[str]:
    """Write slices of one tensor, divided over the ranks; return the names of the files."""
    header_bytes = sum(max_entry_bytes(piece_key(NAME, offsets)) for offsets, _ in pieces)
    for rank in range(ranks):
        with RankFiles(folder, rank, header_bytes) as files:
            for offsets, tensor in pieces[rank::ranks]:
                files.add(piece_key(NAME, offsets), tensor)
            files.finish()
    return sorted(path.name for path in folder.iterdir())


def read(folder: Path, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """Return the box of a shape at the index `offsets` of the tensor that `folder` stores."""
    into = torch.full(shape, -1.0)
    with PieceReader(folder, [path.name for path in folder.iterdir()]) as reader:
        reader.read(NAME, offsets, into)
    return into


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    row_cuts=st.sets(st.integers(1, 4), max_size=3),
    col_cuts=st.sets(st.integers(1, 6), max_size=3),
    box=st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(1, 5), st.integers(1, 7)),
    band=st.integers(1, 80),
)
def test_reader_fills_any_box_from_any_cut_of_the_tensor(
    row_cuts: set[int],
    col_cuts: set[int],
    box: tuple[int, int, int, int],
    band: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    rows, cols = sorted({0, 5, *row_cuts}), sorted({0, 7, *col_cuts})
    pieces: list[tuple[tuple[int, ...], Tensor]] = [
        ((a, c), WHOLE[a:b, c:d]) for a, b in pairwise(rows) for c, d in pairwise(cols)
    ]
    folder = tmp_path_factory.mktemp("pieces")
    write(folder, pieces, ranks=2)
    row, column = box[:2]
    expected = WHOLE[row : row + box[2], column : column + box[3]]
    with mock.patch.object(module, "_BAND_BYTES", band):
        found = read(folder, (row, column), tuple(expected.shape))
    assert torch.equal(found, expected)


def test_tensor_file_is_readable_by_the_safetensors_library(tmp_path: Path) -> None:
    (name,) = write(tmp_path, [((0, 0), WHOLE[:2]), ((2, 0), WHOLE[2:])])
    with safe_open(tmp_path / name, framework="pt") as file:
        assert sorted(file.keys()) == ["weights/w@0,0", "weights/w@2,0"]
        assert torch.equal(file.get_tensor("weights/w@2,0"), WHOLE[2:])


def test_rank_files_writes_a_separate_file_for_each_precision(tmp_path: Path) -> None:
    names = write(tmp_path, [((0,), torch.ones(3, dtype=torch.bfloat16)), ((3,), torch.ones(2))])
    assert names == ["rank_00000.bf16.safetensors", "rank_00000.f32.safetensors"]
    assert torch.equal(read(tmp_path, (0,), (5,)), torch.ones(5))


def test_reader_names_the_tensor_when_slices_do_not_cover_the_box(tmp_path: Path) -> None:
    write(tmp_path, [((0, 0), WHOLE[:2]), ((3, 0), WHOLE[3:])])
    assert torch.equal(read(tmp_path, (3, 1), (2, 2)), WHOLE[3:, 1:3])
    with pytest.raises(CorruptCheckpoint, match=r"tensor weights/w has 28 of the 35 elements"):
        read(tmp_path, (0, 0), (5, 7))


# ------------------------------------------------------------ files with wrong content

Entry = dict[str, Any]


def with_header(folder: Path, change: Callable[[dict[str, Entry]], Any]) -> None:
    """Change the header of the only file in `folder`, which may become longer but not shorter."""
    (path,) = folder.iterdir()
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    header = change(header) or header
    text = json.dumps(header).encode().ljust(length)
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def first(header: dict[str, Entry]) -> Entry:
    """Return the first entry of a header."""
    return next(iter(header.values()))


@pytest.mark.parametrize(
    "change",
    [
        lambda header: first(header).update(data_offsets=[0, 1 << 70]),
        lambda header: first(header).update(data_offsets=[-8, 132]),
        lambda header: first(header).update(shape=[1 << 40, 7]),
        lambda header: first(header).update(shape=[-5, -7]),
        lambda header: first(header).update(shape=[0, 7], data_offsets=[0, 0]),
        lambda header: first(header).update(dtype="I64"),
        lambda header: first(header).pop("dtype"),
        lambda header: {"weights/w@0,x": first(header)},
        lambda header: {"weights/w": first(header)},
        lambda header: {"weights/w@0,0": 3},
        lambda header: [1, 2],
    ],
)
def test_reader_refuses_file_when_its_header_contradicts_it(
    tmp_path: Path, change: Callable[[dict[str, Entry]], Any]
) -> None:
    write(tmp_path, [((0, 0), WHOLE)])
    with_header(tmp_path, change)
    with pytest.raises(CorruptCheckpoint, match=r"rank_00000.f32.safetensors cannot be read") as e:
        read(tmp_path, (0, 0), (5, 7))
    assert len(str(e.value).splitlines()) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 4) + b"\xff\xfe\xff\xfe",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        pickle.dumps(WHOLE),
    ],
)
def test_reader_refuses_file_when_it_is_not_safetensors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rank_00000.f32.safetensors").write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        read(tmp_path, (0, 0), (5, 7))


def test_reader_refuses_file_when_truncated_at_any_byte(tmp_path: Path) -> None:
    (name,) = write(tmp_path, [((0, 0), WHOLE)])
    whole = (tmp_path / name).read_bytes()
    for end in range(len(whole)):
        (tmp_path / name).write_bytes(whole[:end])
        with pytest.raises(CorruptCheckpoint):
            read(tmp_path, (0, 0), (5, 7))


def test_reader_refuses_file_name_outside_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="is not a name inside the checkpoint"):
        PieceReader(tmp_path, ["rank_00000/../../outside.safetensors"])


def test_reader_refuses_file_when_truncated_after_its_header_was_read(tmp_path: Path) -> None:
    (name,) = write(tmp_path, [((0, 0), WHOLE)])
    with PieceReader(tmp_path, [name]) as reader:
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:-4])
        with pytest.raises(CorruptCheckpoint, match="ends early"):
            reader.read(NAME, (0, 0), torch.empty(5, 7))
