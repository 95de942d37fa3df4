"""Models an inference engine as a decode batch that advances from event to event.

All running requests advance together. `steps` counts decode steps as a real number. The time from a
request's admission to the batch to its exit is called a stint. A request whose stint started at
step j has generated floor(steps - j) tokens in it. One decode step takes fixed + per_kv * kv
seconds, where kv is the number of tokens in the KV cache. Each step adds one token for each of the
`batch` requests, so as long as the batch does not change, n steps take

    n * (fixed + per_kv * kv) + per_kv * batch * n^2 / 2

seconds (the sum over steps, as an integral). The model solves this equation for n or for the time.

Invariants
- Time only moves forward, and only through `advance`; everything else happens at the current time.
- The KV cache never exceeds its capacity. When it is full, the newest requests are preempted: they
  go to the head of the queue, lose their KV, and are prefilled again when there is space.
- A request that is removed loses the fraction of a token that it was generating, but no whole
  token.
- While the engine prefills, it does not decode. Requests that enter the batch before a prefill pass
  starts are prefilled in this pass, up to `simulate.prefill_pass_tokens` tokens; a request may be
  split between passes. If a running request of the same group has the
  prompt in the cache, the prompt is neither prefilled nor counted again. The exception is a prompt
  that older weights have computed: after a weight update that keeps the cache, new requests do not
  reuse KV that was computed before the update.
- A token belongs to the version that the engine served when its decode step ended.
- The context of an episode's turn stays in the cache until the weights change or running requests
  need the space; the least recently used context is evicted first. The next turn prefills only
  tokens that are not in the cache.
"""

import functools
import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from megatron_async.config.simulate import SimulateConfig
from megatron_async.simulate.engine_costs import EngineCosts

_TOLERANCE = 1e-6
"""Tolerance of comparisons of numbers of decode steps. It is far below one token and far above
rounding errors."""

