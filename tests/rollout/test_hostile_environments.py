"""A run whose environments exit, hang, raise, fork and eat memory goes on, and names them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_async.models.tiny_model import write_character_tokenizer
from megatron_async.places.local import local_place
from megatron_async.rollout.manager import ResumePoint
from tests.environments.villain import BY_SEED
from tests.rollout.test_episodes import Run, configured, episodes_of, run

VILLAIN = Path(__file__).parents[1] / "environments" / "villain.py"
COSTS = {"exit", "hang", "hang_async", "raise", "memory"}


@pytest.mark.slow
def test_a_run_of_villains_goes_on(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path)
    environment = {
        "name": f"{VILLAIN}:Villain",
        "arguments": {"marker": str(tmp_path)},
    }
    episode = {"step_seconds": 1.0, "threads": 16, "memory_mib": 1024}
    schedule = {"max_regenerations": 0, "concurrency": 12}
    config = configured(tmp_path, environment=environment, episode=episode, schedule=schedule)
    with local_place(tmp_path) as place:
        one = Run(tmp_path, config, place=place)  # type: ignore[arg-type]

        async def body() -> None:
            await one.begin(ResumePoint(0))
            await one.train(range(4))
            statistics = one.manager._driver.statistics
            assert statistics.counts.episodes["environment_failures"] > 0
            assert statistics.counts.episodes["workers_lost"] > 0
            warned = statistics.warnings["environment_failed"]
            assert re.fullmatch(r"trajectory \d+ \(megatron-async .*\): [^\n]+", warned)
            await one.manager.stop()

        run(body())
    ended: dict[str, set[str]] = {}
    for episode in episodes_of(one).values():
        how = BY_SEED[episode.prompt.payload["metadata"]["seed"] % len(BY_SEED)]
        ended.setdefault(how, set()).add(episode.drop_reason or str(episode.state))
    assert "batched" in ended["well"]
    for how, ends in ended.items():
        assert how not in COSTS or "batched" not in ends
        assert how in COSTS or "environment" not in ends
