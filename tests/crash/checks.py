"""The promises of store, lag bound and fleet, checked on evidence. Pure.

Invariants
- A check returns one sentence for each trajectory, step or token run that breaks its promise; none
  when it is kept. What a check counts on, another one checks.
- The surviving lineage is worked out from the trainer's own account, not from the store.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, takewhile
from typing import NamedTuple

from megatron_async.engines.simulated.engine import SimulatedEngineModel
from megatron_async.trajectory.types import PolicyVersion
from tests.crash import episodes as episodes
from tests.crash.evidence import CONSUMED, Attach, Batch, Evidence, Kept, Launch, Request
from tests.crash.faults import KINDS, excused

DONE = ("finished", "scored", CONSUMED, "dropped")


@dataclass(frozen=True)
class Rules:
    """What the run was set to: the store's chunk, the lag bound (None: no bound), what ends a
    response, and the model of simulated engines.

    `by_version`: what they generate follows from the version that they hold, too (`weights_of`).
    `reward_of`: the reward of a response; None where that is not known.
    """

    chunk_tokens: int
    max_async_level: int | None
    stop_token_id: int
    max_new_tokens: int
    simulated: SimulatedEngineModel | None = None
    by_version: bool = False
    reward_of: Callable[[tuple[int, ...]], float] | None = None


def weights_of(model: SimulatedEngineModel, version: PolicyVersion) -> SimulatedEngineModel:
    """The model that a simulated engine is once it holds this version, where that matters."""
    return replace(model, seed=zlib.crc32(f"{model.seed} {version}".encode()))


Check = Callable[[Evidence, Rules], list[str]]


# ------------------------------------------------------------ the surviving lineage


def branches(attaches: list[Attach]) -> dict[int, Attach]:
    """Lineage -> how it began; a second attach of one goes on with it (its manager was lost)."""
    begun: dict[int, Attach] = {}
    for attach in attaches:
        begun.setdefault(attach.lineage, attach)
    return begun


def surviving_path(attaches: list[Attach]) -> dict[int, int | None]:
    """Lineage -> the step at which the surviving lineage leaves it (None: the newest itself)."""
    begun = branches(attaches)
    path: dict[int, int | None] = {}
    here: int | None = max(begun, default=None)
    limit: int | None = None
    while here is not None:
        path[here] = limit
        limit = begun[here].step if limit is None else min(limit, begun[here].step)
        here = begun[here].parent
    return path


def surviving_batches(evidence: Evidence) -> list[Batch]:
    """Batches that the trainer took along the surviving lineage, in the order of taking."""
    path = surviving_path(evidence.attaches)
    found = []
    for batch in evidence.batches:
        limit = path.get(batch.lineage, -1)
        if limit is None or batch.step < limit:
            found.append(batch)
    return found


def part_step(attaches: list[Attach], lineage: int, other: int) -> int | None:
    """The step n0 at which `lineage` parts from `other`; None when it does not."""
    begun = branches(attaches)

    def ancestry(lineage: int) -> list[int]:
        chain, here = [], int(lineage)
        while True:
            chain.append(here)
            parent = begun[here].parent
            if parent is None:
                return chain
            here = parent

    mine, theirs = ancestry(other), ancestry(lineage)
    common = next((one for one in theirs if one in mine), None)
    if common is None:
        return 0
    leaving = [begun[one].step for chain in (mine, theirs) for one in chain[: chain.index(common)]]
    return min(leaving, default=None)


# ------------------------------------------------------------ the promises


def finished_and_lost(evidence: Evidence, rules: Rules) -> list[str]:
    """What was ever seen finished is still there, as it was; nothing has vanished or is doubled."""
    wrong = []
    for trajectory_id in range(evidence.trajectories):
        copies = len(evidence.kept.get(trajectory_id, ()))
        if copies != 1:
            wrong.append(f"trajectory {trajectory_id} is kept {copies} times")
    reported: set[int] = set()
    for seen in evidence.looks:
        for trajectory_id, then in seen.items():
            if then.state not in DONE or trajectory_id in reported:
                continue
            problem = _changed(evidence.kept.get(trajectory_id, []), then.tokens, then.reward)
            if problem:
                reported.add(trajectory_id)
                wrong.append(f"trajectory {trajectory_id} was {then.state} and {problem}")
    return wrong


def _changed(copies: list[Kept], tokens: int, reward: float | None) -> str:
    if not copies:
        return "is gone"
    now = copies[0]
    if now.state not in DONE:
        return f"is {now.state} now"
    if now.opening + len(now.tokens) != tokens:
        return f"had {tokens} tokens, now {now.opening + len(now.tokens)}"
    if reward is not None and now.reward != reward:
        return f"had reward {reward}, now {now.reward}"
    return ""


def trained_twice(evidence: Evidence, rules: Rules) -> list[str]:
    """Along the surviving lineage no trajectory is in two batches, and no step has two."""
    batches = surviving_batches(evidence)
    uses = Counter(i for batch in batches for i in batch.ids)
    steps = Counter(batch.step for batch in batches)
    return [f"trajectory {i} was trained {n} times" for i, n in uses.items() if n > 1] + [
        f"step {step} was trained {n} times" for step, n in steps.items() if n > 1
    ]


def steps_missing(evidence: Evidence, rules: Rules) -> list[str]:
    """Every step has its batch, up to the newest checkpoint, that of the newest lineage."""
    steps = {batch.step for batch in surviving_batches(evidence)}
    end = max(steps, default=-1) + 1
    wrong = [f"step {step} has no batch" for step in range(end) if step not in steps]
    newest = max((attach.lineage for attach in evidence.attaches), default=None)
    if evidence.newest_checkpoint != (newest, end):
        wrong.append(
            f"the newest checkpoint is {evidence.newest_checkpoint}, the trainer ended at "
            f"step {end} of lineage {newest}"
        )
    return wrong


def store_disagrees(evidence: Evidence, rules: Rules) -> list[str]:
    """The store counts as consumed exactly what was trained, and where it was."""
    trained = {
        i: (batch.lineage, batch.step)
        for batch in surviving_batches(evidence)
        if (batch.lineage, batch.step) not in evidence.dropped_batches
        for i in batch.ids
    }
    wrong = []
    for one in _every(evidence):
        if one.consumed != trained.get(one.trajectory_id):
            wrong.append(
                f"trajectory {one.trajectory_id}: the store has it consumed by {one.consumed}, the "
                f"trainer has {trained.get(one.trajectory_id)}"
            )
        if one.state == "dropped" and not one.drop_reason:
            wrong.append(f"trajectory {one.trajectory_id} was dropped for no reason")
    return wrong


class Loss(NamedTuple):
    """Tokens of a trajectory that had arrived and were lost; `place`: in the arrivals.

    `largest` is the largest append before. `anew`: the episode began again under another name.
    """

    trajectory_id: int
    place: int
    tokens: int
    largest: int
    anew: bool = False


def tokens_lost(evidence: Evidence) -> Iterator[Loss]:
    """Every loss. A request begins where the store's tokens ended: what had arrived beyond is lost.

    All requests of an episode begin with the input of its first one, which has its name.
    """
    for trajectory_id, requests in evidence.requests.items():
        had, largest, opening = 0, 0, requests[0].input
        for request in requests:
            anew = request.input[: len(opening)] != opening
            if anew or request.start < had:
                yield Loss(trajectory_id, request.offset, had - request.start, largest, anew)
            opening = request.input if anew else opening
            had, largest = request.end, max(largest, request.largest_chunk)
        kept = evidence.kept.get(trajectory_id, [])
        if kept and kept[0].state != "dropped":
            now = len(kept[0].prompt) + len(kept[0].tokens)
            anew = kept[0].prompt[: len(opening)] != opening
            if anew or now < had:
                yield Loss(trajectory_id, 1 << 62, had - now, largest, anew)


def more_than_a_chunk_lost(evidence: Evidence, rules: Rules) -> list[str]:
    """An interruption takes at most the chunk that was being filled: see docs/store.md.

    A fault that costs an episode explains one that began anew, and nothing else does.
    """
    losses = sorted(tokens_lost(evidence), key=lambda loss: loss.place)
    anew = [loss for loss in losses if loss.anew]
    unexplained = anew[sum(KINDS[one.kind].anew for one in evidence.injected) :]
    return [
        f"trajectory {loss.trajectory_id} lost {loss.tokens} tokens at once"
        for loss in losses
        if not loss.anew and loss.tokens > rules.chunk_tokens - 1 + loss.largest
    ] + [
        f"trajectory {loss.trajectory_id} began anew after {loss.tokens} tokens without a fault"
        for loss in unexplained
    ]


def wrong_tokens(evidence: Evidence, rules: Rules) -> list[str]:
    """Kept tokens arrived in their place, each run of them in one stream; those are trained."""
    wrong = []
    scorers_failed = any(KINDS[one.kind].edge == "scorer" for one in evidence.injected)
    for one in _every(evidence):
        arrived: dict[int, set[int]] = {}
        requests = evidence.requests.get(one.trajectory_id, [])
        for request in requests:
            for place, token in enumerate(request.ids, request.start):
                arrived.setdefault(place, set()).add(token)
        first = len(one.prompt)
        places = enumerate(one.tokens, first)
        own = [(p, t) for p, t in places if one.is_own(p - first)]
        bad = [p for p, t in own if t not in arrived.get(p, ())]
        if bad:
            wrong.append(f"trajectory {one.trajectory_id}: token {bad[0] - first} never arrived")
        elif (whole := _in_whole_streams(one, requests)) < len(one.tokens):
            wrong.append(
                f"trajectory {one.trajectory_id}: token {whole} is of another stream than those "
                "before it, or of none that began there"
            )
        elif rules.simulated is not None and not _is_continuation(one, rules):
            wrong.append(
                f"trajectory {one.trajectory_id} is not the engine's response to its prompt"
            )
        right = one.reward if rules.reward_of is None else rules.reward_of(one.tokens)
        if one.reward not in (None, right) and not (one.reward == 0.0 and scorers_failed):
            wrong.append(f"trajectory {one.trajectory_id} has another response's reward")
    for batch in surviving_batches(evidence):
        for trajectory_id, response in zip(batch.ids, batch.responses, strict=True):
            copies = evidence.kept.get(trajectory_id, [])
            if copies and copies[0].tokens != response:
                wrong.append(f"trajectory {trajectory_id} was trained with other tokens")
    return wrong


def _in_whole_streams(one: Kept, requests: list[Request]) -> int:
    """How many of its tokens are beginnings of requests' streams, one after the other in time.

    A request asks for what follows the tokens that the store has: its own begin there, and those of
    an earlier one come no more. A request of which everything was lost counts nothing.
    """
    first, last = len(one.prompt), len(one.prompt) + len(one.tokens)
    ends = {first}

    def over_observations() -> None:
        for place in sorted(ends):
            while place < last and not one.is_own(place - first):
                place += 1
                ends.add(place)

    for request in requests:
        over_observations()
        if request.start in ends:
            places = zip(one.tokens[request.start - first :], request.ids, strict=False)
            same = takewhile(lambda pair: pair[0] == pair[1], places)
            ends.update(place + 1 for place, _ in enumerate(same, request.start))
    over_observations()
    return max(ends) - first


def _is_continuation(one: Kept, rules: Rules) -> bool:
    """Return whether the simulated engine generates these tokens after those before them."""
    base = rules.simulated
    assert base is not None
    models = {v: weights_of(base, v) if rules.by_version else base for v in one.own_versions}
    stop, ended, first = rules.stop_token_id, False, len(one.prompt)
    previous = one.prompt[-1] if one.prompt else 0
    places = zip(one.tokens, one.versions, strict=True)
    for place, (token, version) in enumerate(places, first):
        if not one.is_own(place - first):
            previous, ended = token, False
            continue
        model = models[version]
        stops = model.stops(previous, place)
        expected = stop if stops else model.next_token(previous, place, (stop,))
        if ended or token != expected:
            return False
        previous, ended = token, stops
    return True


def wrong_end(evidence: Evidence, rules: Rules) -> list[str]:
    """A response ends where its engine ended it: nothing follows, and nothing is scored before.

    An engine's word that came just before a kill may be lost with the tokens that it came with;
    then the next request begins before that end. One that begins at it asks for what follows.
    """
    wrong = []
    # Also those that are to begin anew, which have no opening.
    has_episodes = any(one.opening for one in _every(evidence))
    for one in _every(evidence):
        answers = _answers(one)
        after = sum(_after_stop(answer, rules) for answer in answers)
        if after:
            wrong.append(f"trajectory {one.trajectory_id} has {after} tokens after a stop token")
        scored = one.state in DONE and one.state != "dropped"
        # All answers but the last have had a reply.
        asked = answers if scored else answers[:-1]
        if not after and not all(_is_whole(answer, rules) for answer in asked):
            wrong.append(
                f"trajectory {one.trajectory_id} is {one.state} after {len(one.tokens)} tokens "
                "without a stop token"
            )
    for batch in evidence.batches:
        for trajectory_id, response in zip(batch.ids, batch.responses, strict=True):
            if has_episodes:
                continue  # what is trained is what is kept (`wrong_tokens`)
            after = _after_stop(response, rules)
            if after:
                wrong.append(
                    f"trajectory {trajectory_id} was trained at {batch.lineage}.{batch.step} with "
                    f"{after} tokens after a stop token"
                )
    for trajectory_id, requests in evidence.requests.items():
        for request, following in pairwise(requests):
            again = following.start >= request.end
            if has_episodes:
                again = following.start == request.end  # else an observation is between
            if request.noted_end in ("stop", "length") and again:
                wrong.append(
                    f"trajectory {trajectory_id} was sent to an engine again after its end "
                    f"({request.noted_end})"
                )
    return wrong


def _answers(one: Kept) -> list[tuple[int, ...]]:
    """Each unbroken run of the policy's own tokens."""
    if not one.own:
        return [one.tokens]
    together = groupby(zip(one.tokens, one.own, strict=True), key=lambda pair: pair[1])
    return [tuple(token for token, _ in run) for own, run in together if own]


