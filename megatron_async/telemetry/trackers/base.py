"""The interface of a tracker: override what yours has a place for.

`BackgroundTracker` keeps one behind a queue: it can be slow, fail or hang, and the run goes on.

Invariants
- No call waits: what does not fit into the queue is dropped and counted.
- What a tracker raises is counted; after `_MOST_FAILURES` in a row it is not called any more.
- `close` waits a bounded time and then leaves the thread to the end of the process.
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
    """The run that a tracker follows. `lineage` is above 0 when it was restored.

    `stage`: `sft` where the run directory is that of RL too, else empty. `step`: number of the step
    that comes first; what an earlier process has reported about this step and later ones is
    superseded.
    """

    name: str
    directory: Path
    config: Mapping[str, Any]
    lineage: int = 0
    stage: str = ""
    step: int = 0

    @property
    def label(self) -> str:
        """The name, with the stage if there is one."""
        return f"{self.name}-{self.stage}" if self.stage else self.name

    def id_file(self, tracker: str) -> Path:
        """Return the file of the run directory in which `tracker` keeps its own id of the run."""
        return self.directory / f"{tracker}_run_id{self.stage}"


class Tracker:
    """A place that a run reports to, made with the `arguments` of its setting.

    `start` comes first and `finish` last. All calls come one after another from one thread of their
    own, so they may take their time: what they raise, and what they are too slow for, is counted
    and never stops the run. A restored run starts its trackers again and repeats steps.
    """

    def start(self, run: TrackedRun) -> None:
        """Open what the others write to."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of a step; `eval/...` are those of an evaluation."""

    def histogram(self, step: int, name: str, values: npt.NDArray[Any]) -> None:
        """Numbers of which the distribution matters."""

    def samples(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Responses of an evaluation: question, response, reward and more."""

    def text(self, step: int, name: str, text: str) -> None:
        """A warning by its name, or the totals at the end (`report`)."""

    def checkpoint(self, step: int, path: Path) -> None:
        """A checkpoint that can be restored is on disk."""

    def finish(self) -> None:
        """Write what is left."""


QUEUE_CALLS = 1000
CLOSE_SECONDS = 20.0
_MOST_FAILURES = 10


class BackgroundTracker:
    """Passes calls to `tracker` on a thread of its own."""

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
        """Have `method` of the tracker called when its turn comes."""
        try:
            self._calls.put_nowait(lambda: getattr(self._tracker, method)(*arguments))
        except queue.Full:
            self._lost("is too slow: calls are dropped")

    def take_news(self) -> str | None:
        """The first failure and the first dropped call since the last time, as a sentence."""
        news, self._news = self._news, None
        return news

    def close(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Finish what is queued within `seconds`; False when they were not enough."""
        end = time.monotonic() + seconds
        try:
            self._calls.put(lambda: self._tracker.finish(), timeout=seconds)
            self._calls.put(None, timeout=max(0.0, end - time.monotonic()))
        except queue.Full:
            return False
        self._thread.join(max(0.0, end - time.monotonic()))
        return not self._thread.is_alive()

    def _lost(self, why: str) -> None:
        if self.dropped == 0:
            self._news = f"tracker {self.name} {why}"
        self.dropped += 1

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if self._failures_in_a_row >= _MOST_FAILURES:
                self._lost(f"has failed {_MOST_FAILURES} times in a row and is left out")
                continue
            try:
                call()
                self._failures_in_a_row = 0
            except Exception as error:  # noqa: BLE001 - trackers raise anything
                self._failures_in_a_row += 1
                if self.failed == 0:
                    self._news = f"tracker {self.name} fails: {described(error)}"
                self.failed += 1
