"""Files of pieces: any box is read from any cut, plain safetensors, corrupt in one sentence."""

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
from megatron_async.checkpoint.files import PieceReader, RankFiles, header_room, piece_key
from megatron_async.checkpoint.manifest import CorruptCheckpoint

NAME = "weights/w"
WHOLE = torch.arange(35, dtype=torch.float32).reshape(5, 7)


def write(folder: Path, pieces: list[tuple[tuple[int, ...], Tensor]], ranks: int = 1) -> list[str]:
    """Pieces of one tensor, given to the ranks in turn; the names of the files."""
    room = sum(header_room(piece_key(NAME, offsets)) for offsets, _ in pieces)
    for rank in range(ranks):
        with RankFiles(folder, rank, room) as files:
            for offsets, tensor in pieces[rank::ranks]:
                files.add(piece_key(NAME, offsets), tensor)
            files.finish()
    return sorted(path.name for path in folder.iterdir())


def read(folder: Path, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
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
def test_any_box_is_read_from_any_cut(
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


def test_a_file_is_one_that_the_safetensors_library_reads(tmp_path: Path) -> None:
    (name,) = write(tmp_path, [((0, 0), WHOLE[:2]), ((2, 0), WHOLE[2:])])
    with safe_open(tmp_path / name, framework="pt") as file:
        assert sorted(file.keys()) == ["weights/w@0,0", "weights/w@2,0"]
        assert torch.equal(file.get_tensor("weights/w@2,0"), WHOLE[2:])


def test_each_precision_has_a_file_of_its_own(tmp_path: Path) -> None:
    names = write(tmp_path, [((0,), torch.ones(3, dtype=torch.bfloat16)), ((3,), torch.ones(2))])
    assert names == ["rank_00000.bf16.safetensors", "rank_00000.f32.safetensors"]
    assert torch.equal(read(tmp_path, (0,), (5,)), torch.ones(5))


def test_what_no_piece_covers_is_missed_by_name(tmp_path: Path) -> None:
    write(tmp_path, [((0, 0), WHOLE[:2]), ((3, 0), WHOLE[3:])])
    assert torch.equal(read(tmp_path, (3, 1), (2, 2)), WHOLE[3:, 1:3])
    with pytest.raises(CorruptCheckpoint, match=r"tensor weights/w has 28 of the 35 elements"):
        read(tmp_path, (0, 0), (5, 7))


# ------------------------------------------------------------ somebody else's bytes

Entry = dict[str, Any]


def with_header(folder: Path, change: Callable[[dict[str, Entry]], Any]) -> None:
    """The file's header changed, of the same length or longer."""
    (path,) = folder.iterdir()
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    header = change(header) or header
    text = json.dumps(header).encode().ljust(length)
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def first(header: dict[str, Entry]) -> Entry:
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
def test_a_header_that_does_not_describe_the_file_is_corrupt(
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
def test_other_bytes_are_corrupt(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rank_00000.f32.safetensors").write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        read(tmp_path, (0, 0), (5, 7))


def test_wherever_a_file_is_torn_it_is_corrupt(tmp_path: Path) -> None:
    (name,) = write(tmp_path, [((0, 0), WHOLE)])
    whole = (tmp_path / name).read_bytes()
    for end in range(len(whole)):
        (tmp_path / name).write_bytes(whole[:end])
        with pytest.raises(CorruptCheckpoint):
            read(tmp_path, (0, 0), (5, 7))


def test_a_name_that_leads_out_of_the_checkpoint_is_not_followed(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="is not a name inside the checkpoint"):
        PieceReader(tmp_path, ["rank_00000/../../outside.safetensors"])


def test_a_file_that_ends_after_its_header_was_read_is_corrupt(tmp_path: Path) -> None:
    (name,) = write(tmp_path, [((0, 0), WHOLE)])
    with PieceReader(tmp_path, [name]) as reader:
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:-4])
        with pytest.raises(CorruptCheckpoint, match="ends early"):
            reader.read(NAME, (0, 0), torch.empty(5, 7))
