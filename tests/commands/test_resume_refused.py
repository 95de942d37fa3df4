"""Tests that a resume leaves the run unchanged if it is refused, fails to start or is killed before
its start.

Settings that can be compared with the run are compared before any process starts. If engines or
trainers fail later during the start, settings, outcome and checkpoints of the run stay unchanged
too.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_async.commands import train
from megatron_async.commands.launch import Cluster, launch_run
from megatron_async.config import RunConfig, build_config
from megatron_async.errors import ComponentFailure, Terminated, UserError
from megatron_async.launcher.run_lock import RunInUse, hold_run_lock
from megatron_async.run_directory import RunDirectory, RunOutcome
from megatron_async.store.store import TrajectoryStore
from megatron_async.tasks.data_identity import data_identity
from tests.checkpoint.test_manifest import write
from tests.inputs.model_directories import write_model

STEPS = (2, 4)


def exchange_tokens(folder: Path) -> None:
    """Exchange the IDs of two tokens in the tokenizer of `folder`."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Create a stopped run that has checkpoints of steps 2 and 4."""
    model = write_model(tmp_path / "model", "llama")
    rows = [{"prompt": f"{i}+{i}=", "answer": 2 * i} for i in range(60)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = build_config(
        {
            "name": "run",
            "root": str(tmp_path / "runs"),
            "steps": 8,
            "model": {"path": str(model)},
            "task": {"name": "exact", "path": str(tmp_path / "data.jsonl")},
            "schedule": {"groups_per_batch": 4},
            "sampling": {"max_new_tokens": 16},
            "eval": {"prompts": 2},
        }
    )
    directory = RunDirectory.create(config, data_identity(config))
    directory.lineage_file.write_text("0")
    directory.report_outcome(RunOutcome.STOPPED)
    asyncio.run(TrajectoryStore.open(directory.store_file).close())
    for step in STEPS:
        write(directory.checkpoints, step, model=model)
    return directory


def content(run: RunDirectory) -> dict[str, bytes]:
    """Return the content of each file of the run by its name.

    The run lock, which names its last holder, and the auxiliary files that SQLite leaves next to a
    database after a read are excluded.
    """
    excluded = (run.lock_file.name, *(f"{run.store_file.name}-{end}" for end in ("shm", "wal")))
    files = (path for path in run.path.rglob("*") if path.is_file() and path.name not in excluded)
    return {str(path.relative_to(run.path)): path.read_bytes() for path in files}


class Start:
    """Stand-in for the start of engines and trainers; records the settings of each start, and fails
    with `error`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings: list[RunConfig] = []
        self.error: BaseException | None = None
        self.is_begun = True
        monkeypatch.setattr(train, "show_closing", lambda _: None)
        monkeypatch.setattr(train, "supervise", self._supervise)

    def _supervise(self, config: RunConfig, directory: RunDirectory, _: object) -> None:
        assert RunDirectory.launched(directory.path)[1] == config, (
            "ranks and nodes must read these settings"
        )
        self.settings.append(config)
        if self.is_begun:
            directory.begin(data_identity(config))
        if self.error is not None:
            raise self.error


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    return Start(monkeypatch)


MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "another shape": ("llama", {"intermediate_size": 8}, r"weights/\S+ has shape .* requires"),
    "fewer layers": ("llama", {"num_hidden_layers": 1}, r"layers\.1\S+ has shape .* requires none"),
    "another family": ("qwen3", {}, r"has shape none; the model requires \("),
    "another rope": ("llama", {"rope_theta": 1e4}, r"rope is .*500000.0"),
    "another tokenizer": ("llama", {}, "the tokenizer or the chat template differs"),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("by", ["train", "launch"])
def test_resume_with_another_model_is_refused_before_any_process_starts(
    run: RunDirectory, tmp_path: Path, start: Start, name: str, by: str
) -> None:
    family, changes, difference = MODELS[name]
    other = write_model(tmp_path / "other", family, **changes)
    if name == "another tokenizer":
        exchange_tokens(other)
    before = content(run)
    with pytest.raises(UserError, match=difference) as refused:
        if by == "train":
            train.resume_command(run.path, [f"model.path={other}"], None)
        else:
            nodes, changed = Cluster(0, None, "1:00:00"), [f"model.path={other}"]
            launch_run(None, run.path, changed, nodes, slurm=False, dry_run=False)
    message = str(refused.value)
    assert message.startswith(f"model.path is '{other}', but {run.path} is a run of another model")
    assert f"(model.path was '{tmp_path / 'model'}')" in message, (
        "the message must name the earlier model"
    )
    assert (content(run), start.settings) == (before, [])
    train.resume_command(run.path, [], None)
    assert [settings.model.path for settings in start.settings] == [str(tmp_path / "model")]


def test_resume_accepts_a_model_directory_that_was_copied_or_moved(
    run: RunDirectory, tmp_path: Path, start: Start
) -> None:
    copy = shutil.copytree(tmp_path / "model", tmp_path / "copy")
    train.resume_command(run.path, [f"model.path={copy}"], None)
    shutil.rmtree(tmp_path / "model")
    moved = copy.rename(tmp_path / "moved")
    train.resume_command(run.path, [f"model.path={moved}"], None)
    assert len(start.settings) == 2


def change_json(name: str, **values: Any) -> Callable[[Path], object]:
    """Return a function that changes these entries of the JSON file `name` in a folder."""

    def change(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


TOKENIZERS: dict[str, Callable[[Path], object]] = {
    "two tokens": exchange_tokens,
    "the normalizer": change_json("tokenizer.json", normalizer={"type": "Lowercase"}),
    "the chat template": change_json("tokenizer_config.json", chat_template="{{ messages }}"),
    "the chat template file": lambda folder: (folder / "chat_template.jinja").write_text("a"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_resume_refuses_a_changed_tokenizer_at_the_same_and_at_a_new_path(
    run: RunDirectory, tmp_path: Path, start: Start, name: str
) -> None:
    TOKENIZERS[name](tmp_path / "model")
    before = content(run)
    with pytest.raises(UserError, match="the tokenizer or the chat template differs"):
        train.resume_command(run.path, [], None)
    moved = (tmp_path / "model").rename(tmp_path / "moved")
    with pytest.raises(UserError, match="the tokenizer or the chat template differs"):
        train.resume_command(run.path, [f"model.path={moved}"], None)
    assert (content(run), start.settings) == (before, [])


def test_resume_compares_tokenizer_of_the_old_directory_without_a_record(
    run: RunDirectory, tmp_path: Path, start: Start
) -> None:
    """Runs of an earlier version of the program have no record of their tokenizer."""
    run.tokenizer_file.unlink()
    other = shutil.copytree(tmp_path / "model", tmp_path / "other")
    train.resume_command(run.path, [f"model.path={other}"], None)
    exchange_tokens(other)
    with pytest.raises(UserError, match="the tokenizer or the chat template differs"):
        train.resume_command(run.path, [f"model.path={tmp_path / 'model'}"], None)
    shutil.rmtree(other)
    train.resume_command(run.path, [f"model.path={tmp_path / 'model'}"], None)
    assert len(start.settings) == 2


REFUSED = {
    "an optimizer without saved state": (["optimizer.name=muon"], r"optimizer\.name is"),
    "data": (["task.path=/nowhere"], r"task\.path '/nowhere' cannot be read"),
    "weights": (
        ["model.checkpoint=/nowhere"],
        r"model\.checkpoint is '/nowhere', which has no manifest",
    ),
    "weights that a resume ignores": (
        ["model.checkpoint={run}/checkpoints/step_000002"],
        r"model\.checkpoint is '.*2', but .*run resumes from its own checkpoint step_000004",
    ),
    "another name": (
        ["name=other"],
        r"name is 'other', but a resume cannot move the run .*runs/run",
    ),
    "another root": (
        ["root=/proc/none"],
        r"root is '/proc/none', but a resume cannot move the run .*runs/run",
    ),
    "a reward": (["task.name=exactly"], "cannot score rows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_resume_changes_no_file_and_a_plain_resume_still_works(
    run: RunDirectory, start: Start, case: str
) -> None:
    overrides, message = REFUSED[case]
    before = content(run)
    with pytest.raises(UserError, match=message):
        overrides = [text.format(run=run.path) for text in overrides]
        train.resume_command(run.path, ["optimizer.lr=1e-5", *overrides], None)
    assert (content(run), start.settings) == (before, [])
    train.resume_command(run.path, [], None)
    assert len(start.settings) == 1


def test_resume_accepts_a_moved_run_with_and_without_its_new_path(
    run: RunDirectory, tmp_path: Path, start: Start
) -> None:
    moved = run.path.rename(tmp_path / "moved")
    train.resume_command(moved, ["steps=9"], None)
    train.resume_command(moved, ["name=moved", f"root={tmp_path}"], None)
    assert len(start.settings) == 2


def test_resume_checks_initial_weights_only_when_no_checkpoint_exists(
    run: RunDirectory, tmp_path: Path, start: Start
) -> None:
    elsewhere = run.checkpoints.rename(tmp_path / "elsewhere")
    train.resume_command(run.path, [f"model.checkpoint={elsewhere}/step_000002"], None)
    run.checkpoints.mkdir()
    (elsewhere / "step_000004").rename(run.checkpoints / "step_000004")
    shutil.rmtree(elsewhere)
    train.resume_command(run.path, ['model.checkpoint=""'], None)
    assert len(start.settings) == 2


def test_resume_refuses_unknown_step_and_run_in_use_without_changing_files(
    run: RunDirectory, start: Start
) -> None:
    before = content(run)
    with pytest.raises(UserError, match="--from-step is 3"):
        train.resume_command(run.path, ["steps=9"], 3)
    with hold_run_lock(run, "another"):
        for dry in (False, True):
            with pytest.raises(RunInUse, match=r"run is in use by process .* \(another, "):
                train.resume_command(run.path, ["steps=9"], None, dry=dry)
            nodes = Cluster(0, None, "1:00:00")
            with pytest.raises(RunInUse):
                launch_run(None, run.path, ["steps=9"], nodes, slurm=False, dry_run=dry)
    assert (content(run), start.settings) == (before, [])


@pytest.mark.parametrize("from_step", [None, 2])
@pytest.mark.parametrize(
    "error",
    [UserError("no"), ComponentFailure("dead"), KeyboardInterrupt(), Terminated()],
    ids=type,
)
def test_resume_that_fails_before_its_start_changes_no_file(
    run: RunDirectory,
    start: Start,
    error: BaseException,
    from_step: int | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = content(run)
    start.error, start.is_begun = error, False
    with pytest.raises(type(error)):
        train.resume_command(run.path, ["steps=9"], from_step)
    assert content(run) == before
    if not isinstance(error, UserError | ComponentFailure):
        arguments = "steps=9" if from_step is None else "--from-step=2 steps=9"
        assert f"train --resume {run.path} {arguments}\n" in capsys.readouterr().err
    start.error = None
    train.resume_command(run.path, [], None)
    assert [settings.steps for settings in start.settings] == [9, 8]


def test_resume_that_fails_after_its_start_keeps_its_settings(
    run: RunDirectory, start: Start
) -> None:
    start.error = ComponentFailure("an engine is dead")
    with pytest.raises(ComponentFailure):
        train.resume_command(run.path, ["steps=9"], 2)
    assert RunDirectory.find(run.path, [])[1].steps == 9
    assert (run.outcome(), run.resume_file.exists()) == (None, False)
    assert (run.checkpoints / "abandoned_0.4").is_dir()


def test_outcome_of_an_earlier_launch_is_ignored_after_a_resume(run: RunDirectory) -> None:
    """The old outcome stays until the resume starts; nodes that wait for the end of the run must
    not end because of it."""
    earlier = run.outcome_stamp()
    assert (run.outcome(), run.outcome(earlier)) == (RunOutcome.STOPPED, None)
    run.begin()
    assert (run.outcome(earlier), run.outcome_stamp()) == (None, 0)
    run.report_outcome(RunOutcome.COMPLETE)
    assert run.outcome(earlier) is RunOutcome.COMPLETE


def test_dry_run_of_a_resume_shows_its_effects_and_changes_no_file(
    run: RunDirectory, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(run)
    lock = run.lock_file.exists()
    train.resume_command(run.path, ["steps=9"], 2, dry=True)
    shown = capsys.readouterr().out
    assert "resumes from checkpoint step_000002" in shown and "changed: steps 8 → 9" in shown
    assert "trainer: 1 ranks on 1 node(s)" in shown
    assert (content(run), run.lock_file.exists(), start.settings) == (before, lock, [])
    with pytest.raises(UserError, match=r"optimizer\.name is .muon"):
        train.resume_command(run.path, ["optimizer.name=muon"], None, dry=True)


@pytest.mark.parametrize("dry", [True, False])
def test_launch_lists_the_settings_that_a_resume_changes(run: RunDirectory, dry: bool) -> None:
    nodes, changes = Cluster(0, None, "1:00:00"), ["schedule.preset=pipeline"]
    shown = launch_run(None, run.path, changes, nodes, slurm=False, dry_run=dry)
    assert "# changed: schedule.preset copris → pipeline\n" in shown
    assert "# changed: schedule.boundary abort → continue\n" in shown
    assert "# changed: engines.api_key\n" in shown, "the key itself must not be shown"


@pytest.mark.parametrize("by", ["train", "launch"])
def test_resume_refuses_changed_data_unless_the_setting_accepts_them(
    run: RunDirectory, tmp_path: Path, start: Start, by: str
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(data.read_text().replace("59+59", "58+60"))
    before = content(run)
    accept = ["task.changed_data=accept"]

    def resume(overrides: list[str]) -> str:
        if by == "launch":
            cluster = Cluster(0, None, "1:00:00")
            return launch_run(None, run.path, overrides, cluster, slurm=False, dry_run=True)
        train.resume_command(run.path, overrides, None, dry=True)
        return ""

    with pytest.raises(
        UserError, match=r"task\.path .*data\.jsonl: changed data\.jsonl\. .*accept"
    ):
        resume([])
    assert content(run) == before
    if by == "train":
        train.resume_command(run.path, accept, None)
        assert run.data_identity() != json.loads(before["data.json"])
        train.resume_command(run.path, [], None)
