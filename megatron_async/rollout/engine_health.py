"""Provides the rules for whether a failure counts against an engine, a request or a prompt.

The module does no I/O and reads no clock. Each call passes an observation and, where time matters,
the time in seconds, which never runs backward. docs/failures.md, "When an engine is taken out of
service", has the same rules as a table.

Invariants
- If requests of `FAILED_PROMPTS_IN_ROW` different prompts fail on one engine and the engine makes
  no token between these failures, the engine is at fault. If only one prompt fails, the prompt is
  at fault. A prompt is dropped if `FAILURES_OF_ONE` requests of one of its trajectories fail in a
  row, or if that many engines in a row die on it while other prompts make progress.
- An engine's silence is the time in which it has requests and makes no token. The silence does not
  grow while the engine is suspended. It does not grow either while a token of the engine waits to
  be stored, because the stream of that token is not read meanwhile. An engine is suspended while it
  is paused, receives weights, is verified, or has released its memory. A first request, a token and
  the end of a suspension reset the silence to 0; a request that the engine aborts by itself does
  not. If a suspended engine does not reply to a request, nothing is at fault.
- A load report counts as missing only if it was requested and could not be read while the engine
  was not suspended.
- A request's silence grows only while its engine is not suspended, reports an empty queue, and has
  no token that waits to be stored. While the queue is not empty, the request may be in it: it waits
  for space in the KV cache, or the engine moved it back. That is a good reason to be silent.
- A refusal counts only against its prompt. If many prompts in a row are refused and none is
  accepted, the settings are at fault. Prompts that are too long are an exception: a task may be
  sorted by length, so many of them may precede one that fits. They end the run only once they are
  so many in a row that every prompt of the task must be among them, which is twice an epoch.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

FAILED_PROMPTS_IN_ROW = 3
FAILURES_OF_ONE = 6
REFUSED_IN_ROW = 64


@dataclass
class Stopwatch:
    """Stopwatch that adds up the seconds during which it was running."""

    _seconds: float = 0.0
    _since: float | None = None

    def set(self, runs: bool, now: float) -> None:
        """Start the stopwatch at time `now`, or stop it if `runs` is false."""
        self._seconds = self.seconds(now)
        self._since = now if runs else None

    def zero(self, now: float) -> None:
        """Reset the stopwatch to 0 seconds; if it is running, it continues to run."""
        self._seconds = 0.0
        self._since = None if self._since is None else now

    def seconds(self, now: float) -> float:
        """Return the number of seconds that the stopwatch has counted until time `now`."""
        return self._seconds + (0.0 if self._since is None else now - self._since)


class EngineHealth:
    """Observations of one engine: how long it made no token, a clock by which the silence of each
    of its requests is measured, and the prompts that failed on it.

    Attributes:
        requests: Number of requests on the engine.
        failed_prompts: Ids of groups whose requests failed since the engine's last token.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.failed_prompts: set[int] = set()
        self._suspensions: set[str] = set()
        self._released_at = float("-inf")
        self._queue_empty = False  # False until the first load report, too.
        self._report_missed = False
        self._unreported = Stopwatch()
        self._storing = 0
        self._silence = Stopwatch()
        self._request_time = Stopwatch()

    @property
    def suspended(self) -> bool:
        """Whether liveness checks are suspended for this engine, because it need not make tokens or
        reply now."""
        return bool(self._suspensions)

    def suspended_since(self, since: float) -> bool:
        """Return whether this engine was suspended at any time from time `since` on."""
        return self.suspended or self._released_at >= since

    def silence(self, now: float) -> float:
        """Return for how many seconds this engine has made no token, counting only the time in
        which it had requests, was not suspended, and had no token waiting to be stored.

        It is reset to 0 by a token, by the end of a suspension, and by the end of the last request,
        unless the engine aborted that request by itself.
        """
        return self._silence.seconds(now)

    def unreported(self, now: float) -> float:
        """Return the seconds since this engine's first missing load report, without the time in
        which it was suspended.

        The result is 0 if its newest load report could be read.
        """
        return self._unreported.seconds(now)

    def request_clock(self, now: float) -> float:
        """Return the reading of this engine's request clock in seconds. A request's silence is the
        reading now minus the reading at the request's last token.

        The clock runs only while no request on the engine has a good reason to be silent: while the
        engine is not suspended, reports an empty queue, and has no token that waits to be stored.
        """
        return self._request_time.seconds(now)

    def suspend(self, why: str, now: float) -> None:
        """Suspend liveness checks of this engine from time `now` on, for the reason `why`. They
        stay suspended until `release` was called for each such reason."""
        self._suspensions.add(why)
        self._update(now)

    def release(self, why: str, now: float) -> None:
        """Remove the reason `why` for which this engine is suspended; do nothing if it is not
        suspended for it.

        When the last reason is removed, the engine's silence is reset to 0.
        """
        if why not in self._suspensions:
            return
        self._suspensions.remove(why)
        if not self._suspensions:
            self._released_at = now
            self._silence.zero(now)
        self._update(now)

    def request_started(self, now: float) -> None:
        """Count one more request on this engine."""
        self.requests += 1
        self._update(now)

    def request_ended(self, now: float, *, spontaneous: bool = False) -> None:
        """Count one request fewer on this engine. If no request is left, reset the engine's silence
        (the time for which it has had requests and made no token) to 0.

        Args:
            spontaneous: Whether the engine aborted the request by itself. The silence is then not
                reset, because such an abort does not show progress.
        """
        self.requests -= 1
        self._update(now)
        if not self.requests and not spontaneous:
            self._silence.zero(now)

    def token(self, now: float) -> None:
        """Record that this engine made tokens: reset its silence and forget the prompts that failed
        on it."""
        self._silence.zero(now)
        self.failed_prompts.clear()

    def store_wait_started(self, now: float) -> None:
        """Record that one more of this engine's streams waits until its newest tokens are stored;
        the engine's silence does not grow meanwhile."""
        self._storing += 1
        self._update(now)

    def store_wait_ended(self, now: float) -> None:
        """Record that the tokens for which one of this engine's streams has waited are stored."""
        self._storing -= 1
        self._update(now)

    def queue(self, waiting: int | None, now: float) -> None:
        """Record a load report of this engine, or that the report could not be read.

        Args:
            waiting: Number of requests in the engine's queue; None if the report could not be read.
        """
        self._queue_empty = waiting == 0
        self._report_missed = waiting is None
        if not self._report_missed:
            self._unreported.zero(now)
        self._update(now)

    def _update(self, now: float) -> None:
        observed = not self.suspended and not self._storing
        self._silence.set(observed and self.requests > 0, now)
        self._request_time.set(observed and self._queue_empty, now)
        self._unreported.set(self._report_missed and not self.suspended, now)

    def failed(self, group_id: int) -> bool:
        """Record a failed request of group `group_id`; return whether requests of
        `FAILED_PROMPTS_IN_ROW` different groups have failed since the engine's last token.

        Call this only after a check that the engine still replies. If the result is True, the
        engine is broken although it replies.
        """
        self.failed_prompts.add(group_id)
        return len(self.failed_prompts) >= FAILED_PROMPTS_IN_ROW


