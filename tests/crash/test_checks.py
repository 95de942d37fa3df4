"""Tests that the checks find nothing in honest evidence and find the error in doctored evidence.

The honest evidence: lineage 0 trained steps 0, 1 and 2, and a kill undid step 2. Lineage 1
continued from the checkpoint of step 2 and trained steps 2 and 3. Trajectory i is in the batch of
step i. Trajectory 4 was dropped, and trajectory 5 has finished. Trajectory 3 was interrupted and
lost two tokens, which were generated again. Engine 0 hung, and the only manager replaced it.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_async.engines.simulated.engine import SimulatedEngineModel
from megatron_async.trajectory.types import PolicyVersion
from tests.crash.__main__ import plan_of_kills
from tests.crash.checks import (
    CHECKS,
    Rules,
    audit,
    lag_of,
    part_step,
    surviving_batches,
    surviving_path,
    tokens_lost,
    weights_of,
)
from tests.crash.episodes import Call, Episode, repeats, went_on
from tests.crash.evidence import (
    Attach,
    Batch,
    Evidence,
    Kept,
    Launch,
    Request,
    Seen,
    read_arrivals,
)
from tests.crash.faults import Injected
from tests.crash.run import PARTS

MODEL = SimulatedEngineModel(vocab_size=64, mean_length=10**9)
STOP, LENGTH = 2, 8
RULES = Rules(
    chunk_tokens=4,
    max_async_level=1,
    stop_token_id=STOP,
    max_new_tokens=LENGTH,
    simulated=MODEL,
    reward_of=lambda tokens: 1.0,
)
PROMPT = (7, 9)


def generated(count: int, prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    """Return the first `count` tokens of the simulated engine's response to `prompt`."""
    tokens: list[int] = []
    for place in range(len(prompt), len(prompt) + count):
        tokens.append(MODEL.next_token(tokens[-1] if tokens else prompt[-1], place, (STOP,)))
    return tuple(tokens)


def kept(trajectory_id: int, **changes: object) -> Kept:
    consumed = {0: (0, 0), 1: (0, 1), 2: (1, 2), 3: (1, 3)}.get(trajectory_id)
    version = {2: PolicyVersion(0, 2), 3: PolicyVersion(1, 2)}.get(
        trajectory_id, PolicyVersion(0, 0)
    )
    tokens: tuple[int, ...] = changes.pop("tokens", generated(LENGTH))  # type: ignore[assignment]
    state = "batched" if consumed else "finished"
    if trajectory_id == 4:
        state = "dropped"
    one = Kept(
        trajectory_id,
        state,
        PROMPT,
        tokens,
        (version,) * len(tokens),
        reward=1.0 if consumed else None,
        drop_reason="stale" if trajectory_id == 4 else None,
        consumed=consumed,
    )
    return replace(one, **changes)  # type: ignore[arg-type]


def batch(lineage: int, step: int, trajectory_id: int) -> Batch:
    return Batch(lineage, step, (trajectory_id,), (generated(LENGTH),), lag=0)


def request(trajectory_id: int, start: int = 0, count: int = LENGTH, offset: int = 0) -> Request:
    first = len(PROMPT) + start
    end = "length" if start + count == LENGTH else None
    return Request(trajectory_id, first, offset, generated(LENGTH)[start : start + count], 2, end)


def honest() -> Evidence:
    requests = {i: [request(i)] for i in range(6)}
    requests[3] = [request(3, 0, 5), request(3, 3, 5, offset=100)]
    return Evidence(
        requests=requests,
        attaches=[Attach(0, 0, None), Attach(1, 2, 0), Attach(1, 3, 0)],
        batches=[batch(0, 0, 0), batch(0, 1, 1), batch(0, 2, 2), batch(1, 2, 2), batch(1, 3, 3)],
        dropped_batches=set(),
        kept={i: [kept(i)] for i in range(6)},
        trajectories=6,
        newest_checkpoint=(1, 4),
        looks=[{0: Seen("scored", LENGTH, 1.0), 1: Seen("finished", LENGTH, None)}],
        launches=[
            Launch("a", 0, "engine0", "http://h:1"),
            Launch("a", 1, "engine1", "http://h:2"),
            Launch("a", 0, "engine0.1", "http://h:3"),
        ],
        injected=[Injected("engine hangs", "http://h:1"), HICCUP, HICCUP],
    )


HICCUP = Injected("engine drops streams", "http://h:2")


