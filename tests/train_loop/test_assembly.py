"""What a trainer rank gives away of a run's settings."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config import build_config
from megatron_async.run_directory import RunDirectory
from megatron_async.trainer.device import import_megatron


def test_a_tracker_gets_every_setting_but_the_engines_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_megatron()
    from megatron_async.train_loop import assembly

    seen: list[Any] = []
    monkeypatch.setattr(assembly, "start_trackers", lambda _, run: [seen.append(run.config)][:0])
    config = build_config({"root": str(tmp_path), "engines": {"api_key": "secret"}})
    directory = RunDirectory.create(config)
    with ExitStack() as stack:
        assembly.writer(directory, config, stack, lineage=0)
    [settings] = seen
    assert settings["engines"]["count"] == config.engines.count
    assert "secret" not in repr(settings)
