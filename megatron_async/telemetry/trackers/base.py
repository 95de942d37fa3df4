"""Provides `Tracker`, the base class of trackers, whose methods do nothing. A tracker overrides
those that it needs.

`BackgroundTracker` calls a tracker from a queue on a separate thread: the tracker may be slow, fail
or hang without any effect on the run.

Invariants
- The run never waits for a tracker: if the queue is full, a call is dropped and counted.
- Exceptions of a tracker are counted; after `_MAX_FAILURES` in a row it is no longer called.
- `close` waits for a limited time. A thread that has not ended by then ends when the process
  ends.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from megatron_async.runtime.import_path import described

Row = Mapping[str, Any]


@dataclass(frozen=True)
class TrackedRun:
    """The run about which a tracker gets reports.

    Attributes:
        name: Name of the run.
        directory: The run's directory.
        config: The settings.
        lineage: Number of this start of the trainer; above 0 after a resume or a restart of the
            ranks.
        stage: `sft` for a fine-tuning whose run directory an RL run will use too; otherwise empty.
        step: Number of the first step that is reported. After a resume, reports about this and
            later steps replace those before the resume.
    """

    name: str
    directory: Path
    config: Mapping[str, Any]
    lineage: int = 0
    stage: str = ""
    step: int = 0

    @property
    def label(self) -> str:
        """Name of the run, followed by `-sft` if these are the reports of the fine-tuning before an
        RL run."""
        return f"{self.name}-{self.stage}" if self.stage else self.name

    def id_file(self, tracker: str) -> Path:
        """Return the file in the run directory where `tracker` stores its own id of the run."""
        return self.directory / f"{tracker}_run_id{self.stage}"


class Tracker:
    """Base class of a tracker, which reports a run to a service. It is created with the `arguments`
    of its setting.

    `start` is called first and `finish` last. All calls come one after another from a dedicated
    thread, so they may take time. An exception never stops the run, and neither does a tracker that
    is too slow, for which calls are dropped. A resumed run starts its trackers again and may repeat
    steps.
    """

    def start(self, run: TrackedRun) -> None:
        """Open the destination to which the other methods write the reports of `run`."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Report the metrics of a step, or of an evaluation, whose names begin with `eval/`."""

    def histogram(self, step: int, name: str, values: npt.NDArray[Any]) -> None:
        """Report numbers whose distribution is to be shown."""

    def samples(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Report the responses of an evaluation: question, response, reward and more."""

    def text(self, step: int, name: str, text: str) -> None:
        """Report a text: a warning, whose `name` is `warning/` and the warning's name, or at the
        end the totals of the run, whose `name` is `report`."""

    def checkpoint(self, step: int, path: Path) -> None:
        """Report that a checkpoint that can be restored is on disk."""

    def finish(self) -> None:
        """Write remaining reports and close the destination."""


QUEUE_CALLS = 1000
CLOSE_SECONDS = 20.0
_MAX_FAILURES = 10


class BackgroundTracker:
    """Calls a tracker's methods on a dedicated thread, from a queue of limited length.

    Attributes:
        name: Name of the tracker.
        dropped: Number of calls that were dropped.
        failed: Number of calls that raised an exception.
    """

    def __init__(
        self, name: str, tracker: Tracker, run: TrackedRun, *, queue_calls: int = QUEUE_CALLS
    ) -> None:
        self.name = name
        self.dropped = 0
        self.failed = 0
        self._failures_in_a_row = 0
        self._news: str | None = None
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(queue_calls)
        self._tracker = tracker
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()
        self.call("start", run)

    def call(self, method: str, *arguments: Any) -> None:
        """Queue a call of the tracker's `method`; drop and count it if the queue is full."""
        try:
            self._calls.put_nowait(lambda: getattr(self._tracker, method)(*arguments))
        except queue.Full:
            self._lost("is too slow: calls are dropped")

    def take_problem(self) -> str | None:
        """Return a message about the tracker's first failed or first dropped call, if this method
        has not returned it before; otherwise None."""
        news, self._news = self._news, None
        return news

    def close(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Wait for up to `seconds` until the queued calls are made and the tracker has finished;
        return whether this time was enough."""
        end = time.monotonic() + seconds
        try:
            self._calls.put(lambda: self._tracker.finish(), timeout=seconds)
            self._calls.put(None, timeout=max(0.0, end - time.monotonic()))
        except queue.Full:
            return False
        self._thread.join(max(0.0, end - time.monotonic()))
        return not self._thread.is_alive()

    def _lost(self, why: str) -> None:
        """Count a dropped call; keep the message about the first one for `take_problem`."""
        if self.dropped == 0:
            self._news = f"tracker {self.name} {why}"
        self.dropped += 1

    def _work(self) -> None:
        """Make the queued calls until the end marker (None) is taken from the queue; count
        failures."""
        while (call := self._calls.get()) is not None:
            if self._failures_in_a_row >= _MAX_FAILURES:
                self._lost(f"has failed {_MAX_FAILURES} times in a row and is no longer called")
                continue
            try:
                call()
                self._failures_in_a_row = 0
            except Exception as error:  # noqa: BLE001 - a tracker may raise anything
                self._failures_in_a_row += 1
                if self.failed == 0:
                    self._news = f"tracker {self.name} fails: {described(error)}"
                self.failed += 1