def with_kept(trajectory_id: int, *copies: Kept) -> Evidence:
    return replace(honest(), kept={**honest().kept, trajectory_id: list(copies)})


def with_requests(trajectory_id: int, *requests: Request) -> Evidence:
    return replace(honest(), requests={**honest().requests, trajectory_id: list(requests)})


def with_batches(*batches: Batch) -> Evidence:
    return replace(honest(), batches=[*honest().batches, *batches])


def two_streams(change: int, restart: bool = False) -> Evidence:
    """Return evidence in which trajectory 5 mixes the streams of two requests for its response.

    Each token arrived at its position.

    Args:
        change: Index of the first token that is from the second stream.
        restart: Whether a third request continued from `change` with the same tokens.
    """
    streams = (11,) * LENGTH, (12,) * LENGTH
    first = len(PROMPT)
    requests = [Request(5, first, i, stream, 2) for i, stream in enumerate(streams)]
    tokens = streams[0][:change] + streams[1][change:]
    if restart:
        requests.append(Request(5, first + change, 2, streams[1][change:], 2))
    return replace(with_requests(5, *requests), kept={5: [kept(5, tokens=tokens)]})


def test_audit_finds_nothing_when_evidence_is_honest() -> None:
    assert {name: found for name, found in audit(honest(), RULES).items() if found} == {}
    assert [loss.tokens for loss in tokens_lost(honest())] == [2]


def test_surviving_batches_omit_the_steps_that_a_kill_undid() -> None:
    evidence = honest()
    assert surviving_path(evidence.attaches) == {1: None, 0: 2}
    steps = [(b.lineage, b.step) for b in surviving_batches(evidence)]
    assert steps == [(0, 0), (0, 1), (1, 2), (1, 3)]


def test_lag_counts_from_the_step_at_which_the_lineages_part() -> None:
    evidence = honest()
    assert part_step(evidence.attaches, 0, 1) == 2
    assert part_step(evidence.attaches, 1, 1) is None
    later = batch(1, 3, 3)
    assert lag_of(evidence, later, PolicyVersion(0, 2)) == 1
    # The kill undid the updates that made version 0.9, so it counts as the checkpoint's version.
    assert lag_of(evidence, later, PolicyVersion(0, 9)) == 1
    assert lag_of(evidence, later, PolicyVersion(1, 3)) == 0


