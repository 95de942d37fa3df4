"""Checks the promises of the store, of the lag bound and of the fleet against a run's evidence.

A promise is a guarantee that the documentation gives, for example that no trajectory is trained
twice. The checks are pure functions of `Evidence` and `Rules`.

Invariants
- A check returns one message for each trajectory, step or span of tokens that breaks its promise,
  and no message when the promise is kept. If a check relies on a property, another check tests that
  property.
- The surviving path of lineages is computed from the trainer's record (`trained.jsonl`), not from
  the store.
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
    """Settings of a run that the checks need.

    Attributes:
        chunk_tokens: Number of tokens that the store writes as one chunk.
        max_async_level: Bound of the lag; None for no bound.
        stop_token_id: Token that ends a response.
        max_new_tokens: Number of tokens after which a response ends without a stop token.
        simulated: Model of the simulated engines; None if the engines are real.
        by_version: Whether the tokens of a simulated engine also depend on the policy version that
            it has loaded (`weights_of`).
        reward_of: Returns the reward of a response; None if the reward is not known.
    """

    chunk_tokens: int
    max_async_level: int | None
    stop_token_id: int
    max_new_tokens: int
    simulated: SimulatedEngineModel | None = None
    by_version: bool = False
    reward_of: Callable[[tuple[int, ...]], float] | None = None


def weights_of(model: SimulatedEngineModel, version: PolicyVersion) -> SimulatedEngineModel:
    """Return the model by which a simulated engine generates after it has loaded `version`."""
    return replace(model, seed=zlib.crc32(f"{model.seed} {version}".encode()))


Check = Callable[[Evidence, Rules], list[str]]


# ------------------------------------------------------------ the surviving lineage


def branches(attaches: list[Attach]) -> dict[int, Attach]:
    """Return the first attach of each lineage.

    A later attach of the same lineage continues the lineage after its manager was lost.
    """
    begun: dict[int, Attach] = {}
    for attach in attaches:
        begun.setdefault(attach.lineage, attach)
    return begun


def surviving_path(attaches: list[Attach]) -> dict[int, int | None]:
    """Return the lineages of the surviving path, from the newest to the oldest.

    Returns:
        For each lineage the step at which the path continues in a newer lineage; None for the
        newest lineage.
    """
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
    """Return the batches that the trainer received on the surviving path, in order of arrival."""
    path = surviving_path(evidence.attaches)
    found = []
    for batch in evidence.batches:
        limit = path.get(batch.lineage, -1)
        if limit is None or batch.step < limit:
            found.append(batch)
    return found


def part_step(attaches: list[Attach], lineage: int, other: int) -> int | None:
    """Return the step n0 at which `lineage` and `other` part.

    Returns:
        The step; 0 if the lineages have no common ancestor, None if they are equal.
    """
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
    """Check that each trajectory is kept exactly once and that a finished trajectory never changes.

    A look at the store during the run shows which trajectories were finished at that moment.
    """
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
        return "is missing now"
    now = copies[0]
    if now.state not in DONE:
        return f"is {now.state} now"
    if now.opening + len(now.tokens) != tokens:
        return f"had {tokens} tokens, now {now.opening + len(now.tokens)}"
    if reward is not None and now.reward != reward:
        return f"had reward {reward}, now {now.reward}"
    return ""


def trained_twice(evidence: Evidence, rules: Rules) -> list[str]:
    """Check that no trajectory is in two batches of the surviving path and no step has two."""
    batches = surviving_batches(evidence)
    uses = Counter(i for batch in batches for i in batch.ids)
    steps = Counter(batch.step for batch in batches)
    return [f"trajectory {i} was trained {n} times" for i, n in uses.items() if n > 1] + [
        f"step {step} was trained {n} times" for step, n in steps.items() if n > 1
    ]


def steps_missing(evidence: Evidence, rules: Rules) -> list[str]:
    """Check that every step has a batch and that the newest checkpoint is at the last step.

    The newest checkpoint must belong to the newest lineage.
    """
    steps = {batch.step for batch in surviving_batches(evidence)}
    end = max(steps, default=-1) + 1
    wrong = [f"step {step} has no batch" for step in range(end) if step not in steps]
    newest = max((attach.lineage for attach in evidence.attaches), default=None)
    if evidence.newest_checkpoint != (newest, end):
        wrong.append(
            f"the newest checkpoint is {evidence.newest_checkpoint}; the trainer ended at "
            f"step {end} of lineage {newest}"
        )
    return wrong


def store_disagrees(evidence: Evidence, rules: Rules) -> list[str]:
    """Check that the store records exactly the trained trajectories as consumed, by their batch."""
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
                f"trajectory {one.trajectory_id}: the store says that it was consumed by "
                f"{one.consumed}, the trainer says {trained.get(one.trajectory_id)}"
            )
        if one.state == "dropped" and not one.drop_reason:
            wrong.append(f"trajectory {one.trajectory_id} was dropped without a stored reason")
    return wrong


class Loss(NamedTuple):
    """Tokens of a trajectory that had arrived at the manager and were lost.

    Attributes:
        trajectory_id: Trajectory that lost the tokens.
        place: Offset in `arrivals.jsonl` of the request that shows the loss; greater than every
            offset if the tokens are missing at the end of the run.
        tokens: Number of lost tokens.
        largest: Number of tokens of the largest chunk that had arrived for the trajectory.
        anew: Whether the episode restarted from scratch, and so under another name.
    """

    trajectory_id: int
    place: int
    tokens: int
    largest: int
    anew: bool = False


def tokens_lost(evidence: Evidence) -> Iterator[Loss]:
    """Yield every loss.

    A request starts where the stored tokens end, so tokens that had arrived beyond its start are
    lost. All requests of an episode start with the input of its first request, which contains the
    name of the episode. A request with another input means that the episode restarted from scratch.
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
    """Check that an interruption loses at most the chunk that was being filled (docs/store.md).

    A restart of an episode from scratch is allowed only for a fault that costs an episode
    (`Kind.anew`). Each such fault allows one restart.
    """
    losses = sorted(tokens_lost(evidence), key=lambda loss: loss.place)
    anew = [loss for loss in losses if loss.anew]
    unexplained = anew[sum(KINDS[one.kind].anew for one in evidence.injected) :]
    return [
        f"trajectory {loss.trajectory_id} lost {loss.tokens} tokens at once"
        for loss in losses
        if not loss.anew and loss.tokens > rules.chunk_tokens - 1 + loss.largest
    ] + [
        f"trajectory {loss.trajectory_id} restarted after {loss.tokens} tokens without a fault"
        for loss in unexplained
    ]


