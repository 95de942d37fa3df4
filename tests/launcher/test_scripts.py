"""Tests the scripts of launch/: the commands that they start, their hooks and variables, and the
input that they refuse.

`srun` and the interpreter are stand-ins that record how they were called; test_slurm.py uses the
real programs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_async.files.package_files import CODE_VARIABLE, ROOT, code_digest
from megatron_async.launcher import node

NOTE = """#!{python}
import json, os, sys
with open({file!r}, "a") as out:
    out.write(json.dumps({{"arguments": sys.argv[1:], "environment": dict(os.environ)}}) + "\\n")
{then}
"""


# Runs the command that follows its own options, with the environment that srun passes on.
SRUN = """
command, export = sys.argv[1:], os.environ.get("SLURM_EXPORT_ENV", "ALL")
while command[0].startswith("--"):
    name, _, value = command.pop(0).partition("=")
    export = value if name == "--export" else export
names = export.split(",")
passed = {
    name: value
    for name, value in os.environ.items()
    if "ALL" in names or name in names or name.startswith("SLURM_")
}
os.execvpe(command[0], command, passed)
"""


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@dataclass(frozen=True)
class Call:
    """Arguments and environment of one call of a stand-in program."""

    arguments: list[str]
    environment: dict[str, str]


class Machine:
    """Node with a recording `srun`, and a virtual environment with a recording `python`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._records = {name: root / f"{name}.jsonl" for name in ("srun", "python")}
        self._write(root / "bin" / "srun", "srun", SRUN)
        self._write(
            root / "venv" / "bin" / "python",
            "python",
            "codes = (os.environ.get('CODE_' + argument) for argument in sys.argv)\n"
            "sys.exit(int(next(filter(None, codes), '7')))",
        )
        (root / "venv" / ".megatron_async-venv").touch()

    def with_nodes(self, names: str, then: str = "") -> Path:
        """Write a `scontrol` that runs `then` and prints these node names; return a new run
        directory."""
        script(self.root / "bin" / "scontrol", f"#!/bin/sh\n{then}\nprintf '%s\\n' {names}\n")
        run = self.root / "runs" / "a"
        run.mkdir(parents=True)
        (run / "config.yaml").touch()
        return run

    def _write(self, path: Path, name: str, then: str) -> None:
        text = NOTE.format(python=sys.executable, file=str(self._records[name]), then=then)
        script(path, text)

    def run(
        self, script: str, *arguments: str, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(ROOT / "launch" / script), *arguments],
            env={
                "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
                "HOME": str(self.root),
                "MEGATRON_ASYNC_VENV": str(self.root / "venv"),
                **variables,
            },
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=30,
        )

    def called(self, name: str) -> bool:
        return self._records[name].exists()

    def calls(self, name: str) -> list[Call]:
        path = self._records[name]
        return [Call(**json.loads(line)) for line in path.read_text().splitlines()]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("flavor", ["cpu", "gpu"])
def test_setup_installs_the_requirements_of_the_selected_flavor_once(
    machine: Machine, flavor: str
) -> None:
    machine.run(
        "setup_env.sh",
        MEGATRON_ASYNC_FLAVOR=flavor,
        MEGATRON_ASYNC_PYTHON=sys.executable,
        # Exit code of the stand-in for every call of pip.
        **{"CODE_--disable-pip-version-check": "0"},
    )
    installed = {word for call in machine.calls("python") for word in call.arguments}
    files = {Path(word).name for word in installed if "requirements" in word}
    second_file = f"requirements-{'cpu-nodeps' if flavor == 'cpu' else 'gpu-lock'}.txt"
    assert files == {f"requirements-{flavor}.txt", second_file}
    note = machine.root / "venv" / ".megatron_async-run"
    assert note.read_text().split()[0] == flavor
    before = len(machine.calls("python"))
    assert machine.run("setup_env.sh", MEGATRON_ASYNC_FLAVOR=flavor).returncode == 0
    assert len(machine.calls("python")) == before, (
        "an installed environment must not be installed again"
    )


def test_setup_refuses_a_group_that_does_not_exist(machine: Machine) -> None:
    done = machine.run("setup_env.sh", "doc", MEGATRON_ASYNC_FLAVOR="cpu")
    assert done.returncode == 2
    assert "'doc' is not a group; the groups are run, test, docs, tasks" in done.stderr
    assert not machine.called("python")