DOCTORED: list[tuple[str, str, Callable[[], Evidence]]] = [
    ("finished trajectories lost", "kept 0 times", lambda: with_kept(0)),
    ("finished trajectories lost", "kept 2 times", lambda: with_kept(0, kept(0), kept(0))),
    (
        "finished trajectories lost",
        "is partial now",
        lambda: with_kept(0, kept(0, state="partial")),
    ),
    (
        "finished trajectories lost",
        "had 8 tokens, now 7",
        lambda: with_kept(0, kept(0, tokens=generated(7))),
    ),
    ("finished trajectories lost", "had reward 1.0", lambda: with_kept(0, kept(0, reward=0.0))),
    ("trained twice", "trajectory 0 was trained 2 times", lambda: with_batches(batch(1, 4, 0))),
    ("trained twice", "step 3 was trained 2 times", lambda: with_batches(batch(1, 3, 5))),
    ("steps without a batch", "step 4 has no batch", lambda: with_batches(batch(1, 5, 5))),
    (
        "steps without a batch",
        "newest checkpoint is (1, 2)",
        lambda: replace(honest(), newest_checkpoint=(1, 2)),
    ),
    (
        "store and trainer disagree",
        "consumed by None, the trainer says (1, 3)",
        lambda: with_kept(3, kept(3, consumed=None)),
    ),
    (
        "store and trainer disagree",
        "consumed by (1, 3), the trainer says None",
        lambda: with_kept(5, kept(5, consumed=(1, 3))),
    ),
    (
        "store and trainer disagree",
        "dropped without a stored reason",
        lambda: with_kept(4, kept(4, drop_reason=None)),
    ),
    (
        "more than a chunk lost",
        "trajectory 3 lost 6 tokens",
        lambda: replace(
            honest(), requests={**honest().requests, 3: [request(3), request(3, 2, 6, 100)]}
        ),
    ),
    (
        "more than a chunk lost",
        "trajectory 5 lost 7 tokens",
        lambda: with_kept(5, kept(5, tokens=generated(1))),
    ),
    (
        "more than a chunk lost",
        "trajectory 5 restarted",
        lambda: with_requests(5, *begun(1, (3, 2)), *begun(2, (3, 2))),
    ),
    (
        "wrong tokens",
        "token 0 never arrived",
        lambda: with_kept(5, kept(5, tokens=(63, *generated(LENGTH)[1:]))),
    ),
    (
        "wrong tokens",
        "not the engine's response",
        lambda: replace(
            with_kept(5, kept(5, tokens=(11, 11))),
            requests={**honest().requests, 5: [Request(5, 2, 0, (11, 11), 2)]},
        ),
    ),
    ("wrong tokens", "token 2 neither continues the stream", lambda: two_streams(2)),
    (
        "wrong tokens",
        "trained on tokens that are not the kept tokens",
        lambda: with_kept(3, kept(3, tokens=generated(LENGTH - 1))),
    ),
    (
        "wrong end",
        "trajectory 0 has 2 tokens after a stop token",
        lambda: with_kept(0, kept(0, tokens=(*generated(3), STOP, *generated(2)))),
    ),
    (
        "wrong end",
        "trained at 1.4 with 1 tokens after a stop token",
        lambda: with_batches(replace(batch(1, 4, 5), responses=((9, STOP, STOP),))),
    ),
    (
        "wrong end",
        "is finished after 7 tokens without a stop token",
        lambda: with_kept(5, kept(5, tokens=generated(7))),
    ),
    (
        "wrong end",
        "trajectory 5 was sent to an engine again after its end (length)",
        lambda: with_requests(5, request(5), Request(5, len(PROMPT) + LENGTH, 100, (3,), 1)),
    ),
    (
        "lag bound broken",
        "trained at 1.3 with lag 3",
        lambda: with_kept(3, kept(3, versions=(PolicyVersion(0, 0),) * LENGTH)),
    ),
    (
        "lag bound broken",
        "batch 4 of lineage 1 came with lag 2",
        lambda: with_batches(replace(batch(1, 4, 5), lag=2)),
    ),
    (
        "wrong tokens",
        "trajectory 0 has a reward of another response",
        lambda: with_kept(0, kept(0, reward=0.5)),
    ),
    (
        "wrong tokens",
        "trajectory 0 has a reward of another response",
        lambda: with_kept(0, kept(0, reward=0.0)),
    ),
    (
        "healthy engines given up",
        "engine engine0 (http://h:1) was replaced without a fault that explains it",
        lambda: replace(honest(), injected=[Injected("engine hangs", "http://h:3")]),
    ),
    (
        "healthy engines given up",
        "engine engine1 (http://h:2) was replaced",
        lambda: replace(
            honest(), launches=[*honest().launches, Launch("a", 1, "engine1.1", "http://h:4")]
        ),
    ),
]


NAMES = ("ab", "cd")


def played(*calls: Call, answers: tuple[str, ...] = ("x", "y"), **changes: object) -> Evidence:
    """Return evidence in which the store has the responses `answers` of episode `ab` (seed 5).

    The store has no response of episode `cd` (seed 6).
    """
    episodes = {
        "ab": Episode(1, "ab", 5, answers, "batched"),
        "cd": Episode(2, "cd", 6, (), "waiting"),
    }
    evidence = replace(honest(), calls=list(calls), episodes=episodes, lives=2)
    return replace(evidence, **changes)  # type: ignore[arg-type]


def step(turn: int, text: str, name: str = "ab", seed: int = 5) -> Call:
    return Call("step", name, seed, turn, text)


SEEN = (Call("reset", "ab", 5), step(0, "x"), Call("restore", "ab", 5, 1), step(1, "y"))
TRIAL_RUN = (Call("reset", "ef", 5), step(0, "Yes.", "ef"))
EVALUATED = (Call("reset", "gh", 99), step(0, "z", "gh", 99))

DOCTORED += [
    (
        "actions not stored",
        "received 'z' in turn 1, but 'y' is stored",
        lambda: played(*SEEN, step(1, "z")),
    ),
    (
        "actions not stored",
        "received a response in turn 2, but only 2 responses are stored",
        lambda: played(*SEEN, step(2, "z")),
    ),
    (
        "actions not stored",
        "environment ef of seed 5 received a response, but the episode is not stored",
        lambda: played(*SEEN, step(0, "x", "ef")),
    ),
    (
        "answers not given",
        "has the response 'y' in turn 1, but its environment never received it",
        lambda: played(*SEEN[:3]),
    ),
    (
        "repeated too often",
        "received the response of turn 1 3 times in 2 lives",
        lambda: played(*SEEN, step(1, "y"), step(1, "y")),
    ),
    (
        "episodes begun again",
        "only 1 of 2 episodes that were open at a kill continued",
        lambda: played(*SEEN, open_at=[frozenset({"ab", "gone"})]),
    ),
]


