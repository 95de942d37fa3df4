"""Tests `megatron-async launch`: the files that it writes, the settings that it refuses, and that a
dry run writes no file."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_async.commands.launch import Cluster, launch_run
from megatron_async.config import load_config
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.files.package_files import ROOT
from megatron_async.models.tiny_model import write_character_tokenizer
from megatron_async.run_directory import RunDirectory
from megatron_async.store.store import TrajectoryStore
from tests.checkpoint.test_manifest import write
from tests.hf_models import save_hf_model

GPUS = Cluster(gpus_per_node=8, engine_nodes=None, time_limit="02:00:00")
COLOCATED = [
    "engines.placement=colocated",
    "weights.transport=tensor",
    "schedule.preset=sync",
    "parallel.nodes=1",
    "parallel.ranks=8",
    "engines.count=2",
]


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """Return the config file of a run whose small model can be split over eight tensor ranks."""
    model = tmp_path / "model"
    save_hf_model(
        "qwen3", model, vocab_size=128, num_key_value_heads=8, max_position_embeddings=4096
    )
    write_character_tokenizer(model)
    path = tmp_path / "c.yaml"
    path.write_text(
        f"""
name: job
root: {tmp_path}/runs
model: {{path: {model}}}
parallel: {{nodes: 2, ranks: 16, tensor: 8, sequence: true}}
engines: {{count: 3, tensor: 4}}
"""
    )
    return path


_SQLITE_AUXILIARY_FILES = ("trajectories.sqlite-shm", "trajectories.sqlite-wal")


def _with_checkpoints(settings: Path, model: Path) -> RunDirectory:
    """Create a run that has checkpoints of steps 2 and 4, and return its directory."""
    directory = RunDirectory.create(load_config(settings, []))
    asyncio.run(TrajectoryStore.open(directory.store_file).close())
    for step in (2, 4):
        write(directory.checkpoints, step, model=model)
    directory.lineage_file.write_text("0")
    return directory


def test_launch_and_its_dry_run_refuse_the_name_of_an_existing_run(
    settings: Path, tmp_path: Path
) -> None:
    existing = tmp_path / "runs" / "job"
    existing.mkdir(parents=True)
    (existing / "config.yaml").write_text("name: job\n")
    for dry_run in (True, False):
        with pytest.raises(
            UserError, match=r"exists already: choose another name \(got name 'job'"
        ):
            launch_run(settings, None, [], GPUS, slurm=False, dry_run=dry_run)


def test_slurm_dry_run_shows_the_script_and_writes_no_file(settings: Path, tmp_path: Path) -> None:
    before = set(tmp_path.rglob("*"))
    script = launch_run(settings, None, ["name=other"], GPUS, slurm=True, dry_run=True)
    assert set(tmp_path.rglob("*")) == before
    lines = script.splitlines()
    assert "#SBATCH --job-name=other" in lines
    assert "#SBATCH --nodes=4" in lines, "2 trainer nodes, and 3 engines of 4 GPUs on 2 nodes"
    assert "#SBATCH --gpus-per-node=8" in lines
    assert "#SBATCH --time=02:00:00" in lines
    assert "#SBATCH --signal=B:USR1@180" in lines
    [command] = [line for line in lines if line.startswith("exec ")]
    assert command.endswith(f"--trainer-nodes=2 --stop-seconds=90 {tmp_path}/runs/other")
    shown = lines[lines.index(command) + 1 :]
    assert all(line == "" or line.startswith("# ") for line in shown), (
        "the output must still be a script"
    )
    text = "\n".join(shown)
    for part in ("trainer: ", "engines: ", "batch: ", "memory of a trainer GPU", "of 80 GB"):
        assert part in text
    assert "# engines.max_total_tokens = " in text
    assert "# first prompt, " in text, "the output must show the formatted first prompt"


# Texts that names, paths and options may contain, but that a shell or Slurm would misread.
ODD_TEXTS = ["two words", "50%", "%j", "a#b", 'quo"te', "it's", "a;b & $HOME", "--x=y", "ü"]


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_job_script_quotes_names_paths_and_options(
    settings: Path, tmp_path: Path, text: str
) -> None:
    root = tmp_path / f"root {text}"
    cluster = replace(GPUS, sbatch_options=(f"--comment={text}", "-pgpu", "--mail-type=END"))
    overrides = [f"name={json.dumps(text)}", f"root={json.dumps(str(root))}"]
    script = launch_run(settings, None, overrides, cluster, slurm=True, dry_run=True)
    lines = script.split("\n\n")[0].splitlines()
    directives = [shlex.split(line)[1:] for line in lines if line.startswith("#SBATCH")]
    assert all(len(words) == 1 for words in directives), "each line must have one option"
    options = {words[0] for words in directives}
    output = f"--output={root}/{text}/logs/".replace("%", "%%") + "job-%j.log"
    assert {f"--job-name={text}", output, *cluster.sbatch_options} <= options
    assert shlex.split(lines[-1])[-1] == f"{root}/{text}"


@pytest.mark.parametrize("text", [*ODD_TEXTS, "back\\slash"])
def test_manual_commands_quote_paths(
    settings: Path, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_async.commands.launch.ROOT", tmp_path / "a clone")
    overrides = [f"name={json.dumps(text)}", f"root={tmp_path}/my runs"]
    shown = launch_run(settings, None, overrides, GPUS, slurm=False, dry_run=True)
    commands = [line for line in shown.splitlines() if line.startswith("bash ")]
    assert len(commands) == 4
    for command in commands:
        _, script, run, *rest = shlex.split(command)
        assert script.startswith(f"{tmp_path}/a clone/launch/torchrun/")
        assert run == f"{tmp_path}/my runs/{text}"
        assert rest[-2:] == ["--session", "SESSION"]


@pytest.mark.parametrize(
    ("overrides", "cluster", "message"),
    [
        (["name=back\\slash"], GPUS, "back.*slash'; Slurm cannot write logs to a path with a back"),
        (
            ['root="/tmp/two\\nlines"'],
            GPUS,
            "the run directory is '/tmp/two.nlines/job'; Slurm cannot",
        ),
        (
            [],
            replace(GPUS, sbatch_options=("--a=x\n#SBATCH --b=y",)),
            r"is '--a=x.n#SBATCH --b=y';",
        ),
        ([], replace(GPUS, sbatch_options=("--qos=a --account=b",)), "Repeat --sbatch for each"),
        ([], replace(GPUS, sbatch_options=("partition=gpu",)), "must be one printable --NAME=VAL"),
    ],
)
def test_launch_refuses_before_anything_is_written_when_slurm_cannot_read_a_text(
    settings: Path, tmp_path: Path, overrides: list[str], cluster: Cluster, message: str
) -> None:
    before = set(tmp_path.rglob("*"))
    for dry_run in (True, False):
        with pytest.raises(UserError, match=message):
            launch_run(settings, None, overrides, cluster, slurm=True, dry_run=dry_run)
    assert set(tmp_path.rglob("*")) == before


def test_launch_prints_a_command_for_each_node_without_slurm(
    settings: Path, tmp_path: Path
) -> None:
    text = launch_run(settings, None, [], GPUS, slurm=False, dry_run=False)
    commands = [line for line in text.splitlines() if not line.startswith("#")]
    assert [command.split()[1].rsplit("/", 1)[1] for command in commands] == [
        "rollout.sh",
        "rollout.sh",
        "trainer.sh",
        "trainer.sh",
    ]
    for command in commands:
        assert Path(command.split()[1]).is_file()
    config_file = tmp_path / "runs" / "job" / "config.yaml"
    config = load_config(config_file)
    assert config.engines.host == "node"
    assert len(config.engines.api_key) > 20, "engines that other hosts can reach must require a key"
    assert stat.S_IMODE(config_file.stat().st_mode) == 0o600


def test_launch_resumes_on_several_nodes_a_run_of_one_machine(
    settings: Path, tmp_path: Path
) -> None:
    directory = RunDirectory.create(load_config(settings, []))
    before = directory.config_file.read_text()

    def resume(*overrides: str, slurm: bool = False, dry_run: bool = False) -> str:
        return launch_run(None, directory.path, list(overrides), GPUS, slurm=slurm, dry_run=dry_run)

    script = resume("steps=7", slurm=True, dry_run=True)
    assert str(directory.path) in script
    assert directory.config_file.read_text() == before, "a dry run must not change the config"
    with pytest.raises(UserError, match=r"parallel\.tensor is 16"):
        resume("parallel.tensor=16")
    assert directory.config_file.read_text() == before, (
        "a refused resume must not change the config"
    )
    resume("steps=7")
    assert directory.config_file.read_text() == before, (
        "the config must stay unchanged until the run has started"
    )
    _, config = RunDirectory.launched(directory.path)
    assert (config.steps, config.engines.host) == (7, "node")
    assert len(config.engines.api_key) > 20
    directory.begin()
    assert RunDirectory.find(directory.path, [])[1] == config
    assert stat.S_IMODE(directory.config_file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("overrides", "cluster", "message"),
    [
        ([], Cluster(4, None, "1:00:00"), "needs 8 GPUs per node, .* --gpus-per-node is 4"),
        (["engines.tensor=16"], GPUS, r"engines\.tensor is 16, which is more than the 8 GPUs"),
        (["parallel.tensor=16"], GPUS, r"parallel\.tensor is 16, which does not divide"),
        (["weights.transport=tensor"], GPUS, r"weights\.transport is tensor, .* separate nodes"),
        (
            COLOCATED,
            GPUS,
            r"engines\.placement is colocated, but launch gives engines separate nodes",
        ),
        (
            ["model.checkpoint=/nowhere"],
            GPUS,
            r"model\.checkpoint is '/nowhere', which has no manifest",
        ),
    ],
)
def test_launch_creates_no_run_directory_when_settings_are_refused(
    settings: Path, tmp_path: Path, overrides: list[str], cluster: Cluster, message: str
) -> None:
    for slurm in (False, True):
        with pytest.raises(UserError, match=message):
            launch_run(settings, None, overrides, cluster, slurm=slurm, dry_run=False)
    assert not (tmp_path / "runs").exists()


def test_dry_run_shows_the_trainer_ranks_of_each_colocated_engine(
    settings: Path, tmp_path: Path
) -> None:
    """`launch` starts engines on separate nodes only, but a colocated run of one node needs no
    launch."""
    text = launch_run(settings, None, COLOCATED, GPUS, slurm=True, dry_run=True)
    command = text.splitlines()[0]
    assert command.startswith("srun --nodes=1 --ntasks=1")
    assert f"megatron-async train --config {settings} engines.placement=colocated" in command
    assert "2 of TP 4, colocated on the GPUs of trainer ranks 0+1+2+3, 4+5+6+7;" in text
    assert "memory of a trainer GPU" in text
    with pytest.raises(UserError) as refused:
        launch_run(settings, None, COLOCATED, GPUS, slurm=True, dry_run=False)
    assert f"under Slurm by `{command}`" in str(refused.value), (
        "the error must show the command to use instead"
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "script", sorted((ROOT / "launch").rglob("*.s[bh]*")), ids=lambda path: path.name
)
def test_launch_scripts_are_valid_bash(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=10)
    assert done.returncode == 0, done.stderr


def _sbatch(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Replace `sbatch` by this shell program."""
    file = folder / "bin" / "sbatch"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/sh\n{program}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(file.parent), prepend=os.pathsep)


