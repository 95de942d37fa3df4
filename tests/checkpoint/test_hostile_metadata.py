"""Whatever a checkpoint says of its objects, it is corrupt in one sentence, or it passes."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from megatron_async.checkpoint.files import ShardFiles, ShardReader
from megatron_async.checkpoint.manifest import CorruptCheckpoint
from megatron_async.checkpoint.metadata import (
    COMMON_NAME,
    METADATA_NAME,
    check_metadata,
    check_objects,
)
from megatron_async.checkpoint.placement import Piece

OBJECT = MetadataIndex("random")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of one tensor, one object and the common state."""
    with ShardFiles(tmp_path, ranks=1) as files:
        files.add(0, "weight", (2, 3), Piece((0, 0), torch.ones(2, 3)))
        files.finish()
    torch.save({}, tmp_path / COMMON_NAME)
    torch.save([1, 2], tmp_path / "object")
    metadata = read(tmp_path)
    metadata.state_dict_metadata["random"] = BytesStorageMetadata()
    metadata.storage_data[OBJECT] = replace(
        next(iter(metadata.storage_data.values())),
        relative_path="object",
        offset=0,
        length=(tmp_path / "object").stat().st_size,
    )
    write(tmp_path, metadata)
    return tmp_path


def read(folder: Path) -> Metadata:
    content: Metadata = pickle.loads((folder / METADATA_NAME).read_bytes())
    return content


def write(folder: Path, metadata: Metadata) -> None:
    (folder / METADATA_NAME).write_bytes(pickle.dumps(metadata))


def test_a_whole_checkpoint_passes_in_every_share(folder: Path) -> None:
    check_objects(folder)
    for part in range(3):
        check_objects(folder, part, 3)


def leaves_out_the_tensors(metadata: Metadata) -> None:
    del metadata.state_dict_metadata


def leaves_out_the_files(metadata: Metadata) -> None:
    metadata.storage_data = [OBJECT]


def names_objects_by_strings(metadata: Metadata) -> None:
    metadata.storage_data = {"random": metadata.storage_data[OBJECT]}


def tells_nothing_of_the_object(metadata: Metadata) -> None:
    metadata.storage_data[OBJECT] = None


def puts_it_beyond_every_file(metadata: Metadata) -> None:
    metadata.storage_data[OBJECT].offset = 2**70


def puts_it_into_no_file(metadata: Metadata) -> None:
    metadata.storage_data[OBJECT].relative_path = "a\0b"


@pytest.mark.parametrize(
    "damage",
    [
        leaves_out_the_tensors,
        leaves_out_the_files,
        names_objects_by_strings,
        tells_nothing_of_the_object,
        puts_it_beyond_every_file,
        puts_it_into_no_file,
    ],
)
def test_metadata_that_lacks_a_field_or_has_another_in_its_place_is_corrupt(
    folder: Path, damage: Callable[[Metadata], None]
) -> None:
    metadata = read(folder)
    damage(metadata)
    write(folder, metadata)
    with pytest.raises(CorruptCheckpoint):
        check_objects(folder)


def test_bytes_that_no_file_has_are_not_read(folder: Path) -> None:
    metadata = read(folder)
    entry = metadata.storage_data[OBJECT]
    metadata.storage_data[OBJECT] = replace(entry, length=2**40)
    write(folder, metadata)
    told = f"object random is said to be bytes 0 to {2**40} of object, which has {entry.length}"
    with pytest.raises(CorruptCheckpoint, match=told):
        check_objects(folder)


@pytest.mark.parametrize("name", ["/dev/zero", "{folder}/object", "../{folder.name}/object"])
@pytest.mark.parametrize("key", ["random", "weight"])
def test_a_name_that_leads_out_of_the_checkpoint_is_not_followed(
    folder: Path, key: str, name: str
) -> None:
    """Tensors too: torch would open their files as they are named."""
    metadata = read(folder)
    name = name.format(folder=folder)
    entry = metadata.storage_data[OBJECT if key == "random" else weight(metadata)]
    entry.relative_path = name
    write(folder, metadata)
    with pytest.raises(CorruptCheckpoint, match=f"'{name}' is not a name inside the checkpoint"):
        check_objects(folder)
    if key == "weight":
        with pytest.raises(CorruptCheckpoint, match="is not a name inside the checkpoint"):
            ShardReader(folder).read("weight", ())


