"""Logs of child processes have a limit, and keep what was printed last."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megatron_async.files.bounded_log import LOG_BYTES, BoundedLog


def logged(path: Path, code: str) -> tuple[str, int]:
    """The end of what a program prints, and the bytes of all its logs."""
    log = BoundedLog(path)
    child = subprocess.Popen([sys.executable, "-c", code], stdout=log.sink, stderr=log.sink)
    log.start()
    child.wait(60)
    tail = log.tail(20)
    return tail, sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))


def test_a_log_that_is_short_is_whole_and_goes_on_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    assert logged(path, "print('one')") == ("one\n", 4)
    assert logged(path, "import sys; sys.stderr.write('two')") == ("two", 7)
    assert path.read_text() == "one\ntwo"


def test_a_log_keeps_the_newest_output_within_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    tail, size = logged(path, "for i in range(20): print(f'{i:02d}' * 100_000)\nprint('end')")
    assert tail.endswith("19\nend\n") and len(tail) < LOG_BYTES
    assert LOG_BYTES // 2 < size <= 2 * LOG_BYTES
    assert path.read_text().endswith("end\n")


def test_a_flood_neither_waits_for_a_log_that_cannot_be_written_nor_ends(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    code = f"import shutil\nshutil.rmtree({str(folder)!r})\nfor i in range(9): print('x' * 500_000)"
    tail, size = logged(folder / "a.log", code)
    assert tail.endswith("x\n") and size == 0


def test_the_end_of_the_output_is_there_when_the_child_is_killed(tmp_path: Path) -> None:
    code = "import os\nos.write(2, b'last words')\nos.kill(os.getpid(), 9)"
    assert logged(tmp_path / "a.log", code)[0] == "last words"
