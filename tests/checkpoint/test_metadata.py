"""Reading a checkpoint's metadata never runs what somebody put into it."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from megatron_async.checkpoint.files import ShardFiles, ShardReader
from megatron_async.checkpoint.manifest import CorruptCheckpoint
from megatron_async.checkpoint.metadata import METADATA_NAME, check_metadata
from megatron_async.checkpoint.placement import Piece
from tests.checkpoint.hostile import Hostile


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of one tensor."""
    with ShardFiles(tmp_path, ranks=1) as files:
        files.add(0, "weight", (2, 3), Piece((0, 0), torch.ones(2, 3)))
        files.finish()
    return tmp_path


def test_what_the_trainer_writes_is_read(folder: Path) -> None:
    check_metadata(folder)
    assert torch.equal(ShardReader(folder).read("weight", ()), torch.ones(2, 3))


def test_a_program_in_the_metadata_is_refused_and_does_not_run(folder: Path) -> None:
    marker = folder / "it-ran"
    original = pickle.loads((folder / METADATA_NAME).read_bytes())
    original.planner_data = {"key": Hostile(marker)}
    (folder / METADATA_NAME).write_bytes(pickle.dumps(original))
    with pytest.raises(CorruptCheckpoint, match=r"it names pathlib\.\w+"):
        ShardReader(folder)
    assert not marker.exists()
    pickle.loads((folder / METADATA_NAME).read_bytes())
    assert marker.exists(), "the program is one that plain pickle would have run"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.metadata", "field"),
    ],
)
def test_only_the_classes_of_metadata_are_constructed(folder: Path, module: str, name: str) -> None:
    (folder / METADATA_NAME).write_bytes(
        b"\x80\x04" + b"".join(_short_string(text) for text in (module, name)) + b"\x93."
    )
    with pytest.raises(CorruptCheckpoint, match=f"it names {module}.{name}"):
        check_metadata(folder)


def _short_string(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


@pytest.mark.parametrize("content", [b"", b"\x80\x04N.", b"not a pickle"])
def test_torn_or_foreign_metadata_is_corrupt(folder: Path, content: bytes) -> None:
    (folder / METADATA_NAME).write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=r"\.metadata"):
        check_metadata(folder)