def wrong_tokens(evidence: Evidence, rules: Rules) -> list[str]:
    """Check the tokens and the rewards of all trajectories.

    Each kept token must have arrived at its position, in a stream that continues from the tokens
    before it. The trained tokens must equal the kept tokens. A simulated engine must generate the
    same tokens, and the reward must belong to them.
    """
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
                f"trajectory {one.trajectory_id}: token {whole} neither continues the stream of "
                "the tokens before it nor starts the stream of a later request"
            )
        elif rules.simulated is not None and not _is_continuation(one, rules):
            wrong.append(
                f"trajectory {one.trajectory_id} is not the engine's response to its prompt"
            )
        right = one.reward if rules.reward_of is None else rules.reward_of(one.tokens)
        if one.reward not in (None, right) and not (one.reward == 0.0 and scorers_failed):
            wrong.append(f"trajectory {one.trajectory_id} has a reward of another response")
    for batch in surviving_batches(evidence):
        for trajectory_id, response in zip(batch.ids, batch.responses, strict=True):
            copies = evidence.kept.get(trajectory_id, [])
            if copies and copies[0].tokens != response:
                wrong.append(
                    f"trajectory {trajectory_id} was trained on tokens that are not the kept tokens"
                )
    return wrong


def _in_whole_streams(one: Kept, requests: list[Request]) -> int:
    """Return how many leading tokens consist of prefixes of request streams in order of time.

    A request asks for the tokens after the stored tokens. Its stream therefore starts there, and no
    token of an earlier request may follow. A request whose tokens were all lost is skipped.
    Observations of an environment may be between the streams.
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
    """Return whether the simulated engine generates each policy token after the tokens before."""
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
    """Check that a response ends where its engine ended it.

    No token may follow the end, and no response may be scored before its end. A kill may lose the
    reported end together with the tokens of the same chunk; the next request then starts before
    that end. A request that starts at the end or later asks for tokens that must not exist.
    """
    wrong = []
    # One opening is enough: an episode that is about to restart has no opening.
    has_episodes = any(one.opening for one in _every(evidence))
    for one in _every(evidence):
        answers = _answers(one)
        after = sum(_after_stop(answer, rules) for answer in answers)
        if after:
            wrong.append(f"trajectory {one.trajectory_id} has {after} tokens after a stop token")
        scored = one.state in DONE and one.state != "dropped"
        # The environment has replied to all responses but the last, so they have ended.
        asked = answers if scored else answers[:-1]
        if not after and not all(_is_whole(answer, rules) for answer in asked):
            wrong.append(
                f"trajectory {one.trajectory_id} is {one.state} after {len(one.tokens)} tokens "
                "without a stop token"
            )
    for batch in evidence.batches:
        for trajectory_id, response in zip(batch.ids, batch.responses, strict=True):
            if has_episodes:
                continue  # `wrong_tokens` checks that the trained tokens are the kept tokens.
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
                # A request that starts later follows an observation of the environment.
                again = following.start == request.end
            if request.noted_end in ("stop", "length") and again:
                wrong.append(
                    f"trajectory {trajectory_id} was sent to an engine again after its end "
                    f"({request.noted_end})"
                )
    return wrong


def _answers(one: Kept) -> list[tuple[int, ...]]:
    """Return the policy's responses: each unbroken span of policy tokens."""
    if not one.own:
        return [one.tokens]
    together = groupby(zip(one.tokens, one.own, strict=True), key=lambda pair: pair[1])
    return [tuple(token for token, _ in run) for own, run in together if own]


