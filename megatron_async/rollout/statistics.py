"""Counts what happens on the rollout side, and computes the metrics that each batch carries.

Invariants
- Counters only grow. The metrics of a batch are differences since the batch before it (for the
  first batch: since this process started), so that they add up over the batches of one process.
- A metric without a measurement is left out of a batch, for instance KV usage before the first load
  report of an engine, and the seconds per score if nothing was scored.
- Times are wall-clock seconds of the driver's process.
- The lag of a token has two parts. The part before the queue lasts until its group is complete, and
  the part in the queue from then until the group is trained. Both count policy versions that
  engines have loaded. A group that was complete when this process started counts as completed under
  the version of the start, so the versions before belong to the part before the queue.
- Generation time is the time in which requests may run. It stops when a weight update starts, and
  without `overlap` already when a batch is emitted. It continues when the update has ended.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from megatron_async.config.schedule import ScheduleConfig
from megatron_async.scheduler.counts import SchedulerView
from megatron_async.scoring.autoscale import ScorerCount
from megatron_async.scoring.interface import COST, SCORER_FAULTS
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.sample_lag import SamplesTrained
from megatron_async.trajectory.types import DropReason

_MIN_GENERATING_SECONDS = 0.5
"""Shortest generation time, in seconds, for which `tokens_per_second` is computed. A batch that was
complete before the trainer asked for it has almost no generation time, so its rate would be
meaningless. Its tokens and time are counted in the rate of the next batch."""


_OF_SESSIONS = ("restored", "steps_repeated", "workers_lost", "replay_mismatches")
_FORKS = ("forks", "forks_repeated", "forks_shortened", "forks_thread", "forks_tools")
_OF_AGENTS = ("turns_replayed", "turns_abandoned", *_FORKS, "forks_answer", "forks_message")


@dataclass
class RolloutCounts:
    """Counters of one session of a driver. They only grow.

    Attributes:
        seconds: Reading of the clock in seconds; the times below are counted until then.
        tokens: Tokens that arrived from engines.
        generating: Seconds of generation time.
        slot_seconds: Sum, over all requests, of the generation time in which the request was
            running, in seconds.
        paused: Seconds in which weight updates stopped generation.
        waiting: Seconds in which requests could run that only the trainer's progress permits
            (`Scheduler.waits_for_trainer`).
        preemptions: Requests that engines moved back into their queue.
        scores: Scored responses.
        score_seconds: Sum of the seconds that each score took.
        looked_for_answers: Scores with a component `answered`, which says whether the scorer found
            an answer in the response.
        answers: Scores whose component `answered` is positive.
        cost: Sum of the prices that scorers report for their scores.
        dropped: Dropped trajectories, by reason.
        faults: Faults of scorers, for instance timeouts, by metric name.
        scheduler: The scheduler's counters, by metric name.
        episodes: Counters of environments and episodes, by metric name.
        environment_seconds: Sum of the seconds that each call to an environment took.
    """

    seconds: float
    tokens: int = 0
    generating: float = 0.0
    slot_seconds: float = 0.0
    paused: float = 0.0
    waiting: float = 0.0
    preemptions: int = 0
    scores: int = 0
    score_seconds: float = 0.0
    looked_for_answers: int = 0
    answers: int = 0
    cost: float = 0.0
    dropped: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    scheduler: Counter[str] = field(default_factory=Counter)
    episodes: Counter[str] = field(default_factory=Counter)
    environment_seconds: float = 0.0

    def since(self, before: "RolloutCounts") -> "RolloutCounts":
        """Return each counter's growth from `before` to this object."""
        grown = {f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)}
        return RolloutCounts(**grown)


