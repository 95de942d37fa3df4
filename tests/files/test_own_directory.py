"""Where the temporary files of a child process go."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from megatron_async.files.own_directory import (
    large_files_directory,
    own_directory,
    temporary_files,
)


def test_temporary_files_of_a_child_are_removed_with_it_but_large_ones_keep_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert large_files_directory() == tmp_path
    with own_directory() as directory:
        found = temporary_files(directory, {})
        assert found["TMPDIR"] == str(directory) and len(str(directory)) < 50
        for name, value in found.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(tempfile, "tempdir", None)
        assert tempfile.gettempdir() == str(directory)
        assert large_files_directory() == tmp_path
    assert not directory.exists()


@pytest.mark.parametrize(
    ("environment", "cache"),
    [
        ({"XDG_CACHE_HOME": "/c"}, "/c/megatron_async/torchinductor"),
        ({"TORCHINDUCTOR_CACHE_DIR": "/mine", "XDG_CACHE_HOME": "/c"}, "/mine"),
    ],
)
def test_compiled_code_is_kept_for_the_next_process(
    tmp_path: Path, environment: dict[str, str], cache: str
) -> None:
    assert temporary_files(tmp_path, environment)["TORCHINDUCTOR_CACHE_DIR"] == cache
