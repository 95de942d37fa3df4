"""Measures the scheduler's events per second, for growing numbers of buffered trajectories.

    python -m benchmarks.scheduler [--in-flight 4096] [--buffered 0 10000 100000] [--rounds 5]
        [--out benchmarks/results/scheduler.md]

The buffer contains partial trajectories, which wait for a free request. N' requests are in flight.
There is one scheduler for each buffer size. Each scheduler is first brought into a steady state:
all N' requests run, and the buffer is full. Then the schedulers alternate in rounds, with equally
distributed events: chunks of tokens (90 %), completions with their scores, aborts and load reports.
An aborted trajectory enters the buffer, and the oldest one leaves it. Before each round, the buffer
is filled up.

Only the time in `Scheduler.step` counts. It is computed as the step's share of the round's wall
time, multiplied by the round's CPU time, because other processes do not change the CPU time. The
last column is the time per event relative to the empty buffer. All sizes are measured without a lag
bound and with the bound k = 64, which is so large that no buffered trajectory becomes too old.

The program prints one table. With --out, it also writes the table with the command, the date and
the machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.reporting import publish, table
from megatron_async.config import build_config
from megatron_async.scheduler import Scheduler
from megatron_async.scheduler import events as ev
from megatron_async.trajectory.types import PolicyVersion

ENGINES = 16
GROUP = 8
BATCH = 512
BOUNDS = (None, 64)


@dataclass
class Load:
    """A scheduler under load.

    Attributes:
        bound: Lag bound; None for no bound.
        in_flight: Requests in flight.
        buffered: Size of the buffer.
        spent: Wall seconds in `Scheduler.step`.
        events: Number of events so far.
        version: Current policy version.
        given: Number of groups created so far.
        running: Running trajectories.
        place: Index of each running trajectory in `running`.
        queue: Events that follow from actions and are not sent yet.
    """

    bound: int | None
    in_flight: int
    buffered: int
    spent: float = 0.0
    events: int = 0
    version: int = 0
    given: int = 0
    running: list[int] = field(default_factory=list)
    place: dict[int, int] = field(default_factory=dict)
    queue: deque[ev.Event] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.random = random.Random(1)
        schedule = {
            "preset": "async",
            "max_async_level": self.bound,
            "groups_per_batch": BATCH,
            "group_size": GROUP,
            "concurrency": self.in_flight,
        }
        self.scheduler = Scheduler(
            build_config({"schedule": schedule}).schedule,
            first_step=0,
            version=PolicyVersion(0, 0),
        )
        self._fill_buffer()
        for i in range(ENGINES):
            self._send(ev.EngineUp(f"engine-{i}", PolicyVersion(0, 0), 1_000_000, None))
        self._drain_queue()

    def _fill_buffer(self) -> None:
        """Add partial trajectories, as a resume does, until `buffered` of them wait."""
        found = []
        for _ in range((self.buffered - self.scheduler.view().buffered_partial) // GROUP):
            spec = self._new_group()
            partial = [
                ev.RecoveredTrajectory(t, ev.TrajectoryState.PARTIAL, 100, self.version, None)
                for t in spec.trajectory_ids
            ]
            found.append(ev.RecoveredGroup(spec, tuple(partial)))
        self._send(ev.Recovered(tuple(found)))

    def _new_group(self) -> ev.GroupSpec:
        ids = tuple(range(self.given * GROUP, (self.given + 1) * GROUP))
        self.given += 1
        return ev.GroupSpec(self.given - 1, ids, 200)

    def _send(self, event: ev.Event) -> None:
        """Send an event to the scheduler, measure the call, and carry out the returned actions."""
        began = time.perf_counter()
        actions = self.scheduler.step(event)
        self.spent += time.perf_counter() - began
        self.events += 1
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: ev.Action) -> None:
        """Carry out an action; queue the events that follow from it."""
        match action:
            case ev.Submit():
                self.place[action.trajectory_id] = len(self.running)
                self.running.append(action.trajectory_id)
            case ev.Score():
                reward = float(action.trajectory_id % 3)
                self.queue.append(ev.RewardReady(action.trajectory_id, reward))
            case ev.RequestPrompts():
                groups = tuple(self._new_group() for _ in range(action.count))
                self.queue.append(ev.PromptsAvailable(groups))
            case ev.EmitBatch():
                self.queue.append(ev.BatchTaken(action.step))
                self.queue.append(ev.UpdateRequested(action.step + 1))
            case ev.AllowUpdate():
                self.version = action.number
                self.queue.append(ev.WeightsPublished(PolicyVersion(0, action.number)))

    def _stop_running(self, trajectory_id: int) -> None:
        """Remove a trajectory from `running` in constant time."""
        place = self.place.pop(trajectory_id)
        last = self.running.pop()
        if last != trajectory_id:
            self.running[place] = last
            self.place[last] = place

    def _drain_queue(self) -> None:
        while self.queue:
            self._send(self.queue.popleft())

    def run(self, events: int) -> float:
        """Fill the buffer and send about `events` events; return the CPU seconds per event."""
        self._fill_buffer()
        self._drain_queue()
        spent, done = self.spent, self.events
        wall, cpu = time.perf_counter(), time.process_time()
        choose = self.random.random
        while self.events - done < events:
            trajectory_id = self.running[int(choose() * len(self.running))]
            kind = choose()
            if kind < 0.90:
                self._send(ev.TokensArrived(trajectory_id, 16, self.version))
            elif kind < 0.96:
                self._stop_running(trajectory_id)
                self._send(ev.Finished(trajectory_id))
            elif kind < 0.99:
                self._stop_running(trajectory_id)
                self._send(ev.Aborted(trajectory_id))
            else:
                self._send(ev.EngineLoad(f"engine-{int(choose() * ENGINES)}", 0.8, 0))
            self._drain_queue()
        share = (self.spent - spent) / (time.perf_counter() - wall)
        return share * (time.process_time() - cpu) / (self.events - done)


def measure(arguments: argparse.Namespace) -> str:
    """Measure all lag bounds and buffer sizes; return the table."""
    rows = []
    for bound in BOUNDS:
        loads = [Load(bound, arguments.in_flight, size) for size in arguments.buffered]
        times: list[list[float]] = [[] for _ in loads]
        for _ in range(arguments.rounds):
            for load, seconds in zip(loads, times, strict=True):
                seconds.append(load.run(arguments.events))
        base = statistics.median(times[0])
        for load, seconds in zip(loads, times, strict=True):
            median = statistics.median(seconds)
            rows.append(
                (
                    bound or "none",
                    f"{load.buffered:,}",
                    f"{1 / median:,.0f}",
                    f"{1 / max(seconds):,.0f}",
                    f"{median * 1e6:.2f}",
                    f"{median / base:.2f}",
                )
            )
    header = "bound k | buffered | events/s | slowest round | us/event | x empty buffer"
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--in-flight", type=int, default=4096, help="N', requests in flight")
    parser.add_argument("--buffered", type=int, nargs="+", default=[0, 10_000, 100_000])
    parser.add_argument("--events", type=int, default=40_000, help="events in a round")
    parser.add_argument(
        "--rounds", type=int, default=5, help="number of rounds, whose median is reported"
    )
    parser.add_argument("--out", type=Path, help="file to which the table is also written")
    arguments = parser.parse_args()
    sizes = f"N' = {arguments.in_flight}, {ENGINES} engines, groups of {GROUP}, B = {BATCH}; "
    text = f"{sizes}medians of {arguments.rounds} rounds.\n\n{measure(arguments)}"
    publish("benchmarks.scheduler", "Scheduler speed", text, arguments.out)


if __name__ == "__main__":
    main()
