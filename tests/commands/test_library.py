"""The package as a library: fast to import, names as documented, a run in one line."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import closing
from importlib import import_module
from pathlib import Path

import pytest

import megatron_async
from megatron_async import open_run
from megatron_async.commands.library import import_path_of
from megatron_async.errors import UserError
from tests.telemetry.test_report import make_run

DOCS = Path(__file__).parents[2] / "docs"
HEAVY = ("torch", "ray", "transformers", "pydantic", "megatron", "numpy")


def own_reward(prompt: str, response: str) -> float:
    return 1.0


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, megatron_async as m; assert 'train' in m.__all__; "
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_imported_and_no_other() -> None:
    for name in megatron_async.__all__:
        assert getattr(megatron_async, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'trane'"):
        megatron_async.trane  # noqa: B018


def test_every_name_of_the_documentation_is_at_its_path() -> None:
    names = re.findall(r"^::: ([\w.]+)$", (DOCS / "reference" / "api.md").read_text(), re.M)
    assert len(names) > 8
    for name in names:
        module, _, last = name.rpartition(".")
        assert hasattr(import_module(module), last) or import_module(name)


def test_a_run_opens_in_one_line(tmp_path: Path) -> None:
    run = open_run(make_run(tmp_path, "one"))
    assert run.config.name == "one"
    assert run.metrics[-1]["reward/max"] == 1.0 and len(run.evaluations) > 0
    with closing(run.store()) as store:
        assert store.trajectory(0).reward == 1.0
    with pytest.raises(UserError, match="there is no run"):
        open_run(tmp_path / "nowhere")


def test_a_reward_is_named_by_its_file_so_that_other_processes_can_import_it() -> None:
    assert import_path_of(own_reward) == f"{Path(__file__).resolve()}:own_reward"
    for unreachable in (lambda prompt, response: 1.0, eval("lambda p, r: 1.0"), 3):
        with pytest.raises(UserError, match="which other processes cannot import"):
            import_path_of(unreachable)  # type: ignore[arg-type]