def test_audit_finds_nothing_when_evidence_of_episodes_is_honest() -> None:
    evidence = played(
        *SEEN, step(1, "y"), *TRIAL_RUN, *EVALUATED, open_at=[frozenset(NAMES), frozenset({"ab"})]
    )
    assert {name: found for name, found in audit(evidence, RULES).items() if found} == {}
    assert repeats(evidence.calls) == 1
    assert went_on(evidence.open_at, evidence.episodes) == (3, 3)


OPENING, OBSERVED = (7, 9), (20, 21, 22)


def of_turns(**changes: object) -> Evidence:
    """Return evidence in which trajectory 5 is an episode of response, observation and response."""
    first = (*generated(3, OPENING), STOP)
    place = len(OPENING) + len(first) + len(OBSERVED)
    second: list[int] = []
    for position in range(place, place + LENGTH):
        second.append(MODEL.next_token(second[-1] if second else OBSERVED[-1], position, (STOP,)))
    version = PolicyVersion(0, 0)
    own = [True] * len(first) + [False] * len(OBSERVED) + [True] * len(second)
    tokens = (*first, *OBSERVED, *second)
    one = Kept(
        5,
        "finished",
        OPENING,
        tokens,
        (version,) * len(tokens),
        opening=len(OPENING),
        own=tuple(own),
    )
    requests = [
        Request(5, len(OPENING), 0, first, 2, "stop"),
        Request(5, place, 9, tuple(second), 2, "length"),
    ]
    evidence = with_requests(5, *(changes.pop("requests", None) or requests))  # type: ignore[misc]
    return replace(evidence, kept={5: [replace(one, **changes)]})  # type: ignore[arg-type]


def found_in_turns(evidence: Evidence) -> list[str]:
    rules = replace(RULES, simulated=None)
    checks = ("wrong tokens", "wrong end", "more than a chunk lost", "lag bound broken")
    return [line for name in checks for line in audit(evidence, rules)[name] if "ry 5" in line]


def test_audit_ignores_a_changed_observation_but_not_a_changed_response() -> None:
    assert found_in_turns(of_turns()) == []
    kept = of_turns().kept[5][0]
    changed = (*kept.tokens[:5], 33, *kept.tokens[6:])
    assert found_in_turns(of_turns(tokens=changed)) == [], "observations have no other record"
    wrong = (*kept.tokens[:-1], 33)
    assert "never arrived" in found_in_turns(of_turns(tokens=wrong))[0]


def test_audit_finds_a_request_that_continues_a_response_after_its_end() -> None:
    first, second = of_turns().requests[5]
    again = Request(5, first.end, 5, (3,), 1)
    found = found_in_turns(of_turns(requests=[first, again, second]))
    assert any("sent to an engine again after its end" in line for line in found)


def begun(name: int, *answers: tuple[int, int]) -> list[Request]:
    """Return requests, given as (start, number of tokens), of an episode with this name."""
    opening = (7, name, 9)
    return [
        Request(5, start, 0, (3,) * count, 2, None, (*opening, *[3] * (start - len(opening))))
        for start, count in answers
    ]


def of_beginnings(*requests: Request, failed: int = 1) -> list[str]:
    """Return the messages about lost tokens if trajectory 5 is partial after these requests.

    Args:
        requests: Requests of the trajectory.
        failed: Number of environments that raised an error.
    """
    injected = [Injected("environment raises")] * failed + [Injected("environment dies")]
    opening = requests[-1].input[:3]
    one = kept(5, state="partial", prompt=opening, tokens=(3,) * (requests[-1].end - 3))
    evidence = replace(with_requests(5, *requests), kept={5: [one]}, injected=injected)
    return audit(evidence, RULES)["more than a chunk lost"]


def test_audit_allows_an_episode_to_restart_from_scratch_when_it_failed() -> None:
    anew = [*begun(1, (3, 10), (16, 9)), *begun(2, (3, 6))]
    assert of_beginnings(*anew) == []
    more = [*anew, *begun(4, (3, 5))]
    assert of_beginnings(*more, failed=2) == []


