"""Evidence about engines, requests and prompts, and what it counts against.

No I/O and no clock: a call carries what was seen, and the time where it matters, in seconds that
never run backwards. docs/failures.md, "What an engine is given up for", is the same as a table.

Invariants
- A failure counts against what there is evidence about. Failures of several prompts in a row,
  without a token between them, count against the engine, and failures of one prompt alone against
  that prompt. Six engines that fail in a row on one prompt drop it, if others make progress.
- An engine's silence grows only while it has requests, is not held, and no token of it waits for
  the store, behind which streams are not read. It is held while it is paused, receives weights or
  is verified, or has given its memory away. A first request, a token and the end of a hold begin it
  anew; a request that it aborts unasked does not. What a held engine leaves unanswered is no
  evidence.
- Load reports are missed while they are asked for, cannot be read, and the engine is not held.
- A request's silence grows only while its engine is not held, reports an empty queue and none of
  its tokens waits for the store: a request that waits for room in the KV cache, or was sent back to
  the queue, is silent for a good reason.
- A refusal counts against its prompt alone. When many prompts in a row are refused and none is
  accepted, the settings are at fault. Of prompts that are too long, however many may come before
  one that fits (of a task sorted by length): a whole epoch must be among them.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

FAILED_PROMPTS_IN_ROW = 3
FAILURES_OF_ONE = 6
REFUSED_IN_ROW = 64


@dataclass
class Stopwatch:
    """Seconds in which it runs."""

    _seconds: float = 0.0
    _since: float | None = None

    def set(self, runs: bool, now: float) -> None:
        """Let it run, or stand still, from `now` on."""
        self._seconds = self.seconds(now)
        self._since = now if runs else None

    def zero(self, now: float) -> None:
        """Begin anew; it goes on running if it runs."""
        self._seconds = 0.0
        self._since = None if self._since is None else now

    def seconds(self, now: float) -> float:
        """Return the reading of the clock, in seconds."""
        return self._seconds + (0.0 if self._since is None else now - self._since)


class EngineHealth:
    """The silence of an engine, a clock for that of its requests, and prompts that failed on it."""

    def __init__(self) -> None:
        self.requests = 0
        self.failed_prompts: set[int] = set()  # groups, since its last token
        self._holds: set[str] = set()
        self._released_at = float("-inf")
        self._queue_empty = False  # unknown until its first report
        self._report_missed = False
        self._unreported = Stopwatch()
        self._storing = 0
        self._silence = Stopwatch()
        self._uncrowded = Stopwatch()

    @property
    def suspended(self) -> bool:
        """Return whether it cannot be expected to make tokens or to answer."""
        return bool(self._holds)

    def suspended_since(self, since: float) -> bool:
        """Return whether it was held at any time from `since` on."""
        return self.suspended or self._released_at >= since

    def silence(self, now: float) -> float:
        """Seconds for which it had requests, was not held, and made no token."""
        return self._silence.seconds(now)

    def unreported(self, now: float) -> float:
        """Seconds for which it was not held, and no load report came that could be read."""
        return self._unreported.seconds(now)

    def request_clock(self, now: float) -> float:
        """A request has been silent for the difference of two readings."""
        return self._uncrowded.seconds(now)

    def suspend(self, why: str, now: float) -> None:
        """Hold the engine from now on, until each `why` is released."""
        self._holds.add(why)
        self._update(now)

    def release(self, why: str, now: float) -> None:
        """Release one reason to hold; nothing when it is not held for `why`."""
        if why not in self._holds:
            return
        self._holds.remove(why)
        if not self._holds:
            self._released_at = now
            self._silence.zero(now)
        self._update(now)

    def request_began(self, now: float) -> None:
        """Count a request that is on its way to the engine."""
        self.requests += 1
        self._update(now)

    def request_ended(self, now: float, *, unasked: bool = False) -> None:
        """Count a request that has ended; without any, the silence is over.

        `unasked`: the engine aborted it, and nobody wanted that.
        """
        self.requests -= 1
        self._update(now)
        if not self.requests and not unasked:
            self._silence.zero(now)

    def token(self, now: float) -> None:
        """Note that the engine made tokens."""
        self._silence.zero(now)
        self.failed_prompts.clear()

    def store_begins(self, now: float) -> None:
        """A stream waits until its tokens are stored."""
        self._storing += 1
        self._update(now)

    def store_ends(self, now: float) -> None:
        """Let time count again."""
        self._storing -= 1
        self._update(now)

    def queue(self, waiting: int | None, now: float) -> None:
        """Record how many requests the engine reports in its queue; None: it reports nothing."""
        self._queue_empty = waiting == 0
        self._report_missed = waiting is None
        if not self._report_missed:
            self._unreported.zero(now)
        self._update(now)

    def _update(self, now: float) -> None:
        heard = not self.suspended and not self._storing
        self._silence.set(heard and self.requests > 0, now)
        self._uncrowded.set(heard and self._queue_empty, now)
        self._unreported.set(self._report_missed and not self.suspended, now)

    def failed(self, group_id: int) -> bool:
        """A request of this group failed, and the engine answers: return whether it is broken."""
        self.failed_prompts.add(group_id)
        return len(self.failed_prompts) >= FAILED_PROMPTS_IN_ROW


class PromptFailures:
    """Failures, refusals and engines that died on the prompts of a run, each in a row."""

    def __init__(self) -> None:
        self._failures: Counter[int] = Counter()  # by trajectory
        self._deaths: Counter[int] = Counter()  # of engines that began it, by group
        self._tokens_at_death = 0
        self._refused: set[int] = set()  # groups, since a request was accepted
        self.too_long = 0  # prompts, since one that fits

    def token(self, trajectory_id: int, group_id: int) -> None:
        """An engine has made tokens for a request."""
        self._failures.pop(trajectory_id, None)
        self._deaths.pop(group_id, None)
        self._refused.clear()

    def failed(self, trajectory_id: int) -> bool:
        """A request failed on an engine that answers: return whether it is its own fault."""
        self._failures[trajectory_id] += 1
        if self._failures[trajectory_id] < FAILURES_OF_ONE:
            return False
        del self._failures[trajectory_id]
        return True

    def engine_lost(self, trajectory_ids: Iterable[int]) -> None:
        """Forget failures that were the engine's."""
        for trajectory_id in trajectory_ids:
            self._failures.pop(trajectory_id, None)

    def engine_died(self, began: set[int], tokens: int) -> set[int]:
        """An engine failed that had sent no token yet of the groups `began`.

        Returns the groups that engine after engine failed to begin while others made tokens;
        `tokens`: all that the run has made. Failures with no token between them show nothing.
        """
        if tokens == self._tokens_at_death:
            return set()
        self._tokens_at_death = tokens
        self._deaths.update(began)
        return {group_id for group_id in began if self._deaths[group_id] >= FAILURES_OF_ONE}

    def refused(self, group_id: int) -> int | None:
        """Count a refused prompt: how many in a row; None when it is counted already."""
        if group_id in self._refused:
            return None
        self._refused.add(group_id)
        return len(self._refused)


def too_many_refusals(refused_in_row: int, epoch: int | None = None) -> bool:
    """Return whether so many prompts, with none between them that was taken, end the run.

    `epoch`: prompts of one, where only their length counts: each has an order of its own, so a
    whole one is among twice as many in a row.
    """
    return refused_in_row >= max(REFUSED_IN_ROW, 2 * (epoch or 0))