class RolloutStatistics:
    """Counters, warnings and load reports of one driver's session, from which each batch's metrics
    are computed.

    Attributes:
        counts: Counters that only grow.
        warnings: Newest message of each named warning.
    """

    def __init__(
        self,
        *,
        overlap: bool,
        trained: SamplesTrained | None = None,
        version: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start counting now.

        Args:
            overlap: Whether generation continues while the trainer works on a batch.
            trained: Number of trajectories that were trained in each step of earlier sessions, for
                the lag in samples; None if there was no step.
            version: Number of the policy version that engines serve at the start.
            clock: Function that returns the time in seconds.
        """
        self._overlap = overlap
        self._trained = trained or SamplesTrained()
        self._clock = clock
        self._first_version = version
        self._rewarded: dict[int, int] = {}
        self._waiting = False
        self.counts = RolloutCounts(clock())
        self._at_last_batch = self._at_last_rate = deepcopy(self.counts)
        self.warnings: dict[str, str] = {}
        self._new_warnings: list[tuple[str, str]] = []
        self._generating = True
        self._update_began: float | None = None
        self._running = 0
        self._peak_running = 1
        self._kv_usage: dict[str, float] = {}
        self._kv_reports: list[float] = []
        self._unscored = 0
        self._longest_queue = 0
        self._longest_call = 0.0
        self._max_turns = 0

    def running_changed(self, running: int) -> None:
        """Record that `running` requests are running from now on."""
        self._count_time()
        self._running = running
        self._peak_running = max(self._peak_running, running)

    def _count_time(self) -> None:
        now = self._clock()
        passed, self.counts.seconds = now - self.counts.seconds, now
        if self._generating:
            self.counts.generating += passed
            self.counts.slot_seconds += self._running * passed
        if self._waiting:
            self.counts.waiting += passed

    def trainer_awaited(self, waits: bool) -> None:
        """Record whether from now on requests could run that only the trainer's progress
        permits."""
        if waits is not self._waiting:
            self._count_time()
            self._waiting = waits

    def rewarded(self, trajectory_id: int, version: int) -> None:
        """Record that a trajectory gets its reward while engines serve policy number `version`. Its
        group is complete when its last trajectory gets a reward."""
        self._rewarded[trajectory_id] = version

    def generated(self, count: int) -> None:
        """Count `count` tokens that arrived from an engine."""
        self.counts.tokens += count

    def loaded(self, engine_id: str, kv_usage: float, preemptions: int) -> None:
        """Record an engine's load report.

        Args:
            kv_usage: Share of the engine's KV cache in use, 0 to 1.
            preemptions: Number of preemptions since the engine's last report.
        """
        self.counts.preemptions += preemptions
        self._kv_usage[engine_id] = kv_usage
        self._kv_reports.append(kv_usage)

    def score_wanted(self) -> None:
        """Count one more response that waits for its score."""
        self._unscored += 1
        self._longest_queue = max(self._longest_queue, self._unscored)

    def engine_lost(self, engine_id: str) -> None:
        """Discard the last KV usage of an engine that was taken out of service."""
        self._kv_usage.pop(engine_id, None)

    def scored(self, detail: Mapping[str, float], seconds: float) -> None:
        """Count one response whose scoring has ended, with a score or with a failure.

        Args:
            detail: The score's named components, among them a count for each fault in
                `SCORER_FAULTS` that occurred and, if known, the price paid for the score.
            seconds: Time that the scoring took.
        """
        self._unscored -= 1
        self.counts.scores += 1
        self.counts.score_seconds += seconds
        if "answered" in detail:
            self.counts.looked_for_answers += 1
            self.counts.answers += int(detail["answered"] > 0)
        for part, metric in SCORER_FAULTS.items():
            self.counts.faults[metric] += int(detail.get(part, 0))
        self.counts.cost += sum(v for name, v in detail.items() if name.rpartition(".")[2] == COST)

    def dropped(self, trajectory_id: int, reason: str) -> None:
        """Count one trajectory that was dropped for `reason`."""
        self.counts.dropped[reason] += 1
        self._rewarded.pop(trajectory_id, None)

    def batch_dropped(self, step: int, reason: str, trajectories: int) -> None:
        """Count the trajectories of the batch of `step` as dropped, and do not count them as
        trained when the lag in samples is computed."""
        self._trained.drop(step)
        self.counts.dropped[reason] += trajectories

    def warned(self, name: str, message: str) -> None:
        """Record a named warning, to be fetched with `take_warnings`; `warnings` keeps the newest
        message of each name."""
        self.warnings[name] = message
        self._new_warnings.append((name, message))

    def environment_called(self, seconds: float, counts: Mapping[str, int]) -> None:
        """Count one finished call to an environment, which took `seconds`.

        Args:
            counts: Totals that the session's `EpisodeSessions` has counted so far, by name.
        """
        self.counts.environment_seconds += seconds
        self._longest_call = max(self._longest_call, seconds)
        self.counts.episodes["environment_calls"] += 1
        for name in (*_OF_SESSIONS, *_OF_AGENTS):
            self.counts.episodes[name] = counts[name]

    def episode_ended(self, turns: int) -> None:
        """Count one finished episode with its number of turns."""
        self.counts.episodes["ended"] += 1
        self.counts.episodes["turns"] += turns
        self._max_turns = max(self._max_turns, turns)

    def environment_failed(self) -> None:
        """Count one failure of an environment."""
        self.counts.episodes["environment_failures"] += 1

    def take_warnings(self) -> tuple[tuple[str, str], ...]:
        """Return the (name, message) of every warning since the last call."""
        news, self._new_warnings = self._new_warnings, []
        return tuple(news)

    def update_started(self) -> None:
        """Stop counting generation time, because a weight update starts."""
        self._count_time()
        self._generating = False
        self._update_began = self.counts.seconds

    def update_ended(self) -> None:
        """Continue to count generation time after a weight update, and count the time that the
        update took."""
        self._count_time()
        self._generating = True
        if self._update_began is not None:
            self.counts.paused += self.counts.seconds - self._update_began
        self._update_began = None

    def batch_metrics(
        self, batch: TokenBatch, view: SchedulerView, scorers: ScorerCount
    ) -> dict[str, float]:
        """Return the `rollout/*` metrics (docs/schedules.md) of a batch that was just packed; call
        this once per batch.

        Counts are differences since the batch before. Without `overlap`, generation time stops with
        this call.
        """
        self._count_time()
        self._generating = self._generating and self._overlap
        self.counts.scheduler = Counter(
            wasted_tokens=view.wasted_tokens,
            filtered_tokens=view.filtered_tokens,
            restarted=view.restarted,
            regenerated=view.regenerated,
        )
        news, self._at_last_batch = self.counts.since(self._at_last_batch), deepcopy(self.counts)
        generating = max(news.generating, 1e-9)
        lag_samples_E = self._trained.lag_E(batch)
        self._trained.add(len(batch.first_E))
        metrics = {
            "rollout/concurrency": float(view.concurrency),
            "rollout/tokens": float(news.tokens),
            "rollout/seconds": generating,
            "rollout/slots_busy_share": news.slot_seconds / (self._peak_running * generating),
            "rollout/seconds_since_last_batch": max(news.seconds, 1e-9),
            "rollout/update_pause_seconds": news.paused,
            "rollout/wait_for_trainer_seconds": news.waiting,
            **of_batch(batch, lag_samples_E, self._completed(batch)),
            "rollout/preemptions": float(news.preemptions),
            "rollout/score_queue": float(self._unscored),
            "rollout/score_queue_max": float(self._longest_queue),
            "rollout/scores": float(news.scores),
            "rollout/scorers": float(scorers.count),
            "rollout/scorer_seconds": scorers.seconds,
        }
        rated = self.counts.since(self._at_last_rate)
        if rated.generating >= _MIN_GENERATING_SECONDS:
            metrics["rollout/tokens_per_second"] = rated.tokens / rated.generating
            self._at_last_rate = self._at_last_batch
        if news.scores:
            metrics["rollout/score_seconds"] = news.score_seconds / news.scores
        if news.looked_for_answers:
            metrics["rollout/answered_share"] = news.answers / news.looked_for_answers
        if news.cost > 0:
            metrics["rollout/score_cost"] = news.cost
        self._longest_queue = self._unscored
        if self.counts.episodes:
            metrics |= _of_episodes(news, view)
            metrics["rollout/environment_seconds_max"] = self._longest_call
            metrics["rollout/turns_max"] = float(self._max_turns)
            self._longest_call, self._max_turns = 0.0, 0
        for name in self.counts.scheduler:
            metrics[f"rollout/{name}"] = float(news.scheduler[name])
        for reason in DropReason:
            metrics[f"rollout/dropped_{reason}"] = float(news.dropped[reason])
        for name in SCORER_FAULTS.values():
            metrics[f"rollout/{name}"] = float(news.faults[name])
        reports = self._kv_reports or list(self._kv_usage.values())
        if reports:
            metrics["rollout/kv_usage"] = float(np.mean(reports))
            metrics["rollout/kv_usage_max"] = max(reports)
        self._kv_reports = []
        # If `auto` has lowered the concurrency N', the maximum of the number of running requests
        # before counts no longer: lower it to N', or to the number of requests that still run if
        # that is larger.
        self._peak_running = min(self._peak_running, max(view.concurrency, self._running))
        return metrics

    def _completed(self, batch: TokenBatch) -> npt.NDArray[np.int64]:
        """Return, for each sequence of a batch, the policy number that engines served when its
        group was completed, [S]; forget the rewards of the batch."""
        first = self._first_version
        numbers = batch.trajectory_ids_S.tolist()
        rewarded_S = np.array([self._rewarded.get(number, first) for number in numbers], np.int64)
        for number in numbers:
            self._rewarded.pop(number, None)
        groups, group_S = np.unique(batch.group_ids_S, return_inverse=True)
        completed = np.full(len(groups), first)
        np.maximum.at(completed, group_S, rewarded_S)
        return completed[group_S]


def statistics_of(
    schedule: ScheduleConfig, first_step: int, batch_sizes: Mapping[int, int]
) -> RolloutStatistics:
    """Create the statistics of a session that starts at step `first_step`.

    Args:
        batch_sizes: Number of trajectories in each earlier batch, by step.
    """
    usual = schedule.groups_per_batch * schedule.group_size
    trained = SamplesTrained(first_step, usual, batch_sizes)
    return RolloutStatistics(overlap=schedule.overlap, trained=trained, version=first_step)


def _of_episodes(news: RolloutCounts, view: SchedulerView) -> dict[str, float]:
    """Return the metrics of episodes and environments since the previous batch."""
    calls = news.episodes["environment_calls"]
    agents = _OF_AGENTS if any(news.episodes[name] for name in _OF_AGENTS) else ()
    names = ("environment_calls", "environment_failures", *_OF_SESSIONS, *agents)
    return {
        **{f"rollout/{name}": float(news.episodes[name]) for name in names},
        "rollout/environment_seconds": news.environment_seconds / max(1, calls),
        "rollout/turns_mean": news.episodes["turns"] / max(1, news.episodes["ended"]),
        "rollout/open_episodes": float(view.open_episodes),
        "rollout/waiting_episodes": float(view.waiting),
    }


def of_batch(
    batch: TokenBatch,
    lag_samples_E: npt.NDArray[np.int64],
    completed_S: npt.NDArray[np.int64],
) -> dict[str, float]:
    """Return metrics of the trajectories in a batch: numbers, rewards, lengths and lag.

    An episode counts once for rewards and shares, however many branches it has.

    Args:
        lag_samples_E: Lag of each trajectory in samples: number of trajectories that were trained
            between the policy version of its oldest trained token and this batch.
        completed_S: Policy number that engines served when the group of each sequence was
            completed.
    """
    lengths_S = batch.lengths_S() - batch.prompt_lengths_S
    trained_T = batch.loss_mask_T > 0
    lag = batch.lag_T[trained_T]
    in_queue = np.repeat(batch.step - completed_S, batch.lengths_S())[trained_T]
    first_E = batch.first_E
    rewards_E = batch.rewards_S[first_E]
    return {
        "rollout/trajectories": float(len(first_E)),
        "rollout/reward_mean": float(rewards_E.mean()) if len(first_E) else 0.0,
        "rollout/response_length_mean": float(lengths_S.mean()) if len(lengths_S) else 0.0,
        "rollout/response_length_max": float(lengths_S.max(initial=0)),
        "rollout/truncated_share": float(batch.truncated_S[first_E].mean()),
        "rollout/resumed_share": float(batch.resumed_S[first_E].mean()),
        "rollout/lag_mean": float(lag.mean()) if lag.size else 0.0,
        "rollout/lag_before_queue_mean": float((lag - in_queue).mean()) if lag.size else 0.0,
        "rollout/lag_in_queue_mean": float(in_queue.mean()) if lag.size else 0.0,
        "rollout/lag_max": float(lag.max(initial=0)),
        "rollout/off_policy_token_share": float(np.mean(lag > 0)) if lag.size else 0.0,
        "rollout/lag_samples_mean": float(lag_samples_E.mean()) if len(lag_samples_E) else 0.0,
        "rollout/lag_samples_max": float(lag_samples_E.max(initial=0)),
    }