@pytest.mark.parametrize("from_step", [None, 2])
def test_run_directory_is_unchanged_when_sbatch_refuses_the_resume(
    settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_step: int | None
) -> None:
    """The files of an earlier launch whose job is still queued must stay unchanged too."""
    directory = _with_checkpoints(settings, tmp_path / "model")

    def launch(steps: int, from_step: int | None) -> str:
        return launch_run(
            None,
            directory.path,
            [f"steps={steps}"],
            GPUS,
            slurm=True,
            dry_run=False,
            from_step=from_step,
        )

    def content() -> dict[str, tuple[int, bytes]]:
        files = (path for path in directory.path.rglob("*") if path.is_file())
        kept = (path for path in files if path.name not in ("run.lock", *_SQLITE_AUXILIARY_FILES))
        return {str(path): (path.stat().st_mode, path.read_bytes()) for path in kept}

    before = content()
    _sbatch(tmp_path, monkeypatch, "echo queue is closed >&2; exit 1")
    with pytest.raises(ComponentFailure, match=r"failed: queue is closed$"):
        launch(300, from_step)
    assert content() == before
    _sbatch(tmp_path, monkeypatch, "echo Submitted 1")
    assert ("# renamed: " in launch(300, from_step)) == (from_step is not None)
    queued = content()
    assert queued.keys() - before.keys() >= {f"{directory.resume_file}"}
    _sbatch(tmp_path, monkeypatch, "exit 1")
    with pytest.raises(ComponentFailure, match=r"failed: $"):
        launch(400, None)
    assert content() == queued