Tokens = list[tuple[int, int]]
"""Pairs (policy number, number of tokens) of consecutive spans of tokens, the oldest first."""


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """Data that an engine has about a trajectory. The trajectory is running on an engine, queued on
    an engine, or waits to be submitted to an engine.

    A stint is the time from its admission to an engine's batch to its exit from the batch.

    Attributes:
        trajectory_id: Id of the trajectory.
        group_id: Id of its group, whose members share a prompt.
        prompt: Number of prompt tokens.
        before: Number of tokens after the prompt that were generated in earlier stints; for an
            episode, including the environment's tokens.
        remaining: Number of tokens that this stint has to generate.
        was_preempted: Whether the engine preempted the request since its submission.
        joined: Value of the engine's `steps` at which the stint started.
        finish_at: Value of the engine's `steps` at which the response, or the turn, is complete.
        reported: Number of tokens of this stint that were taken with `Engine.take_tokens`.
        prefixes: Value of `Engine.prefixes` at admission. Only requests of the group with the same
            value share the KV of the prompt.
        unseen: Number of the environment's tokens in `before` that no engine has prefilled yet.
        written: All taken tokens by policy version.
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
        """Number of tokens after the prompt that are known so far: those of `before`, and those
        taken in this stint."""
        return self.before + self.reported

    def write(self, tokens: Tokens) -> None:
        """Append newly taken tokens to `written`. If they continue the policy version of the last
        span, extend the span."""
        written = self.written
        version, count = tokens[0]
        if written and written[-1][0] == version:
            written[-1] = (version, written[-1][1] + count)
            written += tokens[1:]
        else:
            written += tokens

    def end_stint(self) -> None:
        """End the request's current stay in an engine's batch (stint): add the tokens taken in it
        to `before`, and subtract them from `remaining`."""
        self.before += self.reported
        self.remaining -= self.reported
        self.reported = 0


@dataclass(slots=True)
class EngineCounters:
    """Totals of one engine since the start of the simulation.

    Attributes:
        busy_seconds: Seconds of decoding or prefilling.
        full_seconds: Seconds in which at least one request waited for space in the KV cache.
        slot_seconds: Sum over all requests of the seconds for which they were in the batch.
        generated: Number of generated tokens, with fractions.
        prefilled: Number of prefilled tokens.
        resumed_prefill: Tokens that were prefilled again because a response was resumed.
        preempted_prefill: Tokens that were prefilled again because a request was preempted.
        updated_prefill: Tokens that were prefilled again because a weight update discarded the KV
            cache.
        preemptions: Number of preempted requests.
    """

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
    """Simulated inference engine: its queue, its running requests, its KV cache and its clock.

    Attributes:
        engine_id: Id of the engine.
        costs: Cost model of decoding and prefill.
        settings: Settings of the simulation, with the rules of admission and preemption.
        max_running: Maximum number of running requests; None for no maximum.
        now: Virtual time in seconds up to which the engine was advanced.
        steps: Number of decode steps so far, with fractions.
        kv: Number of tokens of running requests in the KV cache.
        stall: Seconds of prefill that are still to be done before decoding continues.
        paused: Whether the engine is paused for a weight update.
        stamp: Number of the newest forecast. Events of earlier forecasts must be ignored.
        prefixes: Number of weight updates that kept the KV cache. Requests share the KV of a prompt
            only with requests that were admitted after the same update.
        running: Running requests by trajectory id, the oldest first.
        counters: Totals for the statistics.
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
    _cache_kept: bool = False
    _full: bool = False
    _pass: tuple[int, float, float] = (0, 0.0, 0.0)
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
        """Advance prefill and decoding of the running requests to the virtual time `now`."""
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
        """Return the number of decode steps that the current batch does in `seconds`.

        This is the positive root n of n * (fixed + per_kv * kv) + per_kv * batch * n^2 / 2 =
        seconds (see the module's docstring).
        """
        batch = len(self.running)
        fixed, per_kv = self._decode(batch)
        first = fixed + per_kv * self.kv
        return 2 * seconds / (first + math.sqrt(first**2 + 2 * per_kv * batch * seconds))

    def forecast(self) -> float | None:
        """Return the virtual time of this engine's next event (a completed request, a full KV cache
        or a token report); None if the engine is paused or runs no request.

        Each call changes `stamp`, by which the caller recognizes events of earlier forecasts and
        ignores them.
        """
        self.stamp += 1
        self._target = (math.inf, 0.0)
        batch = len(self.running)
        if self.paused or not batch:
            return None
        self._discard_stale_completions()
        full_in = max(0.0, self.costs.kv_capacity_tokens - self.kv) / batch
        target = min(self._finishing[0][0], self._next_report, self.steps + full_in)
        steps = max(0.0, target - self.steps)
        fixed, per_kv = self._decode(batch)
        seconds = steps * (fixed + per_kv * self.kv) + per_kv * batch * steps**2 / 2
        when = self.now + self.stall + seconds
        self._target = (when, self.steps + steps)
        return when

    # ------------------------------------------------------------ effects of time

    def completed(self) -> list[SimulatedRequest]:
        """Remove the requests that have generated all their tokens by now from the batch, and
        return them."""
        done = []
        if self._cached:
            # The KV of running requests is largest now, right before completed requests free
            # theirs. So kept contexts of episodes have to be evicted now if the space is needed.
            self._evict()
        while self._finishing and self._finishing[0][0] <= self.steps + _TOLERANCE:
            _, trajectory_id = heapq.heappop(self._finishing)
            request = self.running.get(trajectory_id)
            if request is not None and request.finish_at <= self.steps + _TOLERANCE:
                self._remove_running(request)
                done.append(request)
        return done

    def cache_turn(self, request: SimulatedRequest) -> None:
        """Record that a turn of an episode is complete: end the request's stint, and keep its
        context in the KV cache as long as running requests do not need the space."""
        request.end_stint()
        self._cached[request.trajectory_id] = request.before
        self._evict()

    def _evict(self) -> None:
        free = self.costs.kv_capacity_tokens - self.kv
        cached = sum(self._cached.values())
        while self._cached and cached > free:
            cached -= self._cached.popitem(last=False)[1]

    def report_due(self) -> bool:
        """Return whether running requests report their new tokens now, which happens every
        `simulate.chunk_tokens` decode steps; if so, schedule the next report."""
        if self.steps + _TOLERANCE < self._next_report:
            return False
        self._next_report = self.steps + self.settings.chunk_tokens
        return True

    def preempt(self) -> list[tuple[SimulatedRequest, Tokens]]:
        """If the KV cache is full, move the newest running requests back to the head of the queue
        until the others can decode for `simulate.retract_steps` steps.

        At least one request keeps running.

        Returns:
            The preempted requests, each with its tokens that were not taken yet.
        """
        capacity = self.costs.kv_capacity_tokens
        if self.kv < capacity - _TOLERANCE * max(1, len(self.running)):
            return []
        out = []
        while len(self.running) > 1:
            if self.kv <= capacity - self.settings.retract_steps * len(self.running):
                break
            request = next(reversed(self.running.values()))
            written = self.take_tokens(request)
            self._remove_running(request)
            request.end_stint()
            request.was_preempted = True
            self._waiting[request.trajectory_id] = request
            self._waiting.move_to_end(request.trajectory_id, last=False)
            self.counters.preemptions += 1
            out.append((request, written))
        return out

    def take_tokens(self, request: SimulatedRequest) -> Tokens:
        """Return the tokens that a running request has generated since the last call, by policy
        version, and append them to `request.written`."""
        joined, first = request.joined, request.reported
        generated = int(self.steps - joined + _TOLERANCE)
        if generated > request.remaining:
            generated = request.remaining
        if generated <= first:
            return []
        request.reported = generated
        switched_at, version = self._switches[-1]
        if switched_at - joined + _TOLERANCE < first + 1:
            # The usual case: all new tokens are of one version.
            tokens = [(version, generated - first)]
        else:
            tokens = self._by_version(request, first, generated)
        request.write(tokens)
        return tokens

    def _by_version(self, request: SimulatedRequest, first: int, end: int) -> Tokens:
        """Return the tokens `first` to `end` of the request's current stint, grouped by the policy
        version that generated them."""
        out: Tokens = []
        for switched_at, version in reversed(self._switches):
            start = max(first, self._tokens_at(request, switched_at))
            if start < end:
                out.append((version, end - start))
                end = start
            if start == first:
                break
        out.reverse()
        return out

    def _tokens_at(self, request: SimulatedRequest, steps: float) -> int:
        done = int(steps - request.joined + _TOLERANCE)
        if done >= request.remaining:
            return request.remaining
        return done if done > 0 else 0

    # ------------------------------------------------------------ commands

    def submit(self, request: SimulatedRequest) -> None:
        """Append a request to the engine's queue; `admit` starts queued requests."""
        request.was_preempted = False
        self._waiting[request.trajectory_id] = request

    def cancel(self, trajectory_ids: Iterable[int]) -> list[tuple[int, Tokens]]:
        """Remove requests from the batch or the queue of this engine; skip trajectories that the
        engine does not have.

        Returns:
            The id of each removed trajectory with its tokens that were not taken yet.
        """
        running, waiting = self.running, self._waiting
        out: list[tuple[int, Tokens]] = []
        removed = []
        for trajectory_id in trajectory_ids:
            request = running.pop(trajectory_id, None)
            if request is not None:
                out.append((trajectory_id, self.take_tokens(request)))
                removed.append(request)
            elif waiting.pop(trajectory_id, None) is not None:
                out.append((trajectory_id, []))
        self._free(removed)
        for request in removed:
            request.end_stint()
        return out

    def admit(self) -> None:
        """Start queued requests in order, until the KV cache has no space for the next one or the
        maximum number of running requests is reached.

        An engine without running requests always starts its first queued request.
        """
        if self.paused or not self._waiting:
            return
        settings, capacity = self.settings, self.costs.kv_capacity_tokens
        waiting, running, groups = self._waiting, self.running, self._groups
        # The reserve is at least what a preemption frees. Otherwise preempted requests would be
        # admitted again at once.
        reserve = max(settings.admission_reserve_tokens, settings.retract_steps)
        limit = self.max_running or math.inf
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
            if count > 1 and (full or count > limit):
                self._full = full
                break
            self._enter(request, needed)
            entered.append(request)
        for request in entered:
            del waiting[request.trajectory_id]
            running[request.trajectory_id] = request

    def _enter(self, request: SimulatedRequest, needed: int) -> None:
        """Add a request to the decode batch and its tokens to the KV cache; add the time of the
        request and of its prefill to the engine's `stall`.

        The prefill computes `needed` tokens. Only if the KV cache still has the context of an
        earlier turn of the same episode, the prefill computes just the tokens after this context.

        Args:
            request: The request; `admit` adds it to `running`.
            needed: Number of the request's tokens after the prompt, plus the tokens of the prompt
                unless a running request of the same group shares the KV of the prompt.
        """
        shared, before = (request.group_id, self.prefixes), request.before
        groups, counters = self._groups, self.counters
        groups[shared] = groups.get(shared, 0) + 1
        request.prefixes = self.prefixes
        self.kv += needed
        if self._cached and (cached := self._cached.pop(request.trajectory_id, 0)):
            # The engine still has the context of this episode's earlier turn in its KV cache: the
            # prompt and `cached` tokens after it. `before` counts tokens after the prompt too, so
            # only the difference is prefilled, whether or not `needed` included the prompt.
            needed = before - cached
        self.stall += self.costs.request_seconds
        self._add_prefill(needed, needed * (before + request.prompt - needed / 2))
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

    def _add_prefill(self, tokens: int, pairs: float) -> None:
        """Add tokens to the last prefill pass if it has not started, and then to new passes; add
        the seconds of these passes to `stall`.

        At least one token of each request is computed, even if its whole prompt is in the cache.

        Args:
            tokens: Number of tokens to prefill.
            pairs: Sum over the tokens of the number of keys that each attends to.
        """
        budget = self.settings.prefill_pass_tokens
        tokens = max(1, tokens)
        pairs_per_token = pairs / tokens
        while tokens:
            in_pass, pairs_in_pass, seconds = self._pass
            if in_pass >= budget or self.stall < seconds * (1 - _TOLERANCE):
                in_pass, pairs_in_pass, seconds = 0, 0.0, 0.0
            added = min(tokens, budget - in_pass)
            in_pass, pairs_in_pass = in_pass + added, pairs_in_pass + added * pairs_per_token
            longer = self.costs.prefill(in_pass, pairs_in_pass)
            self.stall += longer - seconds
            self._pass = (in_pass, pairs_in_pass, longer)
            tokens -= added

    def _remove_running(self, request: SimulatedRequest) -> None:
        del self.running[request.trajectory_id]
        self._free((request,))

    def _free(self, removed: Iterable[SimulatedRequest]) -> None:
        """Free the KV of requests that were removed from `running`, and the KV of prompts that no
        other running request shares."""
        groups = self._groups
        if not self.running:
            # An idle engine has no KV. Setting 0 discards the sum of rounding errors.
            self.kv = 0.0
            groups.clear()
            self._finishing.clear()
            return
        for request in removed:
            done = self.steps - request.joined
            self.kv -= request.before + (done if done < request.remaining else request.remaining)
            shared = (request.group_id, request.prefixes)
            remaining = groups[shared] - 1
            if remaining:
                groups[shared] = remaining
            else:
                del groups[shared]
                self.kv -= request.prompt

    def _discard_stale_completions(self) -> None:
        finishing = self._finishing
        while True:
            at, trajectory_id = finishing[0]
            request = self.running.get(trajectory_id)
            if request is not None and request.finish_at == at:
                return
            heapq.heappop(finishing)

    def pause(self, *, recompute: bool) -> None:
        """Pause the engine for a weight update.

        Args:
            recompute: Whether running requests lose their KV, which the engine then prefills again
                before it continues decoding.
        """
        self.paused = True
        self._cache_kept = not recompute
        if not recompute or not self.running:
            return
        tokens, pairs = 0, 0.0
        for request in self.running.values():
            context = request.prompt + request.before + self._tokens_at(request, self.steps)
            tokens += context
            pairs += context * context / 2
        self._add_prefill(tokens, pairs)
        self.counters.prefilled += tokens
        self.counters.updated_prefill += tokens

    def resume(self) -> None:
        """Continue generation after a weight update."""
        self.paused = False

    def load(self, version: int) -> None:
        """Serve policy version `version` from now on, and remove the contexts of episodes from the
        KV cache, which older weights have computed."""
        if self._cache_kept:
            self.prefixes += 1
        self._cached.clear()
        self._switches.append((self.steps, version))
