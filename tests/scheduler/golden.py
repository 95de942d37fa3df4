"""Writes the golden records, `tests/scheduler/golden/<preset>.jsonl`, with the current scheduler.

    python -m tests.scheduler.golden

Run the command only if the scheduler's behavior or format is changed on purpose. `git diff` then
shows the changes, and the commit of the change includes the records.

Each record starts with a resume. A random world with failures of engines and scorer runs until its
trainer has made two steps and a part of the third. Then everything crashes, and the record begins
with the groups that the store has.
"""

from __future__ import annotations

import io
from pathlib import Path

from megatron_async.scheduler.record import Recorder
from megatron_async.trajectory.types import PolicyVersion
from tests.scheduler.episodes import EpisodeWeather, EpisodeWorld
from tests.scheduler.policies import PRESETS, preset
from tests.scheduler.world import Weather, World, play

DIRECTORY = Path(__file__).parent / "golden"
COMMAND = "python -m tests.scheduler.golden"
BEFORE_CRASH = 60
EVENTS = 450
# Each preset has another seed, because `sync` and `rapid` give equal records for one seed.
FIRST_SEED = 1
WEATHER = Weather(
    engine_failures=0.01,
    spontaneous_aborts=0.02,
    scorer_failures=0.03,
    regenerate=True,
    slow_scores=0.9,
    equal_rewards=0.1,
)


EPISODES = "episodes"
"""Name of the record of `pipeline` with episodes."""


class Recorded(World):
    """World that records the events and actions of its newest scheduler."""

    def start(self, step: int, version: PolicyVersion) -> None:
        super().start(step, version)
        self.record = io.StringIO()
        self.recorder = Recorder(self.record, self.config, first_step=step, version=version)


class RecordedWorld(Recorded): ...


class RecordedEpisodes(Recorded, EpisodeWorld): ...


def golden_record(name: str) -> str:
    """Return the text of one record, which depends only on the preset and the scheduler's
    actions."""
    world: Recorded
    if name == EPISODES:
        weather = EpisodeWeather(**vars(WEATHER), environment_failures=0.3)
        world = RecordedEpisodes(preset("pipeline"), weather, seed=FIRST_SEED)
    else:
        changes = {"updates_per_batch": 2} if name == "rapid" else {}
        seed = FIRST_SEED + PRESETS.index(name)
        world = RecordedWorld(preset(name, **changes), WEATHER, seed)
    play(world, events=0, steps=2)
    world.calm = False
    for _ in range(BEFORE_CRASH):
        world.random_event()
    world.crash()
    began = world.events
    while world.events - began < EVENTS and world.random_event():
        pass
    return world.record.getvalue()


def path_of(name: str) -> Path:
    """Return the path of the golden record of a preset."""
    return DIRECTORY / f"{name}.jsonl"


def main() -> None:
    DIRECTORY.mkdir(exist_ok=True)
    for name in (*PRESETS, EPISODES):
        path_of(name).write_text(golden_record(name))
        print(path_of(name))


if __name__ == "__main__":
    main()