def test_audit_allows_an_episode_to_have_no_tokens_when_it_failed_at_the_end() -> None:
    """The episode waits for its restart when the run ends, so the store has no tokens of it."""
    one = Kept(5, "pending", (), (), ())
    ended = [replace(request, noted_end="stop") for request in begun(1, (3, 10), (16, 9))]
    evidence = with_requests(5, *ended)
    other = replace(kept(4), opening=1)
    evidence = replace(evidence, kept={**evidence.kept, 4: [other], 5: [one]})
    failed = replace(evidence, injected=[Injected("environment raises")])
    assert found_in_turns(failed) == []
    anew = "trajectory 5 restarted after 25 tokens without a fault"
    assert found_in_turns(evidence) == [anew]


def test_audit_finds_lost_tokens_when_an_episode_restarts_without_a_fault() -> None:
    anew = [*begun(1, (3, 10), (16, 9)), *begun(2, (3, 6))]
    without = "trajectory 5 restarted after 22 tokens without a fault"
    assert of_beginnings(*anew, failed=0) == [without]
    assert len(of_beginnings(*anew, *begun(4, (3, 5)))) == 1, "a failure explains one restart"


def test_audit_finds_lost_tokens_when_an_episode_continues_under_its_name() -> None:
    again = begun(1, (3, 10), (16, 9), (16, 9))
    assert of_beginnings(*again, failed=3) == ["trajectory 5 lost 9 tokens at once"]
    later = [*begun(1, (3, 10)), *begun(2, (3, 10), (5, 9))]
    assert of_beginnings(*later, failed=3) == ["trajectory 5 lost 8 tokens at once"]


@pytest.mark.parametrize(("check", "sentence_part", "doctored"), DOCTORED)
def test_check_finds_the_error_when_evidence_is_doctored(
    check: str, sentence_part: str, doctored: Callable[[], Evidence]
) -> None:
    found = audit(doctored(), RULES)[check]
    assert any(sentence_part in sentence for sentence in found), found


@pytest.mark.parametrize("change", [0, 2, LENGTH])
def test_audit_finds_mixed_streams_unless_a_request_starts_where_they_change(change: int) -> None:
    """A request whose tokens were all lost, here the second of three, is ignored."""
    rules = replace(RULES, simulated=None, reward_of=None)

    def found_in(evidence: Evidence) -> list[str]:
        return [line for line in audit(evidence, rules)["wrong tokens"] if "5: token" in line]

    assert found_in(two_streams(change, restart=True)) == []
    mixed = found_in(two_streams(change))
    assert [line.partition(" neither")[0] for line in mixed] == (
        ["trajectory 5: token 2"] if change == 2 else []
    )


def test_audit_finds_a_reward_of_0_unless_a_scorer_failed_or_0_is_correct() -> None:
    def wrong(evidence: Evidence, rules: Rules) -> list[str]:
        return [line for line in audit(evidence, rules)["wrong tokens"] if "reward" in line]

    zero = with_kept(0, kept(0, reward=0.0))
    assert len(wrong(zero, RULES)) == 1
    failed = Injected("scorer dies")
    assert wrong(replace(zero, injected=[*zero.injected, failed]), RULES) == []
    worthless = replace(RULES, reward_of=lambda tokens: 0.0)
    only = replace(zero, kept={0: zero.kept[0]})
    assert wrong(only, worthless) == []
    assert len(wrong(replace(honest(), injected=[failed]), worthless)) == 4


def test_audit_allows_another_request_when_the_end_was_lost_with_its_tokens() -> None:
    """The arrival is noted before the store has the tokens, so a kill may lose the end."""
    again = request(5, 5, 3, offset=100)
    assert audit(with_requests(5, request(5), again), RULES)["wrong end"] == []


def test_audit_allows_a_short_response_when_it_ends_with_a_stop_token() -> None:
    stopped = kept(5, tokens=(*generated(3), STOP))
    assert audit(with_kept(5, stopped), RULES)["wrong end"] == []