@pytest.mark.parametrize("name", ["object", METADATA_NAME, COMMON_NAME])
def test_a_pipe_is_refused_before_it_is_opened(folder: Path, name: str) -> None:
    """Nobody writes to it: to open it would wait for ever."""
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CorruptCheckpoint, match=f"{name} is no regular file"):
        check_objects(folder)


def leaves_out_its_files(metadata: Metadata) -> None:
    metadata.storage_data = {}


def makes_it_no_tensor_on_disk(metadata: Metadata) -> None:
    metadata.storage_data[weight(metadata)].offset += 1
    metadata.storage_data[weight(metadata)].length -= 1


def puts_it_past_its_file(metadata: Metadata) -> None:
    metadata.storage_data[weight(metadata)].length += 1


def gives_it_another_shape(metadata: Metadata) -> None:
    description = metadata.state_dict_metadata["weight"]
    description.chunks[0] = replace(description.chunks[0], sizes=torch.Size((3, 3)))


def gives_it_all_the_memory_there_is(metadata: Metadata) -> None:
    shape = torch.Size((2**36, 3))
    description = metadata.state_dict_metadata["weight"]
    description.size = shape
    description.chunks[0] = replace(description.chunks[0], sizes=shape)


def takes_its_shape_away(metadata: Metadata) -> None:
    metadata.state_dict_metadata["weight"].size = None


def weight(metadata: Metadata) -> MetadataIndex:
    (index,) = [index for index in metadata.storage_data if index.fqn == "weight"]
    return index


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (leaves_out_the_tensors, r"\.metadata describes no tensors"),
        (names_objects_by_strings, "tensor weight cannot be read"),
        (takes_its_shape_away, "tensor weight has no shape"),
        (leaves_out_its_files, "tensor weight cannot be read"),
        (makes_it_no_tensor_on_disk, "tensor weight cannot be read"),
        (puts_it_past_its_file, r"weight is said to be bytes 0 to \d+ of __0_0.distcp, which has"),
        (gives_it_another_shape, "tensor weight cannot be read"),
        (
            gives_it_all_the_memory_there_is,
            rf"weight at \(\) has shape \({2**36}, 3\) of torch.float32, and the files hold \d+ b",
        ),
    ],
)
def test_a_tensor_that_is_not_what_the_metadata_says_is_corrupt_in_one_sentence(
    folder: Path, damage: Callable[[Metadata], None], told: str
) -> None:
    metadata = read(folder)
    damage(metadata)
    write(folder, metadata)
    with pytest.raises(CorruptCheckpoint, match=told) as refused:
        reader = ShardReader(folder)
        reader.shape("weight")
        reader.read("weight", ())
    assert len(str(refused.value).splitlines()) == 1


def call(module: str, name: str, argument: bytes) -> bytes:
    """A pickle that calls an allowed name."""

    def text(word: str) -> bytes:
        return b"\x8c" + bytes([len(word)]) + word.encode()

    return b"\x80\x04" + text(module) + text(name) + b"\x93" + argument + b"\x85R."


@pytest.mark.parametrize(
    "content",
    [
        b"Inot a number\n.",
        b"\x80\x63.",
        b"\x80\x04\x95" + (2**60).to_bytes(8, "little") + b"N.",
        call("torch.serialization", "_get_layout", b"\x8c\x04none"),
        call("collections", "OrderedDict", b"K\x01"),
    ],
    ids=["value", "protocol", "length", "key", "type"],
)
def test_whatever_reading_it_raises_it_is_corrupt(folder: Path, content: bytes) -> None:
    (folder / METADATA_NAME).write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=r"\.metadata cannot be read"):
        check_metadata(folder)


def test_wherever_it_is_torn_it_is_corrupt(folder: Path) -> None:
    whole = (folder / METADATA_NAME).read_bytes()
    for end in range(len(whole)):
        (folder / METADATA_NAME).write_bytes(whole[:end])
        with pytest.raises(CorruptCheckpoint) as refused:
            check_objects(folder)
        assert len(str(refused.value).splitlines()) == 1
