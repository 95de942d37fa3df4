"""What recording the scheduler's events costs, and the clock reading that the trace needs.

    python -m benchmarks.recording [--events 100000] [--rounds 7]

The events are chunks of tokens, nine in ten of a run's; they are encoded and written to a stream
that drops them. CPU time of this process, so that other load counts little; with and without a
clock take turns.
"""

from __future__ import annotations

import argparse
import io
import time

from benchmarks.rows import spread
from megatron_async.config import build_config
from megatron_async.scheduler import events as ev
from megatron_async.scheduler.record import Recorder
from megatron_async.trajectory.types import PolicyVersion


class _Dropped(io.StringIO):
    def write(self, text: str) -> int:
        return len(text)


def seconds_per_event(events: int, clock: bool) -> float:
    """CPU seconds to record one event."""
    recorder = Recorder(
        _Dropped(),
        build_config({}).resolved_schedule,
        first_step=0,
        version=PolicyVersion(0, 0),
        clock=time.time if clock else None,
    )
    chunks = [ev.TokensArrived(i % 4096, 64, 3) for i in range(events)]
    began = time.process_time()
    for chunk in chunks:
        recorder.write(chunk, ())
    return (time.process_time() - began) / events


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    pairs = [
        tuple(1e6 * seconds_per_event(options.events, clock) for clock in (False, True))
        for _ in range(options.rounds)
    ]
    print(f"without a clock: {spread([plain for plain, _ in pairs])} us an event")
    print(f"with a clock: {spread([timed for _, timed in pairs])} us an event")
    print(f"the clock: {spread([timed - plain for plain, timed in pairs])} us an event")


if __name__ == "__main__":
    main()