class PromptFailures:
    """Counters of a run's prompts that failed, were refused, or were running when an engine died.

    Attributes:
        too_long: Number of prompts in a row that were too long for the engines.
    """

    def __init__(self) -> None:
        # Number of failed requests since the last token, by trajectory.
        self._failures: Counter[int] = Counter()
        # Number of engines in a row that died on its requests, by group.
        self._deaths: Counter[int] = Counter()
        self._tokens_at_death = 0
        self._refused: set[int] = set()  # groups refused since a request last made tokens
        self.too_long = 0

    def token(self, trajectory_id: int, group_id: int) -> None:
        """Record that an engine made tokens for this trajectory. Forget the trajectory's failed
        requests, the engines that died on requests of its group, and all refused groups."""
        self._failures.pop(trajectory_id, None)
        self._deaths.pop(group_id, None)
        self._refused.clear()

    def failed(self, trajectory_id: int) -> bool:
        """Count a failed request of a trajectory on an engine that still replies; return whether
        the trajectory is at fault.

        It is at fault once `FAILURES_OF_ONE` of its requests have failed without a token between
        them.
        """
        self._failures[trajectory_id] += 1
        if self._failures[trajectory_id] < FAILURES_OF_ONE:
            return False
        del self._failures[trajectory_id]
        return True

    def engine_lost(self, trajectory_ids: Iterable[int]) -> None:
        """Forget the failed requests of these trajectories, because their engine was at fault and
        is out of service."""
        for trajectory_id in trajectory_ids:
            self._failures.pop(trajectory_id, None)

    def engine_died(self, began: set[int], tokens: int) -> set[int]:
        """Count the death of an engine against the groups `began`; return the groups of `began`
        that are now at fault for the deaths of engines.

        A group is at fault once `FAILURES_OF_ONE` engines in a row have died before they made a
        token for it. Nothing is counted if the run has made no token at all since the last death:
        every engine may then die for a reason other than its prompts.

        Args:
            began: Ids of groups whose requests the engine had accepted, without a token so far.
            tokens: Number of all tokens that the run has made.
        """
        if tokens == self._tokens_at_death:
            return set()
        self._tokens_at_death = tokens
        self._deaths.update(began)
        return {group_id for group_id in began if self._deaths[group_id] >= FAILURES_OF_ONE}

    def refused(self, group_id: int) -> int | None:
        """Count a refused prompt and return how many different prompts were refused since a request
        made tokens.

        Return None if the prompt of this group is counted already.
        """
        if group_id in self._refused:
            return None
        self._refused.add(group_id)
        return len(self._refused)


def too_many_refusals(refused_in_row: int, epoch: int | None = None) -> bool:
    """Return whether so many prompts in a row were refused that the settings must be at fault,
    which ends the run: at least max(`REFUSED_IN_ROW`, 2 * `epoch`).

    Args:
        refused_in_row: Number of prompts refused in a row, without an accepted prompt between them.
        epoch: Number of prompts in an epoch if the prompts were refused for their length; otherwise
            None. A task may have most of its too long prompts one after another. Each epoch has its
            own order, but any 2 * `epoch` prompts in a row contain a whole epoch, and thus every
            prompt of the task.
    """
    return refused_in_row >= max(REFUSED_IN_ROW, 2 * (epoch or 0))
