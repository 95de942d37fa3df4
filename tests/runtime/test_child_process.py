"""Commands of child processes, and what they import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_async.errors import UserError
from megatron_async.runtime.child_process import module_command, start_child
from megatron_async.runtime.import_path import load_object


def test_a_child_imports_nothing_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('of the user')")
    (tmp_path / "own.py").write_text("")
    ran = start_child(
        [*module_command("json.tool"), "--help"], cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    assert ran.wait(30) == 0
    own = start_child(module_command("own"), cwd=tmp_path, stderr=subprocess.DEVNULL)
    assert own.wait(30) == 1, "no module of the working directory can be run by its name"


def test_a_child_of_a_child_imports_nothing_from_it_either(tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError('of the user')")
    code = (
        "import multiprocessing\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=print)\n"
        "    child.start()\n"
        "    child.join()\n"
        "    raise SystemExit(child.exitcode)\n"
    )
    (tmp_path / "program.py").write_text(code)
    done = subprocess.run([sys.executable, "-P", "program.py"], cwd=tmp_path, timeout=60)
    assert done.returncode == 0


def test_a_module_next_to_a_users_file_can_be_imported_but_replaces_none(tmp_path: Path) -> None:
    (tmp_path / "my_neighbor_module.py").write_text("VALUE = 7")
    (tmp_path / "textwrap.py").write_text("raise RuntimeError('of the user')")
    file = tmp_path / "mine.py"
    file.write_text("import textwrap\nfrom my_neighbor_module import VALUE\n")
    before = [*sys.path]
    try:
        assert load_object(f"{file}:VALUE", "reward") == 7
    finally:
        sys.path[:] = before
        sys.modules.pop("my_neighbor_module", None)


def test_a_module_of_the_working_directory_is_named_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("score = len")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    with pytest.raises(UserError, match=r"no module 'mine' on the Python path; name the file, as"):
        load_object("mine:score", "reward")
