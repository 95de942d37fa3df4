"""Tests that an installed wheel works from any directory, without a clone of the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from megatron_async.files.package_files import ROOT, existing
from megatron_async.models.tiny_model import build_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.one_core]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment that has both wheels; their dependencies come from
    the environment of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    wheels = folder / "wheels"
    sources = [str(ROOT), str(ROOT / "kernels")]
    build = ["wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(wheels), *sources]
    _run([sys.executable, "-m", "pip", *build], folder)
    _run([sys.executable, "-m", "venv", "--without-pip", "env"], folder)
    python = folder / "env" / "bin" / "python"
    # A .pth file adds the packages without reading their own .pth files, so that the editable
    # installation in the environment of the tests stays invisible.
    site = next((folder / "env" / "lib").glob("python*")) / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    names = [str(wheel) for wheel in wheels.iterdir()]
    install = ["--python", str(python), "install", "--no-deps", "--no-index", "-q", *names]
    _run([sys.executable, "-m", "pip", *install], folder)
    return python


def _run(command: list[str], folder: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _command(installed: Path, folder: Path, *arguments: str) -> str:
    return _run([str(installed.parent / "megatron-async"), *arguments], folder)


def test_wheel_runs_doctor_and_help(installed: Path, tmp_path: Path) -> None:
    assert "Python" in _command(installed, tmp_path, "doctor")
    assert "tiny model" in _command(installed, tmp_path, "quickstart", "--help")


def test_dry_run_names_the_scripts_and_the_environment_of_the_wheel(
    installed: Path, tmp_path: Path
) -> None:
    build_tiny_model(tmp_path / "model", seed=0)
    out = _command(
        installed, tmp_path, "launch", "--slurm", "--dry-run",
        "--config", "configs/quickstart.yaml", "--gpus-per-node", "0",
        f"model.path={tmp_path / 'model'}",
    )  # fmt: skip
    script = next(word for word in out.split() if word.endswith("train.sbatch"))
    assert Path(script).is_file() and script.startswith(str(installed.parents[1]))
    assert f"MEGATRON_ASYNC_VENV={installed.parents[1]}" in out


def test_existing_prefers_the_users_file_to_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = Path("configs/quickstart.yaml")
    assert existing(name) == ROOT / name
    name.parent.mkdir()
    name.write_text("name: own\n")
    assert existing(name) == name
    assert existing(Path("configs/none.yaml")) == Path("configs/none.yaml")