def _after_stop(tokens: tuple[int, ...], rules: Rules) -> int:
    """Return how many tokens follow the first stop token."""
    stop = rules.stop_token_id
    return len(tokens) - 1 - tokens.index(stop) if stop in tokens else 0


def _is_whole(tokens: tuple[int, ...], rules: Rules) -> bool:
    return tokens[-1:] == (rules.stop_token_id,) or len(tokens) == rules.max_new_tokens


def lag_broken(evidence: Evidence, rules: Rules) -> list[str]:
    """Check that no batch, as received or by its kept versions, has a lag above the bound."""
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
    """Return the lag of a token of `version` in `batch` (docs/semantics.md section 1).

    The lag is the step of the batch minus the number of the version. If the version is of another
    lineage, its number counts only up to the step at which the two lineages part.
    """
    number = version.number
    if version.lineage != batch.lineage:
        parted = part_step(evidence.attaches, version.lineage, batch.lineage)
        number = number if parted is None else min(number, parted)
    return batch.step - number


def healthy_engines_given_up(evidence: Evidence, rules: Rules) -> list[str]:
    """Check that a fault explains every engine that its manager replaced.

    Engines that end together with their manager are not counted.
    """
    places: dict[tuple[str, int], list[Launch]] = defaultdict(list)
    for launch in evidence.launches:
        places[launch.life, launch.index].append(launch)
    return [
        f"engine {launch.engine_id} ({launch.url}) was replaced without a fault that explains it"
        for launches in places.values()
        for launch in launches[:-1]
        if not excused(evidence.injected, launch.url)
    ]


def unstored_actions(evidence: Evidence, rules: Rules) -> list[str]:
    """Check that every response which an environment received is stored under its turn."""
    anew = sum(KINDS[one.kind].anew for one in evidence.injected)
    return episodes.actions_not_stored(evidence.calls, evidence.episodes, anew)


def ungiven_answers(evidence: Evidence, rules: Rules) -> list[str]:
    """Check that every response of an episode that has ended reached its environment."""
    return episodes.answers_not_given(evidence.calls, evidence.episodes)


def repeated_steps(evidence: Evidence, rules: Rules) -> list[str]:
    """Check that no environment received a response more often than its process was started."""
    return episodes.repeated_too_often(evidence.calls, evidence.lives)


def begun_again(evidence: Evidence, rules: Rules) -> list[str]:
    """Check that most episodes that were open at a kill continued."""
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
    """Return the messages of every check, by the name of the check."""
    return {name: check(evidence, rules) for name, check in CHECKS.items()}
