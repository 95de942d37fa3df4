"""`launch/quickstart.sh`: for the CPU, also where there is a GPU, beside the GPUs' environment.

The interpreters and `megatron-async` are stand-ins.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_async.files.package_files import ROOT

SHOW = """#!/bin/sh
echo "environment $VIRTUAL_ENV"
echo "GPUs ${CUDA_VISIBLE_DEVICES-all}"
echo "arguments $*"
"""


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("gpu", "variables", "environment", "gpus", "flavour"),
    [
        (False, {}, ".venv", "all", "cpu"),
        (True, {}, ".venv-cpu", "", "cpu"),
        (True, {"MEGATRON_ASYNC_VENV": "{here}/mine"}, "mine-cpu", "", "cpu"),
        (True, {"MEGATRON_ASYNC_FLAVOUR": "gpu"}, ".venv", "all", "gpu"),
    ],
    ids=["no GPU", "a GPU", "a GPU and an environment for it", "a GPU that is asked for"],
)
def test_it_runs_on_the_cpu_wherever_it_is(
    tmp_path: Path,
    gpu: bool,
    variables: dict[str, str],
    environment: str,
    gpus: str,
    flavour: str,
) -> None:
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "kernels").mkdir()
    shutil.copy(ROOT / "kernels" / "pyproject.toml", tmp_path / "kernels")
    script(tmp_path / "bin" / "nvidia-smi", f"#!/bin/sh\nexit {int(not gpu)}\n")
    for name in (".venv", ".venv-cpu", "mine", "mine-cpu"):
        script(tmp_path / name / "bin" / "python", "#!/bin/sh\n")
        (tmp_path / name / ".megatron_async-venv").touch()
        script(tmp_path / name / "bin" / "megatron-async", SHOW)
    done = subprocess.run(
        ["bash", str(tmp_path / "launch" / "quickstart.sh")],
        env={
            "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
            "MEGATRON_ASYNC_PYTHON": sys.executable,
            "HOME": os.environ["HOME"],
            **{name: value.format(here=tmp_path) for name, value in variables.items()},
        },
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    output = done.stdout.splitlines()
    assert f"environment {tmp_path / environment}" in output
    assert f"GPUs {gpus}" in output
    assert output[-1] == "arguments quickstart --config configs/quickstart.yaml name=quickstart"
    assert (tmp_path / environment / ".megatron_async-run").read_text().split()[0] == flavour