def test_resume_file_is_kept_when_sbatch_times_out(
    settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = _with_checkpoints(settings, tmp_path / "model")
    _sbatch(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr("megatron_async.commands.launch._SUBMIT_SECONDS", 0.1)
    with pytest.raises(ComponentFailure, match=r"squeue shows whether .* stay for it"):
        launch_run(None, directory.path, [], GPUS, slurm=True, dry_run=False, from_step=2)
    assert directory.resume_file.exists()
    assert (directory.checkpoints / "abandoned_0.4").is_dir()


def test_launch_rolls_back_checkpoints_before_any_node_starts(
    settings: Path, tmp_path: Path
) -> None:
    directory = _with_checkpoints(settings, tmp_path / "model")

    def back_to(step: int, *, dry_run: bool) -> str:
        return launch_run(
            None, directory.path, [], GPUS, slurm=False, dry_run=dry_run, from_step=step
        )

    with pytest.raises(UserError, match=r"--from-step is 3, .* it has steps 2, 4$"):
        back_to(3, dry_run=False)
    assert "set aside" not in back_to(2, dry_run=True)
    assert (directory.checkpoints / "step_000004").is_dir()
    text = back_to(2, dry_run=False)
    assert f"# renamed: {directory.checkpoints}/abandoned_0.4\n# one command" in text
    assert sorted(path.name for path in directory.checkpoints.iterdir()) == [
        "abandoned_0.4",
        "step_000002",
    ]
