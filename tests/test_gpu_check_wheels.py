"""Tests `gpu_check --wheels` with a stand-in for pip: its requests, added requirements, refusals
and output."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.gpu_check import wheels
from benchmarks.gpu_check.__main__ import main

# Writes an empty wheel for each NAME==VERSION, with the requirements in the file NAME.needs.
STAND_IN = """
import pathlib, sys, zipfile
here = pathlib.Path(__file__).parent
with open(here / "calls", "a") as calls:
    print(*sys.argv[1:], file=calls)
folder = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
for pin in sys.argv[1:]:
    name, found, version = pin.partition("==")
    if not found:
        continue
    needs = here / f"{name}.needs"
    text = needs.read_text() if needs.exists() else ""
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.dist-info/METADATA", f"Name: {name}\\nVersion: {version}\\n{text}")
"""


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the stand-in; `NAME.needs` there has a wheel's metadata lines."""
    (tmp_path / "pip.py").write_text(STAND_IN)
    monkeypatch.setattr(wheels, "PIP", (sys.executable, str(tmp_path / "pip.py")))
    return tmp_path


def test_wheels_add_requirements_at_locked_versions_when_a_wheel_has_them(
    pip: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pip / "megatron-core.needs").write_text(
        "Requires-Dist: torch>=2.6\nRequires-Dist: packaging>=24.2\n"
        "Requires-Dist: tqdm; extra == 'dev'\nRequires-Dist: tomli; python_version < '3.12'\n"
    )
    assert main(["--wheels", str(pip / "out")]) == 0
    first, second = (pip / "calls").read_text().splitlines()
    locked = wheels.locked_versions()
    assert "megatron-core==0.19.2" in first and f"pydantic=={locked['pydantic']}" in first
    assert "--no-deps" in first and "--python-version 3.12" in first and "torch" not in first
    assert second.endswith(f"manylinux_2_39_x86_64 packaging=={locked['packaging']}")
    printed = capsys.readouterr().out
    names = {wheel.name for wheel in (pip / "out").glob("*.whl")}
    assert len(names) == 13 and all(name in printed for name in names)
    assert "total" in printed and "pip install --no-index --no-deps --target" in printed


def test_wheels_exit_with_2_when_pip_fails(pip: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (pip / "pip.py").write_text("import sys\nsys.exit('no index answers')\n")
    assert main(["--wheels", str(pip / "out")]) == 2
    assert "failed with exit code 1: no index answers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ("torch>=2.12", "pydantic requires torch>=2.12, not 2.11.0"),
        ("no-such-package", "no-such-package: required, but requirements-gpu-lock.txt lacks it"),
    ],
)
def test_wheels_exit_with_2_when_a_requirement_is_not_met(
    pip: Path, capsys: pytest.CaptureFixture[str], needs: str, message: str
) -> None:
    (pip / "pydantic.needs").write_text(f"Requires-Dist: {needs}\n")
    assert main(["--wheels", str(pip / "out")]) == 2
    assert message in capsys.readouterr().err


def test_wheels_exit_with_2_when_they_are_too_large(
    pip: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wheels, "LIMIT_MIB", 0.001)
    assert main(["--wheels", str(pip / "out")]) == 2
    assert "the limit is 0.001 MiB" in capsys.readouterr().err


def test_wheels_exit_with_2_when_the_folder_is_not_empty(
    pip: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--wheels", str(pip)]) == 2
    assert "is not empty" in capsys.readouterr().err
