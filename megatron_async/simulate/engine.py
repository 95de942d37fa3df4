"""An engine of the simulation: a decode batch that is advanced from event to event.

All running requests advance together. `steps` counts decode steps as a real number; a request that
joined at step j has floor(steps - j) tokens of this stint. Between two changes of the batch the KV
cache grows by one token per request and step, so n steps take

    n (fixed + per_kv kv) + per_kv batch n^2 / 2

seconds (the continuous limit of the sum), which is solved for n or for time as needed.

Invariants
- Time only moves forward, and only through `advance`; everything else happens at that moment.
- KV never passes the capacity: the newest requests are preempted before that, go to the head of
  the queue and are prefilled again in full when there is room.
- A request that is taken out loses the part of a token that it was at; whole tokens never get lost.
- Prefill stops decoding for its duration. A prompt that a running request of the same group has in
  the cache is neither prefilled nor counted twice, unless older weights computed it: after an
  update that keeps the cache, only those that run go on with what they have.
- A token belongs to the version that the engine held when its decode step ended.
- What an episode's turn has left in the cache stays there as long as running requests leave room,
  the one used longest ago going first, and until the weights change. The next turn is prefilled
  only where that does not hold its input.
"""

import functools
import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from megatron_async.config.simulate import SimulateConfig
from megatron_async.simulate.engine_costs import EngineCosts

_CLOSE = 1e-6
"""Decode steps: far below one token, far above rounding."""

