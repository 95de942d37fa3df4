"""Tests writes to full, read-only and failing disks: each gives one clear message and leaves no
incomplete file."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_async.files.disk import (
    CannotWrite,
    JsonLinesFile,
    check_free_space,
    disk_failure,
    json_lines,
    reason,
    translating_disk_errors,
    whole_lines_end,
    writing,
)
from tests.small_disk import SmallDisk


def raised(number: int, filename: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), filename)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "No space left on device; free space on its file system, or raise the"),
        (errno.EDQUOT, "Disk quota exceeded; free space on its file system, or raise the quota"),
        (errno.EROFS, "Read-only file system; mount its file system writable"),
        (errno.EACCES, "Permission denied; give this user the right to write there"),
        (errno.EIO, "Input/output error; check its file system, which is full, over its quota"),
        (errno.ENOTDIR, "Not a directory"),
    ],
)
def test_writing_raises_error_with_path_reason_and_remedy_when_disk_fails(
    number: int, message: str
) -> None:
    with pytest.raises(CannotWrite) as failure, writing(Path("/runs/a/metrics.jsonl")):
        raise raised(number)
    assert str(failure.value).startswith(f"/runs/a/metrics.jsonl cannot be written: {message}")


def test_writing_raises_other_errors_unchanged() -> None:
    with pytest.raises(KeyError), writing(Path("a")):
        raise KeyError("a")
    assert disk_failure(KeyError("a")) is None
    assert disk_failure(raised(errno.ECONNREFUSED)) is None
    assert disk_failure(raised(errno.EACCES)) is None, "the error may be from a signal or socket"


def test_disk_errors_are_explained_when_no_path_is_known() -> None:
    with pytest.raises(CannotWrite) as failure, translating_disk_errors():
        raise raised(errno.ENOSPC)
    assert str(failure.value).startswith("a file cannot be used: No space left on device; free")
    with pytest.raises(CannotWrite) as failure, translating_disk_errors():
        raise raised(errno.EACCES, "/a/b")
    assert str(failure.value).startswith("/a/b cannot be used: Permission denied; give")


def test_reason_has_a_remedy_when_the_error_is_from_sqlite(disk: SmallDisk) -> None:
    connection = sqlite3.connect(disk.path / "a.sqlite")
    connection.execute("CREATE TABLE t (a)")
    disk.fill()
    with pytest.raises(sqlite3.Error) as error:
        connection.execute("INSERT INTO t VALUES (zeroblob(100000))")
        connection.commit()
    assert reason(error.value).startswith("database or disk is full; free space")
    connection.close()


def test_writing_explains_safetensors_error_when_disk_is_full(disk: SmallDisk) -> None:
    file = disk.path / "model.safetensors"
    with pytest.raises(CannotWrite) as failure, writing(file):
        save_file({"a": torch.zeros(4 << 20)}, file)
    assert str(failure.value).startswith(f"{file} cannot be written: No space left on device; free")


def test_check_free_space_raises_when_disk_is_full_and_leaves_no_file(disk: SmallDisk) -> None:
    check_free_space(disk.path, 1 << 20)
    disk.fill(leave=1 << 19)
    with pytest.raises(CannotWrite, match=f"^{disk.path} cannot be written: No space left"):
        check_free_space(disk.path, 1 << 20)
    assert disk.free_bytes() == 1 << 19
    disk.make_room()
    disk.read_only()
    with pytest.raises(CannotWrite, match="Read-only file system; mount"):
        check_free_space(disk.path, 1)


class TestJsonLinesFile:
    LINE = json.dumps({"a": "x" * 3000}) + "\n"

    def test_json_lines_file_never_has_part_of_a_line_when_disk_is_full(
        self, disk: SmallDisk
    ) -> None:
        path = disk.path / "a.jsonl"
        lines = JsonLinesFile(path)
        disk.fill(leave=5 * 4096)
        written = 0
        with pytest.raises(CannotWrite, match=f"^{path} cannot be written: No space left"):
            while True:
                lines.write(self.LINE)
                lines.flush()
                written += 1
        assert written == 6, "five pages hold six lines of 3 kB and part of a seventh"
        assert path.read_text() == written * self.LINE
        disk.make_room()
        # Without this, the file would silently lack the lines that failed.
        with pytest.raises(CannotWrite):
            lines.write(self.LINE)
        lines.close()
        lines.close()
        again = JsonLinesFile(path)
        again.write(self.LINE)
        again.close()
        assert path.read_text() == (written + 1) * self.LINE

    @pytest.mark.parametrize("replaced", [False, True], ids=["removed", "replaced"])
    def test_json_lines_file_is_created_again_when_removed_or_replaced(
        self, tmp_path: Path, replaced: bool
    ) -> None:
        path = tmp_path / "a.jsonl"
        lines = JsonLinesFile(path)
        lines.write('{"a": 1}\n')
        lines.flush()
        path.unlink()
        if replaced:
            (tmp_path / "other").write_text('{"a": 0}\n')
            (tmp_path / "other").rename(path)
        lines.write('{"a": 2}\n')
        lines.close()
        assert path.read_text() == '{"a": 0}\n' * replaced + '{"a": 2}\n'

    def test_json_lines_file_buffers_lines_up_to_a_limit(self, tmp_path: Path) -> None:
        lines = JsonLinesFile(tmp_path / "a.jsonl", new=True)
        lines.write(self.LINE)
        assert (tmp_path / "a.jsonl").read_text() == ""
        for _ in range(99):
            lines.write(self.LINE)
        assert len((tmp_path / "a.jsonl").read_text()) > 3000 * 60, "memory is bounded"
        lines.close()
        assert (tmp_path / "a.jsonl").read_text() == 100 * self.LINE
        with pytest.raises(CannotWrite, match="File exists"):
            JsonLinesFile(tmp_path / "a.jsonl", new=True)

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ("", ""),
            ('{"a": 1}\n', '{"a": 1}\n'),
            ('{"a": 1}\n{"a": 2', '{"a": 1}\n'),
            ('{"a": 1}\n{"a": 2}', '{"a": 1}\n{"a": 2}\n'),
            ('{"a', ""),
            ('{"a": 1}\n{"a": "' + 200_000 * "x", '{"a": 1}\n'),
            (200_000 * "x", ""),
        ],
        ids=["empty", "whole", "torn", "no newline", "torn first", "long", "long first"],
    )
    def test_json_lines_file_repairs_the_last_line_when_it_is_incomplete(
        self, tmp_path: Path, before: str, after: str
    ) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text(before)
        assert whole_lines_end(path) == before.rfind("\n") + 1
        lines = JsonLinesFile(path)
        assert path.read_text() == after
        lines.write('{"a": 3}\n')
        lines.close()
        assert path.read_text() == after + '{"a": 3}\n'

    def test_json_lines_skips_lines_that_are_not_json_objects(self) -> None:
        data = b'{"a": 1}\n{"a": 2{"a": 3}\n\n\xff\xfe\n[1]\n{"a": "\xe2\x80\xa8"}\n{"a"'
        assert list(json_lines(data)) == [{"a": 1}, {"a": "\u2028"}]
