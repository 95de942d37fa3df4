"""Tests manifests: atomic commits, verification, order by lineage and step, and pruning."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from megatron_async.checkpoint import manifest as manifests
from megatron_async.checkpoint.manifest import (
    COPY_NAME,
    MANIFEST_NAME,
    CorruptCheckpoint,
    Manifest,
    SavedLayout,
    all_faults,
    check_manifests,
    faults,
    finalize,
    find_latest,
    hash_file,
    list_checkpoints,
    open_checkpoint,
    step_directory,
)
from megatron_async.checkpoint.placement import tensor_shapes
from megatron_async.errors import UserError
from megatron_async.files import disk
from megatron_async.models.families import read_architecture


def write(
    root: Path,
    step: int,
    lineage: int = 0,
    content: bytes = b"weights",
    model: Path | None = None,
) -> Path:
    """Write a finalized checkpoint with one file, whose manifest names the tensors of `model`."""
    shapes = tensor_shapes(read_architecture(model), "adam") if model else {}
    target = step_directory(root, step)
    temporary = target.with_name(f".tmp-{step}")
    temporary.mkdir(parents=True)
    (temporary / "data.distcp").write_bytes(content)
    finalize(
        temporary,
        target,
        Manifest(
            lineage=lineage,
            step=step,
            layout=SavedLayout(1, 1, 1),
            files={"data.distcp": hash_file(temporary / "data.distcp")},
            extra={"store_position": step * 10},
            tensors={
                name: manifests.TensorRecord("float32", shape, "0" * 16)
                for name, shape in shapes.items()
            },
        ),
    )
    return target


def latest_step(root: Path) -> int | None:
    latest = find_latest(root)
    return None if latest is None else latest.manifest.step


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 3}', '{"format": 3, "step": 2}'])
def test_manifest_is_corrupt_when_json_is_something_else(text: str) -> None:
    with pytest.raises(CorruptCheckpoint):
        Manifest.from_json(text)


def test_manifest_detects_any_flipped_bit_that_changes_it(tmp_path: Path) -> None:
    """The manifest contains counters and positions besides the files' checksums."""
    path = write(tmp_path, 12) / "manifest.json"
    saved, content = Manifest.from_json(path.read_text()), path.read_bytes()
    silent = []
    for number in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[number // 8] ^= 1 << number % 8
        try:
            if Manifest.from_json(flipped.decode()) != saved:
                silent.append(flipped[number // 8 - 9 : number // 8 + 9].decode())
        except (CorruptCheckpoint, UserError, UnicodeDecodeError):
            continue
    assert silent == []


@pytest.mark.parametrize("found", [2, 4])
def test_checkpoint_is_refused_by_name_when_its_format_is_another(
    tmp_path: Path, found: int
) -> None:
    """A run that ignored such a checkpoint would restart from scratch."""
    write(tmp_path, 1)
    manifest_file = write(tmp_path, 2) / "manifest.json"
    content = json.loads(manifest_file.read_text())
    assert content["format"] == 3
    for name in (MANIFEST_NAME, COPY_NAME):
        (manifest_file.parent / name).write_text(json.dumps({**content, "format": found}))
    refusal = f"it has format {found}, and this version of megatron_async reads format 3;"
    with pytest.raises(UserError, match=refusal):
        open_checkpoint(tmp_path / "step_000002")
    with pytest.raises(UserError, match=refusal):
        find_latest(tmp_path)


def test_find_latest_prefers_newer_lineage_over_higher_step(tmp_path: Path) -> None:
    write(tmp_path, 20, lineage=0)
    write(tmp_path, 12, lineage=1)
    assert latest_step(tmp_path) == 12


def test_find_latest_ignores_directory_without_manifests(tmp_path: Path) -> None:
    write(tmp_path, 1)
    newest = write(tmp_path, 2)
    for name in (MANIFEST_NAME, COPY_NAME):
        (newest / name).unlink()
    assert latest_step(tmp_path) == 1


@pytest.mark.parametrize("lost", [MANIFEST_NAME, COPY_NAME])
def test_checkpoint_is_intact_when_one_of_its_manifests_is_lost(tmp_path: Path, lost: str) -> None:
    write(tmp_path, 1)
    newest = write(tmp_path, 2)
    (newest / lost).unlink()
    check_manifests(tmp_path)
    assert latest_step(tmp_path) == 2
    assert open_checkpoint(newest).manifest.extra == {"store_position": 20}
    other = ({MANIFEST_NAME, COPY_NAME} - {lost}).pop()
    (newest / other).write_text("{")
    with pytest.raises(UserError, match="step_000002 is damaged"):
        check_manifests(tmp_path)


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_find_latest_skips_and_reports_checkpoint_with_damaged_file(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 1)
    newest = write(tmp_path, 2)
    data = newest / "data.distcp"
    if damage == "truncate":
        data.write_bytes(b"weigh")
    elif damage == "flip":
        data.write_bytes(b"weighTs")
    else:
        data.unlink()
    with caplog.at_level(logging.WARNING):
        assert latest_step(tmp_path) == 1
    assert "step_000002" in caplog.text
    assert "corrupt" in caplog.text


@pytest.mark.parametrize("older", [False, True])
def test_manifest_copy_is_read_when_the_manifest_is_damaged(tmp_path: Path, older: bool) -> None:
    if older:
        write(tmp_path, 1)
    path = write(tmp_path, 2) / MANIFEST_NAME
    intact = path.read_bytes()
    for index in range(0, len(intact), 7):
        path.write_bytes(bytes([*intact[:index], intact[index] ^ 0x10, *intact[index + 1 :]]))
        check_manifests(tmp_path)
        assert list_checkpoints(tmp_path)[0].step == 2, index
    path.write_bytes(intact.replace(b'"format": 3', b'"format": 7'))
    assert latest_step(tmp_path) == 2
    for size in (0, 1, len(intact) // 2, len(intact) - 1):
        path.write_bytes(intact[:size])
        assert latest_step(tmp_path) == 2


@pytest.mark.parametrize("older", [False, True])
def test_check_manifests_refuses_damaged_manifest_without_intact_copy(
    tmp_path: Path, older: bool
) -> None:
    """Also checks that no file is changed. An earlier version of this program wrote no copy."""
    if older:
        write(tmp_path, 1)
    newest = write(tmp_path, 2)
    (newest / COPY_NAME).unlink()
    path = newest / MANIFEST_NAME
    intact = path.read_bytes()
    for content in (b"", intact[:-3], intact.replace(b'"step": 2', b'"step": 3')):
        path.write_bytes(content)
        before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
        remedy = r"--from-step \(available: 1\)" if older else "no other checkpoint exists"
        with pytest.raises(UserError, match=rf"step_000002 is damaged: manifest\.json .*{remedy}"):
            check_manifests(tmp_path)
        after = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
        assert before == after


def test_check_manifests_ignores_damage_older_than_an_intact_checkpoint(tmp_path: Path) -> None:
    for name in (MANIFEST_NAME, COPY_NAME):
        (write(tmp_path, 1) / name).write_text("{")
    write(tmp_path, 2)
    check_manifests(tmp_path)
    assert latest_step(tmp_path) == 2


class Killed(BaseException):
    """Exception that stands for SIGKILL."""


@pytest.mark.parametrize("steps", range(4))
def test_killed_writer_leaves_a_complete_checkpoint_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """The writer dies before each renaming: of two files and of the directory."""
    allowed_steps = iter(range(steps))

    def dies_first(do: Callable[..., object]) -> Callable[..., object]:
        def step(*arguments: object) -> object:
            if next(allowed_steps, None) is None:
                raise Killed
            return do(*arguments)

        return step

    with monkeypatch.context() as patch:
        patch.setattr(disk, "replace_durably", dies_first(disk.replace_durably))
        patch.setattr(Path, "rename", dies_first(Path.rename))
        with pytest.raises(Killed) if steps < 3 else nullcontext():
            write(tmp_path, 2)
    check_manifests(tmp_path)
    found = list_checkpoints(tmp_path)
    assert [all_faults(checkpoint) for checkpoint in found] == ([[]] if steps == 3 else [])
    assert (tmp_path / "step_000002").exists() == (steps == 3), (
        "the directory has its final name only after the commit"
    )


def test_partly_removed_directory_is_not_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path) -> None:
        raise Killed

    path = write(tmp_path, 2)
    monkeypatch.setattr(manifests.shutil, "rmtree", killed)
    with pytest.raises(Killed):
        manifests.remove(path)
    assert (path / "data.distcp").exists()
    assert list_checkpoints(tmp_path) == []


def test_open_checkpoint_refuses_missing_or_damaged_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    path = write(tmp_path, 3)
    assert open_checkpoint(path).manifest.step == 3
    (path / "data.distcp").write_bytes(b"")
    with pytest.raises(UserError, match="0 bytes; the manifest says 7"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["/dev/null", "../outside", "pipe", "a\0b"])
def test_faults_refuses_file_names_that_are_unsafe_to_open(tmp_path: Path, name: str) -> None:
    """The record is that of an empty file, so the first three names would pass if they were
    read."""
    path = write(tmp_path, 2)
    (tmp_path / "outside").touch()
    os.mkfifo(path / "pipe")
    nothing = hash_file(tmp_path / "outside")
    expected = "is not a regular file" if name == "pipe" else "is not a name inside the checkpoint"
    (fault,) = faults(path, {name: nothing})
    assert fault.endswith(expected)


def test_finalize_replaces_existing_directory_of_the_same_step(tmp_path: Path) -> None:
    write(tmp_path, 5, lineage=0, content=b"old")
    path = write(tmp_path, 5, lineage=1, content=b"new")
    assert (path / "data.distcp").read_bytes() == b"new"
    assert [c.manifest.lineage for c in list_checkpoints(tmp_path)] == [1]
