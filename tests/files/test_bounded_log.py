"""Tests that logs of child processes have a limited size and keep the newest output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megatron_async.files.bounded_log import LOG_BYTES, BoundedLog


def logged(path: Path, code: str) -> tuple[str, int]:
    """Return the end of a program's output and the total size of its log files in bytes."""
    log = BoundedLog(path)
    child = subprocess.Popen([sys.executable, "-c", code], stdout=log.sink, stderr=log.sink)
    log.start()
    child.wait(60)
    tail = log.tail(20)
    return tail, sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))


def test_bounded_log_keeps_short_output_and_appends_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    assert logged(path, "print('one')") == ("one\n", 4)
    assert logged(path, "import sys; sys.stderr.write('two')") == ("two", 7)
    assert path.read_text() == "one\ntwo"


def test_bounded_log_keeps_newest_output_within_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    tail, size = logged(path, "for i in range(20): print(f'{i:02d}' * 100_000)\nprint('end')")
    assert tail.endswith("19\nend\n") and len(tail) < LOG_BYTES
    assert LOG_BYTES // 2 < size <= 2 * LOG_BYTES
    assert path.read_text().endswith("end\n")


def test_bounded_log_drops_output_when_the_log_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    code = f"import shutil\nshutil.rmtree({str(folder)!r})\nfor i in range(9): print('x' * 500_000)"
    tail, size = logged(folder / "a.log", code)
    assert tail.endswith("x\n") and size == 0


def test_bounded_log_has_the_last_output_when_the_child_is_killed(tmp_path: Path) -> None:
    code = "import os\nos.write(2, b'last words')\nos.kill(os.getpid(), 9)"
    assert logged(tmp_path / "a.log", code)[0] == "last words"