def _after_stop(tokens: tuple[int, ...], rules: Rules) -> int:
    """How many tokens follow the first stop token."""
    stop = rules.stop_token_id
    return len(tokens) - 1 - tokens.index(stop) if stop in tokens else 0


def _is_whole(tokens: tuple[int, ...], rules: Rules) -> bool:
    return tokens[-1:] == (rules.stop_token_id,) or len(tokens) == rules.max_new_tokens


def lag_broken(evidence: Evidence, rules: Rules) -> list[str]:
    """No token of a batch is older than the bound: n - min(a, n0), from the kept versions."""
    bound = rules.max_async_level
    if bound is None:
        return []
    wrong = []
    for batch in surviving_batches(evidence):
        if batch.lag > bound:
            wrong.append(f"batch {batch.step} of lineage {batch.lineage} came with lag {batch.lag}")
        for trajectory_id in batch.ids:
            for one in evidence.kept.get(trajectory_id, [])[:1]:
                lag = max((lag_of(evidence, batch, v) for v in one.own_versions), default=0)
                if lag > bound:
                    wrong.append(
                        f"trajectory {trajectory_id} was trained at {batch.lineage}.{batch.step} "
                        f"with lag {lag}"
                    )
    return wrong


def lag_of(evidence: Evidence, batch: Batch, version: PolicyVersion) -> int:
    """Versions between a token's policy and the update that trains it (semantics.md, 1)."""
    number = version.number
    if version.lineage != batch.lineage:
        parted = part_step(evidence.attaches, version.lineage, batch.lineage)
        number = number if parted is None else min(number, parted)
    return batch.step - number