def test_audit_finds_tokens_after_the_position_where_a_simulated_engine_stops() -> None:
    model = SimulatedEngineModel(vocab_size=64, mean_length=1)  # Each token ends the response.
    rules = replace(RULES, simulated=model)

    def found_in(*tokens: int) -> list[str]:
        arrived = Request(5, len(PROMPT), 0, tokens, 2)
        evidence = replace(with_requests(5, arrived), kept={5: [kept(5, tokens=tokens)]})
        return [line for line in audit(evidence, rules)["wrong tokens"] if "response to" in line]

    assert found_in(STOP) == []
    assert found_in(STOP, STOP) == ["trajectory 5 is not the engine's response to its prompt"]


def test_audit_allows_a_replaced_engine_when_enough_of_its_requests_failed() -> None:
    again = Launch("a", 1, "engine1.1", "http://h:4")
    evidence = replace(honest(), launches=[*honest().launches, again])
    assert len(audit(evidence, RULES)["healthy engines given up"]) == 1
    evidence = replace(evidence, injected=[*evidence.injected, HICCUP])
    assert audit(evidence, RULES)["healthy engines given up"] == []


def test_audit_allows_a_new_engine_when_the_manager_is_new() -> None:
    again = Launch("b", 1, "engine1", "http://h:4")
    evidence = replace(honest(), launches=[*honest().launches, again])
    assert audit(evidence, RULES)["healthy engines given up"] == []


def test_audit_finds_tokens_that_have_the_label_of_another_version() -> None:
    rules = replace(RULES, by_version=True, simulated=replace(MODEL, vocab_size=4096))
    assert rules.simulated is not None

    def answer(*versions: PolicyVersion) -> tuple[int, ...]:
        tokens: list[int] = []
        for place, version in enumerate(versions, len(PROMPT)):
            model = weights_of(rules.simulated, version)
            tokens.append(model.next_token(tokens[-1] if tokens else PROMPT[-1], place, (STOP,)))
        return tuple(tokens)

    old, new = PolicyVersion(0, 0), PolicyVersion(0, 1)
    tokens = answer(old, old, new, new)

    def wrong(*labels: PolicyVersion) -> list[str]:
        one = kept(5, tokens=tokens, versions=labels, state="partial")
        arrived = Request(5, len(PROMPT), 0, tokens, 2)
        evidence = replace(with_requests(5, arrived), kept={5: [one]})
        return [line for line in audit(evidence, rules)["wrong tokens"] if "response to" in line]

    assert wrong(old, old, new, new) == []
    assert len(wrong(old, old, old, new)) == 1


def test_read_arrivals_returns_the_end_of_each_request_and_refuses_more(tmp_path: Path) -> None:
    lines = [
        {"request": "t3-1", "at": 2, "input": [1, 4]},
        {"request": "t3-1", "at": 2, "ids": [5, 6], "version": "0.0", "end": "abort"},
        {"request": "t3-2", "at": 4, "input": [1, 4, 5, 6]},
        {"request": "t3-2", "at": 4, "ids": [7, STOP], "version": "0.1", "end": "stop"},
    ]
    more = {"request": "t3-2", "at": 6, "ids": [8], "version": "0.1", "end": None}
    arrivals = tmp_path / "arrivals.jsonl"
    arrivals.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(r.start, r.end, r.noted_end, r.input) for r in read_arrivals(arrivals)[3]] == [
        (2, 4, "abort", (1, 4)),
        (4, 6, "stop", (1, 4, 5, 6)),
    ]
    arrivals.write_text("".join(json.dumps(line) + "\n" for line in [*lines, more]))
    with pytest.raises(ValueError, match="trajectory 3: a request's tokens follow its end"):
        read_arrivals(arrivals)


def test_plans_of_kills_cover_all_five_targets_when_runs_have_four_kills() -> None:
    parts = itertools.cycle(PARTS)
    plans = [plan_of_kills(random.Random(1), kills, parts) for kills in (4, 4, 2)]
    assert [len(plan) for plan in plans] == [4, 4, 2]
    assert all(plan[-1] == "tree" for plan in plans)
    assert {target for plan in plans for target in plan} == {*PARTS, "tree"}


def test_plans_of_kills_hit_each_part_equally_often_when_runs_are_long() -> None:
    parts = itertools.cycle(PARTS)
    plans = [plan_of_kills(random.Random(1), 17, parts) for _ in range(4)]
    kills = Counter(target for plan in plans for target in plan)
    assert [kills[part] for part in PARTS] == [15, 15, 15, 15]
    assert kills["tree"] == 8


def test_every_check_has_a_doctored_account() -> None:
    assert {check for check, _, _ in DOCTORED} == set(CHECKS)