Tokens = list[tuple[int, int]]
"""(policy number, tokens), oldest first."""


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A trajectory, on an engine or between two of them.

    `before`: tokens from earlier stints, `reported`: from this one as far as they were taken,
    `written`: all of these by version. `prefixes`: which prefixes it shares (`Engine`). Of an
    episode `before` counts the environment's tokens too, of which no engine has `unseen` ones.
    While it runs: it `joined` at one decode step and is complete at another, `finish_at`.
    """

    trajectory_id: int
    group_id: int
    prompt: int
    before: int
    remaining: int
    was_preempted: bool = False
    joined: float = 0.0
    finish_at: float = 0.0
    reported: int = 0
    prefixes: int = 0
    unseen: int = 0
    written: Tokens = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """All that were taken so far."""
        return self.before + self.reported

    def write(self, tokens: Tokens) -> None:
        """Tokens of this stint were taken."""
        written = self.written
        version, count = tokens[0]
        if written and written[-1][0] == version:
            written[-1] = (version, written[-1][1] + count)
            written += tokens[1:]
        else:
            written += tokens

    def end_stint(self) -> None:
        """Close a stint: the tokens taken so far are what the request comes back with."""
        self.before += self.reported
        self.remaining -= self.reported
        self.reported = 0


@dataclass(slots=True)
class EngineCounters:
    """Totals of an engine; seconds and tokens. `full_seconds`: busy, and a request waits for KV."""

    busy_seconds: float = 0.0
    full_seconds: float = 0.0
    slot_seconds: float = 0.0
    generated: float = 0.0
    prefilled: int = 0
    resumed_prefill: int = 0
    preempted_prefill: int = 0
    updated_prefill: int = 0
    preemptions: int = 0


@dataclass(slots=True, eq=False)
class Engine:
    """State of one engine; `stamp` changes with every forecast, so that old ones are void.

    `settings` hold its rules of admission and preemption. What a decode step costs is kept.
    `prefixes` counts the updates that kept the cache: prompts are shared since the last of them.
    """

    engine_id: str
    costs: EngineCosts
    settings: SimulateConfig
    max_running: int | None
    now: float = 0.0
    steps: float = 0.0
    kv: float = 0.0
    stall: float = 0.0
    paused: bool = False
    stamp: int = 0
    prefixes: int = 0
    running: dict[int, SimulatedRequest] = field(default_factory=dict)
    counters: EngineCounters = field(default_factory=EngineCounters)
    _waiting: OrderedDict[int, SimulatedRequest] = field(default_factory=OrderedDict)
    _groups: dict[tuple[int, int], int] = field(default_factory=dict)
    _keeps: bool = False
    _full: bool = False
    _cached: OrderedDict[int, int] = field(default_factory=OrderedDict)
    _finishing: list[tuple[float, int]] = field(default_factory=list)
    _switches: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    _next_report: float = 0.0
    _target: tuple[float, float] = (math.inf, 0.0)
    _decode: Callable[[int], tuple[float, float]] = field(init=False)

    def __post_init__(self) -> None:
        self._decode = functools.cache(self.costs.decode)

    # ------------------------------------------------------------ time

    def advance(self, now: float) -> None:
        """Let decoding and prefill go on until `now`."""
        elapsed = now - self.now
        self.now = now
        if self.paused or elapsed <= 0:
            return
        counters = self.counters
        counters.slot_seconds += elapsed * len(self.running)
        if self._full and self._waiting:
            counters.full_seconds += elapsed
        prefill = min(self.stall, elapsed)
        self.stall -= prefill
        elapsed -= prefill
        counters.busy_seconds += prefill
        if not self.running:
            return
        when, target = self._target
        steps = target - self.steps if now == when else self._steps_in(elapsed)
        self.steps += steps
        grown = len(self.running) * steps
        self.kv += grown
        counters.generated += grown
        counters.busy_seconds += elapsed

    def _steps_in(self, seconds: float) -> float:
        """Positive root of n (fixed + per_kv kv) + per_kv batch n^2 / 2 = seconds."""
        batch = len(self.running)
        fixed, per_kv = self._decode(batch)
        first = fixed + per_kv * self.kv
        return 2 * seconds / (first + math.sqrt(first**2 + 2 * per_kv * batch * seconds))

    def forecast(self) -> float | None:
        """Return the time of the next event here: a completion, a full cache, a report."""
        self.stamp += 1
        self._target = (math.inf, 0.0)
        batch = len(self.running)
        if self.paused or not batch:
            return None
        self._forget_gone()
        full_in = max(0.0, self.costs.kv_capacity_tokens - self.kv) / batch
        target = min(self._finishing[0][0], self._next_report, self.steps + full_in)
        steps = max(0.0, target - self.steps)
        fixed, per_kv = self._decode(batch)
        seconds = steps * (fixed + per_kv * self.kv) + per_kv * batch * steps**2 / 2
        when = self.now + self.stall + seconds
        self._target = (when, self.steps + steps)
        return when

    # ------------------------------------------------------------ what happens by itself

    def completed(self) -> list[SimulatedRequest]:
        """Requests that are complete now; they leave."""
        done = []
        if self._cached:
            self._evict()  # now most of the cache is taken
        while self._finishing and self._finishing[0][0] <= self.steps + _CLOSE:
            _, trajectory_id = heapq.heappop(self._finishing)
            request = self.running.get(trajectory_id)
            if request is not None and request.finish_at <= self.steps + _CLOSE:
                self._leave(request)
                done.append(request)
        return done

    def keep(self, request: SimulatedRequest) -> None:
        """A turn has ended: what it leaves in the cache."""
        request.end_stint()
        self._cached[request.trajectory_id] = request.before
        self._evict()

    def _evict(self) -> None:
        room = self.costs.kv_capacity_tokens - self.kv
        held = sum(self._cached.values())
        while self._cached and held > room:
            held -= self._cached.popitem(last=False)[1]

    def report_due(self) -> bool:
        """Return whether running requests report their tokens now; once a chunk at most."""
        if self.steps + _CLOSE < self._next_report:
            return False
        self._next_report = self.steps + self.settings.chunk_tokens
        return True

    def preempt(self) -> list[tuple[SimulatedRequest, Tokens]]:
        """Make room when the cache is full: the newest requests go back to the queue."""
        capacity = self.costs.kv_capacity_tokens
        if self.kv < capacity - _CLOSE * max(1, len(self.running)):
            return []
        out = []
        while len(self.running) > 1:
            if self.kv <= capacity - self.settings.retract_steps * len(self.running):
                break
            request = next(reversed(self.running.values()))
            written = self.take_tokens(request)
            self._leave(request)
            request.end_stint()
            request.was_preempted = True
            self._waiting[request.trajectory_id] = request
            self._waiting.move_to_end(request.trajectory_id, last=False)
            self.counters.preemptions += 1
            out.append((request, written))
        return out

    def take_tokens(self, request: SimulatedRequest) -> Tokens:
        """Tokens since the last report, by version; the request has them as `written` from now."""
        joined, first = request.joined, request.reported
        generated = int(self.steps - joined + _CLOSE)
        if generated > request.remaining:
            generated = request.remaining
        if generated <= first:
            return []
        request.reported = generated
        began, version = self._switches[-1]
        if began - joined + _CLOSE < first + 1:
            tokens = [(version, generated - first)]  # nearly always: one version since then
        else:
            tokens = self._by_version(request, first, generated)
        request.write(tokens)
        return tokens

    def _by_version(self, request: SimulatedRequest, first: int, end: int) -> Tokens:
        """Tokens `first` to `end` of this stint."""
        out: Tokens = []
        for began, version in reversed(self._switches):
            start = max(first, self._tokens_at(request, began))
            if start < end:
                out.append((version, end - start))
                end = start
            if start == first:
                break
        out.reverse()
        return out

    def _tokens_at(self, request: SimulatedRequest, steps: float) -> int:
        done = int(steps - request.joined + _CLOSE)
        if done >= request.remaining:
            return request.remaining
        return done if done > 0 else 0

    # ------------------------------------------------------------ what is done to it

    def submit(self, request: SimulatedRequest) -> None:
        """Queue a request; `admit` lets it in."""
        request.was_preempted = False
        self._waiting[request.trajectory_id] = request

    def cancel(self, trajectory_ids: Iterable[int]) -> list[tuple[int, Tokens]]:
        """Take requests out, each with the tokens not reported yet; without those not here."""
        running, waiting = self.running, self._waiting
        out: list[tuple[int, Tokens]] = []
        gone = []
        for trajectory_id in trajectory_ids:
            request = running.pop(trajectory_id, None)
            if request is not None:
                out.append((trajectory_id, self.take_tokens(request)))
                gone.append(request)
            elif waiting.pop(trajectory_id, None) is not None:
                out.append((trajectory_id, []))
        self._free(gone)
        for request in gone:
            request.end_stint()
        return out

    def admit(self) -> None:
        """Let waiting requests in as far as KV and slots go."""
        if self.paused or not self._waiting:
            return
        settings, capacity = self.settings, self.costs.kv_capacity_tokens
        waiting, running, groups = self._waiting, self.running, self._groups
        # No less than a preemption frees, or what was preempted would come straight back.
        reserve = max(settings.admission_reserve_tokens, settings.retract_steps)
        most = self.max_running or math.inf
        if not running:
            self._next_report = max(self._next_report, self.steps + settings.chunk_tokens)
        if self._cached:
            self._evict()
        entered = []
        for count, request in enumerate(waiting.values(), start=len(running) + 1):
            needed = request.before
            if (request.group_id, self.prefixes) not in groups:
                needed += request.prompt
            full = self.kv + needed + reserve * count > capacity
            if count > 1 and (full or count > most):
                self._full = full
                break
            self._enter(request, needed)
            entered.append(request)
        for request in entered:
            del waiting[request.trajectory_id]
            running[request.trajectory_id] = request

    def _enter(self, request: SimulatedRequest, needed: int) -> None:
        """Prefill what is not cached of the `needed` tokens of a request, which decodes then."""
        shared, before = (request.group_id, self.prefixes), request.before
        groups, counters = self._groups, self.counters
        groups[shared] = groups.get(shared, 0) + 1
        request.prefixes = self.prefixes
        self.kv += needed
        if self._cached and (cached := self._cached.pop(request.trajectory_id, 0)):
            needed = before - cached  # the prompt is cached with it
        pairs = needed * (before + request.prompt - needed / 2)
        self.stall += self.costs.prefill(needed, pairs)
        counters.prefilled += needed
        if request.was_preempted:
            counters.preempted_prefill += needed
        elif before > request.unseen:
            counters.resumed_prefill += needed - request.unseen
        request.unseen = 0
        request.joined = self.steps
        request.finish_at = finish_at = self.steps + request.remaining
        request.reported = 0
        heapq.heappush(self._finishing, (finish_at, request.trajectory_id))

    def _leave(self, request: SimulatedRequest) -> None:
        del self.running[request.trajectory_id]
        self._free((request,))

    def _free(self, gone: Iterable[SimulatedRequest]) -> None:
        """The KV of requests that ran, and of prompts that no other member of a group runs with."""
        groups = self._groups
        if not self.running:
            self.kv = 0.0  # no rounding error survives an idle moment
            groups.clear()
            self._finishing.clear()
            return
        for request in gone:
            done = self.steps - request.joined
            self.kv -= request.before + (done if done < request.remaining else request.remaining)
            shared = (request.group_id, request.prefixes)
            left = groups[shared] - 1
            if left:
                groups[shared] = left
            else:
                del groups[shared]
                self.kv -= request.prompt

    def _forget_gone(self) -> None:
        finishing = self._finishing
        while True:
            at, trajectory_id = finishing[0]
            request = self.running.get(trajectory_id)
            if request is not None and request.finish_at == at:
                return
            heapq.heappop(finishing)

    def pause(self, *, recompute: bool) -> None:
        """Stop for a weight transfer; `recompute`: the KV of running requests is given up."""
        self.paused = True
        self._keeps = not recompute
        if not recompute or not self.running:
            return
        tokens, pairs = 0, 0.0
        for request in self.running.values():
            context = request.prompt + request.before + self._tokens_at(request, self.steps)
            tokens += context
            pairs += context * context / 2
        self.stall += self.costs.prefill(tokens, pairs)
        self.counters.prefilled += tokens
        self.counters.updated_prefill += tokens

    def resume(self) -> None:
        """Generation goes on."""
        self.paused = False

    def load(self, version: int) -> None:
        """Other weights from now on."""
        if self._keeps:
            self.prefixes += 1
        self._cached.clear()
        self._switches.append((self.steps, version))