def healthy_engines_given_up(evidence: Evidence, rules: Rules) -> list[str]:
    """Whoever was given up had a fault. A manager's own end gives up nobody."""
    places: dict[tuple[str, int], list[Launch]] = defaultdict(list)
    for launch in evidence.launches:
        places[launch.life, launch.index].append(launch)
    return [
        f"engine {launch.engine_id} ({launch.url}) was given up, and nothing was wrong with it"
        for launches in places.values()
        for launch in launches[:-1]
        if not excused(evidence.injected, launch.url)
    ]


def unstored_actions(evidence: Evidence, rules: Rules) -> list[str]:
    """Every answer that an environment saw is stored under its turn."""
    anew = sum(KINDS[one.kind].anew for one in evidence.injected)
    return episodes.actions_not_stored(evidence.calls, evidence.episodes, anew)


def ungiven_answers(evidence: Evidence, rules: Rules) -> list[str]:
    """Every answer of an episode that has ended has reached its environment."""
    return episodes.answers_not_given(evidence.calls, evidence.episodes)


def repeated_steps(evidence: Evidence, rules: Rules) -> list[str]:
    """No answer reaches an environment more often than there were lives."""
    return episodes.repeated_too_often(evidence.calls, evidence.lives)


def begun_again(evidence: Evidence, rules: Rules) -> list[str]:
    """Most episodes that were open at a kill went on."""
    return episodes.begun_again(evidence.open_at, evidence.episodes)


def _every(evidence: Evidence) -> Iterator[Kept]:
    for copies in evidence.kept.values():
        yield from copies


CHECKS: dict[str, Check] = {
    "finished trajectories lost": finished_and_lost,
    "trained twice": trained_twice,
    "steps without a batch": steps_missing,
    "store and trainer disagree": store_disagrees,
    "more than a chunk lost": more_than_a_chunk_lost,
    "wrong tokens": wrong_tokens,
    "wrong end": wrong_end,
    "lag bound broken": lag_broken,
    "healthy engines given up": healthy_engines_given_up,
    "actions not stored": unstored_actions,
    "answers not given": ungiven_answers,
    "repeated too often": repeated_steps,
    "episodes begun again": begun_again,
}


def audit(evidence: Evidence, rules: Rules) -> dict[str, list[str]]:
    """Every check by name, with what it found."""
    return {name: check(evidence, rules) for name, check in CHECKS.items()}