def test_setup_shows_the_end_of_its_log_when_pip_fails(machine: Machine) -> None:
    venv = machine.root / "venv"
    failing = "echo noise; for n in $(seq 40); do echo line $n; done; echo 'no wheel'; exit 1"
    (venv / "bin" / "python").write_text(f"#!/bin/sh\n{failing}\n")
    done = machine.run("setup_env.sh", MEGATRON_ASYNC_FLAVOR="cpu")
    assert done.returncode == 2
    shown = done.stderr.splitlines()
    assert shown[0] == f"setup: the last lines of {venv / 'setup.log'}:"
    assert shown[15:] == [
        "no wheel",
        "setup: to continue, run the same command again; installed packages stay.",
    ]
    assert "noise" in (venv / "setup.log").read_text()
    assert not (venv / ".megatron_async-run").exists()


def interpreter(path: Path, then: str) -> None:
    """Write an interpreter stand-in; `then` contains the shell `case` branches that reply to its
    `-c` programs."""
    script(path, f'#!/bin/sh\ncase "$2" in\n{then}\nesac\n')


VERSION_IS_RIGHT = "*version_info*) exit 0;;"
COMPLETE = f"{VERSION_IS_RIGHT}\n*ensurepip*) exit 0;;"


def quickstart_setup(
    folder: Path, free_gib: int = 99, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the quickstart script with the interpreters in `folder` and a disk that has `free_gib`
    free."""
    space = f"echo Filesystem; echo x 9 9 {free_gib << 20} 0% /"
    script(folder / "df", f"#!/bin/sh\n{space}\n")
    return subprocess.run(
        ["/bin/bash", str(ROOT / "launch" / "quickstart.sh")],
        env={
            "PATH": f"{folder}:/usr/bin:/bin",
            "MEGATRON_ASYNC_VENV": str(folder / "disk" / "venv"),
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=30,
    )


@pytest.mark.parametrize(
    ("replies", "message"),
    [
        ("*version_info*) exit 1;;", "Python 3.11 to 3.13 is needed (cpu packages)"),
        (
            f"{VERSION_IS_RIGHT}\n*ensurepip*) exit 1;;",
            "cannot make a virtual environment. On Debian or Ubuntu: apt install python3-venv",
        ),
    ],
    ids=["version", "venv"],
)
def test_setup_checks_the_interpreter_before_it_writes_anything(
    tmp_path: Path, replies: str, message: str
) -> None:
    for name in ("python3.11", "python3.12", "python3.13", "python3"):
        interpreter(tmp_path / name, replies)
    done = quickstart_setup(tmp_path)
    assert done.returncode == 2
    (shown,) = done.stderr.splitlines()
    assert message in shown
    assert not (tmp_path / "disk").exists() and done.stdout == ""


def test_setup_uses_the_next_interpreter_when_the_first_lacks_venv(tmp_path: Path) -> None:
    interpreter(tmp_path / "python3.11", f"{VERSION_IS_RIGHT}\n*ensurepip*) exit 1;;")
    interpreter(tmp_path / "python3.12", COMPLETE)
    done = quickstart_setup(tmp_path)
    log = (tmp_path / "disk" / "venv" / "setup.log").read_text()
    assert log.startswith(f"== {tmp_path / 'python3.12'} -m venv"), done.stderr


def test_setup_completes_an_environment_whose_first_set_up_was_interrupted(
    machine: Machine,
) -> None:
    (machine.root / "venv" / ".megatron_async-venv").unlink()
    tools = {"MEGATRON_ASYNC_FLAVOR": "cpu", "MEGATRON_ASYNC_PYTHON": sys.executable}
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(machine.root)}
    first = machine.run("setup_env.sh", **tools, **offline)
    assert first.returncode == 2 and "pip and build tools" in first.stdout
    again = machine.run("setup_env.sh", **tools, **offline)
    assert again.returncode == 2 and "pip and build tools" in again.stdout
    assert not (machine.root / "venv" / ".megatron_async-venv").exists()


@pytest.mark.parametrize(
    ("variables", "needed"),
    [
        ({}, 12),
        ({"PIP_EXTRA_INDEX_URL": "https://download.pytorch.org/whl/cpu"}, 5),
        ({"MEGATRON_ASYNC_FLAVOR": "gpu"}, 19),
    ],
    ids=["CUDA build", "CPU build", "for GPUs"],
)
def test_setup_checks_the_free_disk_space_first(
    tmp_path: Path, variables: dict[str, str], needed: int
) -> None:
    interpreter(tmp_path / "python3.11", COMPLETE)
    done = quickstart_setup(tmp_path, free_gib=3, **variables)
    assert done.returncode == 2
    assert f"{tmp_path / 'disk'} has 3 GiB of free space; {needed} are needed." in done.stderr
    assert not (tmp_path / "disk" / "venv").exists()


def test_setup_refuses_a_flavor_that_does_not_exist(machine: Machine) -> None:
    done = machine.run("setup_env.sh", MEGATRON_ASYNC_FLAVOR="tpu")
    assert done.returncode == 2
    assert "MEGATRON_ASYNC_FLAVOR is 'tpu'; it must be cpu or gpu" in done.stderr


@pytest.mark.parametrize("command", ["sft", "eval", "convert"])
def test_one_node_job_runs_its_command_unbound_and_returns_its_exit_code(
    machine: Machine, command: str
) -> None:
    done = machine.run(f"slurm/{command}.sbatch", "--config", "a file.yaml", "name=x")
    assert done.returncode == 7, done.stderr
    (srun,) = machine.calls("srun")
    assert "--cpu-bind=none" in srun.arguments, "the task must be able to use all cores of its node"
    (python,) = machine.calls("python")
    expected = ["-P", "-m", "megatron_async.cli", command, "--config", "a file.yaml", "name=x"]
    assert python.arguments == expected


@pytest.mark.parametrize("export", ["NONE", "HOME"])
@pytest.mark.parametrize("command", ["sft", "eval", "convert", "train"])
def test_job_tasks_get_exported_variables_when_sbatch_exports_none(
    machine: Machine, command: str, export: str
) -> None:
    setup = machine.root / "site.sh"
    setup.write_text("export FROM_SETUP=yes\n")
    machine.with_nodes("n1 n2")
    arguments = ["--trainer-nodes=1", "runs/a"] if command == "train" else ["--config", "x"]
    machine.run(
        f"slurm/{command}.sbatch",
        *arguments,
        SLURM_EXPORT_ENV=export,
        SLURM_JOB_NODELIST="n[1-2]",
        SLURM_JOB_NUM_NODES="2",
        SLURM_JOB_ID="71",
        SLURM_PROCID="0",
        MEGATRON_ASYNC_SETUP=str(setup),
    )
    calls = machine.calls("python")
    assert len(calls) == (2 if command == "train" else 1)
    for call in calls:
        assert call.environment["FROM_SETUP"] == "yes"
        assert call.environment["HF_HUB_OFFLINE"] == "1"
        assert call.environment[CODE_VARIABLE] == code_digest()
        assert call.environment["PATH"].startswith(f"{machine.root}/venv/bin:")
    assert command != "sft" or calls[0].arguments[-4:] == ["--session", "71.0", "--index", "0"]


def test_job_script_applies_the_module_and_container_hooks(machine: Machine) -> None:
    setup = machine.root / "site.sh"
    setup.write_text('module() { export LOADED="$1 ${UNSET_HERE:-}$UNSET_HERE"; }\nmodule cuda\n')
    machine.run(
        "slurm/convert.sbatch",
        "--help",
        MEGATRON_ASYNC_SETUP=str(setup),
        MEGATRON_ASYNC_SRUN_ARGS="--container-image=/images/a.sqsh --container-mounts=/shared",
    )
    (srun,) = machine.calls("srun")
    assert {"--container-image=/images/a.sqsh", "--container-mounts=/shared"} <= set(srun.arguments)
    assert srun.environment["LOADED"].strip() == "cuda"


def test_container_job_uses_the_virtual_environment_of_its_image(machine: Machine) -> None:
    """The host's `.venv` may be missing in the container, or may belong to another image; the image
    has a virtual environment in /opt/venv."""
    arguments = ("runs/a", "--index", "0", "--count", "1", "--session", "s")
    image = {"MEGATRON_ASYNC_SRUN_ARGS": "--container-image=/images/a.sqsh"}
    machine.run("slurm/eval.sbatch", *arguments, MEGATRON_ASYNC_VENV="", **image)
    machine.run("slurm/eval.sbatch", *arguments, **image)
    default, chosen = machine.calls("srun")
    assert "/opt/venv/bin/python" in default.arguments
    assert f"{machine.root}/venv/bin/python" in chosen.arguments, (
        "the variable of the user must win"
    )


def test_node_role_compares_its_code_with_that_of_the_launch_script(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A container image keeps the code that it was built with, so its code may be older than the
    script."""
    arguments = ("runs/a", "--index", "0", "--count", "1", "--session", "s")
    machine.run("torchrun/trainer.sh", *arguments)
    (python,) = machine.calls("python")
    assert python.environment[CODE_VARIABLE] == code_digest()
    for digest, message in (
        (code_digest(), "there is no run"),
        ("0" * 64, "differs from the code of the launch script. Rebuild the image"),
    ):
        monkeypatch.setenv(CODE_VARIABLE, digest)
        assert node.main(["trainer", *arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs/a"], "needs --trainer-nodes=N and a run directory, got '' 'runs/a'"),
        (["--trainer-nodes=1", "no-run"], "got '1' 'no-run'"),
        (["--trainer-nodes=two", "runs/a"], "--trainer-nodes=two is not a number"),
        (["--trainer-nodes=3", "runs/a"], "--trainer-nodes=3 of 3 nodes leaves no rollout node"),
        (["--trainer-nodes=0", "runs/a"], "--trainer-nodes=0 of 3 nodes"),
        (["--trainers=1", "runs/a"], "--trainer-nodes=8 runs/NAME"),
    ],
)
def test_train_script_exits_with_2_when_the_node_split_is_invalid(
    machine: Machine, arguments: list[str], message: str
) -> None:
    run = machine.with_nodes("n1 n2 n3")
    done = machine.run("slurm/train.sbatch", *arguments, SLURM_JOB_NODELIST="n[1-3]")
    assert done.returncode == 2
    assert message in done.stderr
    assert not (run / "launch").exists(), "a refused job must write no launch directory"


@pytest.mark.parametrize(
    ("codes", "restarts", "code", "requeued"),
    [
        pytest.param((0, 0), 0, 0, False, id="complete"),
        pytest.param(
            (0, 0), 0, 0, True, id="a node lost before a resume of a complete run started"
        ),
        pytest.param((75, 75), 9, 0, True, id="stopped with a checkpoint"),
        pytest.param((1, 1), 0, 0, True, id="a component failed"),
        pytest.param((1, 1), 3, 1, False, id="a component failed once too often"),
        pytest.param((0, 1), 3, 1, False, id="the rollout side failed"),
        pytest.param((2, 1), 0, 2, False, id="bad input, found by the trainers"),
        pytest.param((1, 2), 0, 2, False, id="bad input, found by the rollout side"),
    ],
)
def test_train_job_is_requeued_according_to_the_exit_codes_of_its_roles(
    machine: Machine, codes: tuple[int, int], restarts: int, code: int, requeued: bool
) -> None:
    requeue_file = machine.root / "requeued"
    run = machine.with_nodes("n1 n2", f'[ "$1" = requeue ] && echo "$2" >{requeue_file} && exit')
    (run / "outcome").write_text("complete")
    if codes == (0, 0) and requeued:
        (run / "config.resume.yaml").touch()
    trainer, rollout = codes
    done = machine.run(
        "slurm/train.sbatch",
        "--trainer-nodes=1",
        "runs/a",
        SLURM_JOB_NODELIST="n[1-2]",
        SLURM_JOB_ID="5",
        SLURM_RESTART_COUNT=str(restarts),
        SLURM_PROCID="0",
        CODE_trainer=str(trainer),
        CODE_rollout=str(rollout),
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert requeue_file.exists() == requeued
    roles = {call.arguments[3]: call.arguments for call in machine.calls("python")}
    for role in ("trainer", "rollout"):
        assert roles[role][4:] == [
            str(run),
            "--index",
            "0",
            "--count",
            "1",
            "--session",
            f"5.{restarts}",
        ]
    lists = [a for call in machine.calls("srun") for a in call.arguments if "nodelist" in a]
    assert sorted(lists) == ["--nodelist=n1", "--nodelist=n2"]


SHOW = """#!/bin/sh
echo "environment $VIRTUAL_ENV"
echo "GPUs ${CUDA_VISIBLE_DEVICES-all}"
echo "arguments $*"
"""


@pytest.mark.parametrize(
    ("gpu", "variables", "environment", "gpus", "flavor"),
    [
        (False, {}, ".venv", "all", "cpu"),
        (True, {}, ".venv-cpu", "", "cpu"),
        (True, {"MEGATRON_ASYNC_VENV": "{here}/mine"}, "mine-cpu", "", "cpu"),
        (True, {"MEGATRON_ASYNC_FLAVOR": "gpu"}, ".venv", "all", "gpu"),
    ],
    ids=["no GPU", "a GPU", "a GPU and an environment for it", "a requested GPU"],
)
def test_quickstart_script_uses_the_cpu_unless_gpus_are_requested(
    tmp_path: Path,
    gpu: bool,
    variables: dict[str, str],
    environment: str,
    gpus: str,
    flavor: str,
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
    assert (tmp_path / environment / ".megatron_async-run").read_text().split()[0] == flavor
