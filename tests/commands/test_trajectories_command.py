"""Tests `megatron-async trajectories`: the list, its limit, the view of one trajectory, and
exported trajectories."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from megatron_async.cli import app
from megatron_async.commands import trajectories as view
from megatron_async.config import build_config
from megatron_async.config.rollout import StoreConfig
from megatron_async.errors import UserError
from megatron_async.models.tiny_model import write_character_tokenizer
from megatron_async.run_directory import RunDirectory
from megatron_async.store import export as store_export
from megatron_async.store.reader import StoreReader, TrajectorySummary
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.types import (
    ABANDONED,
    DropReason,
    PolicyVersion,
)
from tests.store.test_episodes import forked
from tests.trajectory.builders import STORE, append, current, prompt, scored_group

EXPORTED, KEPT = 8, 62  # Numbers of trajectories, in groups of two.


def make_run(root: Path, export: str = "jsonl") -> RunDirectory:
    """Create a run in which groups 0 to 2 are consumed and group 3 is dropped, all four exported,
    and 31 groups are scored."""
    model = root / "model"
    model.mkdir(parents=True)
    write_character_tokenizer(model)
    config = build_config({"name": "run", "root": str(root), "model": {"path": str(model)}})
    run = RunDirectory.create(config)
    settings = StoreConfig.model_validate({"compact_after_checkpoints": 1, "export": export})

    async def scenario() -> None:
        store = TrajectoryStore.open(run.store_file, settings)
        for step in range(3):
            group = await scored_group(store, count=20)
            store.mark_batched([group.group_id], step)
        for trajectory in store.add_group(prompt(), 2).trajectories:
            store.drop(trajectory.trajectory_id, DropReason.STALE)
        for _ in range(KEPT // 2):
            await scored_group(store, count=20)
        await store.checkpoint_finalized(3, [])
        await store.close()

    asyncio.run(scenario())
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_run(tmp_path_factory.mktemp("listed"))


def call(run: RunDirectory, *arguments: str) -> str:
    command = ["trajectories", str(run.path), *arguments]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def rows(output: str) -> list[int]:
    """Return the trajectory IDs that the output lists."""
    table = (line.split() for line in output.splitlines())
    return [int(words[0]) for words in table if len(words) > 4 and words[2] in ("20", "0")]


def test_trajectories_lists_the_newest_fifty_and_counts_the_rest(run: RunDirectory) -> None:
    output = call(run)
    assert rows(output) == list(range(20, 70))
    assert f"{KEPT} trajectories: {KEPT} scored" in output
    assert "12 older trajectories are not shown (--limit 0: all)" in output
    assert f"{EXPORTED} more are in {run.path}/export/trajectories.jsonl" in output


def test_trajectories_lists_as_many_as_the_limit_option(run: RunDirectory) -> None:
    assert rows(call(run, "--limit", "3")) == [67, 68, 69]
    everything = call(run, "--limit", "0")
    assert rows(everything) == list(range(8, 70))
    assert "not shown" not in everything


def test_trajectories_lists_exported_trajectories_on_request(run: RunDirectory) -> None:
    output = call(run, "--limit", "0", "--exported")
    assert rows(output) == list(range(70))
    assert f"70 trajectories: {KEPT} scored, 6 batched, 2 dropped" in output
    assert "more are in" not in output
    assert rows(call(run, "--state", "dropped", "--exported")) == [6, 7]
    assert rows(call(run, "--state", "batched")) == []


def test_trajectories_lists_each_once_when_compaction_runs_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    file, read = run.path / "export" / "trajectories.jsonl", store_export.summaries

    async def compact() -> None:
        settings = StoreConfig(compact_after_checkpoints=1)
        store = TrajectoryStore.open(run.store_file, settings, lineage=1, step=3, parent=0)
        store.mark_batched([4, 5], 3)
        await store.checkpoint_finalized(4, [])
        await store.close()

    def read_then_compact(reader: StoreReader) -> list[TrajectorySummary]:
        found = read(reader)
        asyncio.run(compact())
        return found

    monkeypatch.setattr(store_export, "summaries", read_then_compact)
    assert rows(call(run, "--limit", "0", "--exported")) == list(range(70))
    assert len(file.read_text().splitlines()) == EXPORTED + 4


@pytest.mark.parametrize(("shown", "state"), [(30, "scored"), (4, "batched (step 2)")])
def test_show_prints_stored_and_exported_trajectories(
    run: RunDirectory, shown: int, state: str
) -> None:
    output = " ".join(call(run, "--show", str(shown)).split())
    assert f"trajectory {shown} (group {shown // 2})" in output
    assert state in output
    assert f"reward {shown}" in output
    assert "20 tokens in 1 segments" in output
    assert "segment 0: policy 0.0 on e0, 20 tokens, mean log-prob -0." in output


def test_trajectories_command_changes_no_file_of_the_run(run: RunDirectory) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.path.iterdir() if path.is_file()}
    call(run)
    after = {path: path.stat().st_mtime_ns for path in run.path.iterdir() if path.is_file()}
    unchanged = {p: t for p, t in after.items() if not p.name.endswith(("-shm", "-wal"))}
    assert unchanged == {p: t for p, t in before.items() if not p.name.endswith(("-shm", "-wal"))}


def test_trajectories_refuses_an_unknown_id_and_an_unknown_state(run: RunDirectory) -> None:
    with pytest.raises(UserError, match=r"trajectory 70 is not in .*: no trajectory of"):
        call(run, "--show", "70")
    with pytest.raises(UserError, match=r"--state is 'done'; it must be one of pending, running"):
        call(run, "--state", "done")


def test_trajectories_explains_removed_trajectories_when_export_is_none(tmp_path: Path) -> None:
    run = make_run(tmp_path, export="none")
    message = f"{EXPORTED} more were removed by compaction (store.export is none)"
    assert message in call(run)
    with pytest.raises(UserError, match=r"compaction removed it \(store\.export is none\)"):
        call(run, "--show", "4")


def test_trajectories_error_names_the_missing_or_damaged_export(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    file = run.path / "export" / "trajectories.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    line = json.loads(lines[4])
    del line["segments"]
    damaged = json.dumps(line)
    lines[4] = damaged + " " * (len(lines[4]) - len(damaged) - 1) + "\n"
    file.write_text("".join(lines))
    with pytest.raises(UserError, match=rf"{file}, line 5, is not an exported trajectory"):
        call(run, "--exported")
    file.unlink()
    with pytest.raises(UserError, match=rf"failed to read the export {file}"):
        call(run, "--show", "4")


def printed(renderable: RenderableType) -> str:
    stream = io.StringIO()
    Console(file=stream, width=120).print(renderable)
    return stream.getvalue()


def test_details_show_authors_versions_and_masks_of_an_episode(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = TrajectoryStore.open(tmp_path / STORE)
        await forked(store)
        await store.close()

    asyncio.run(scenario())
    with closing(StoreReader(tmp_path / STORE)) as reader:
        found = reader.trajectory(0)
        shown = view.details(found, lambda ids: "|".join(map(str, ids)))
    turns = (found.turns[0], replace(found.turns[1], answer={ABANDONED: True}), found.turns[2])
    abandoned = printed(view.details(replace(found, turns=turns), str))
    assert abandoned.count("mask 1") == 2, "an abandoned turn must not be trained"
    text = " ".join(printed(shown).split())
    assert "turn 0, first turn segment 0: environment, 2 tokens, mask 0 1|2" in text
    policy = "segment 3: policy 0.1 on e0, 2 tokens, mean log-prob -0.065, mask 1 6|7"
    assert f"turn 1, follows turn 0 segment 2: environment, 1 tokens, mask 0 5 {policy}" in text
    assert "turn 2 ended by stop, reward 1" in text


@pytest.fixture
def reader(tmp_path: Path) -> StoreReader:
    """Return a reader of a store with a batched group 0, and a group 1 that has one partial
    trajectory over two versions and one dropped trajectory."""

    async def scenario() -> None:
        store = TrajectoryStore.open(tmp_path / STORE)
        group = await scored_group(store, count=30)
        store.mark_batched([group.group_id], 0)
        store.add_group(prompt(5), 2)
        store.begin_request(2)
        append(store, 2, 0, 3)
        append(store, 2, 3, 4, PolicyVersion(0, 2))
        store.append(
            current(store, 2), [9], [0.0], PolicyVersion(0, 2), "env", from_environment=True
        )
        store.end_request(current(store, 2))
        store.drop(3, DropReason.STALE)
        await store.close()

    asyncio.run(scenario())
    return StoreReader(tmp_path / STORE)


def test_listing_counts_and_shows_each_trajectory(reader: StoreReader) -> None:
    text = printed(view.listing(reader.summaries()))
    assert "4 trajectories: 1 partial, 2 batched, 1 dropped" in text
    rows = [line.split() for line in text.splitlines()[2:]]
    assert rows[0] == ["0", "0", "30", "0", "batched", "(step", "0)", "0.0", "stop"]
    assert rows[2] == ["2", "1", "8", "partial", "0.0", "to", "0.2"]
    assert rows[3] == ["3", "1", "0", "dropped", "(stale)"]
