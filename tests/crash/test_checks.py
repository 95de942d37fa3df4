"""Every check of the crash test passes on an honest account, and fails on a doctored one.

The account: lineage 0 trained steps 0, 1 and 2, and lost step 2 in a kill; lineage 1 went on from
the checkpoint of step 2 and trained steps 2 and 3. Trajectory i is in the batch of step i;
trajectory 4 was dropped, trajectory 5 has finished. Trajectory 3 was interrupted and lost two
tokens, which were written again. Engine 0 hung and was started again by the only manager.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_async.engines.simulated.engine import SimulatedEngineModel
from megatron_async.trajectory.types import PolicyVersion
from tests.crash.checks import (
    CHECKS,
    Rules,
    audit,
    lag_of,
    part_step,
    tokens_lost,
)
from tests.crash.episodes import Call, Episode
from tests.crash.evidence import (
    Attach,
    Batch,
    Evidence,
    Kept,
    Launch,
    Request,
    Seen,
)
from tests.crash.fault_programme import PRESETS, is_due_to_a_slow_machine
from tests.crash.faults import Injected
from tests.crash.world import Result, episode_settings, rules_of, settings

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
    """The simulated engine's response."""
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
    one = Kept(
        trajectory_id,
        "batched" if consumed else "dropped" if trajectory_id == 4 else "finished",
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


def two_streams(change: int) -> Evidence:
    """Trajectory 5 was asked for twice from its prompt on; it is the second stream's from `change`.

    Each of its tokens has arrived in its place.
    """
    streams = (11,) * LENGTH, (12,) * LENGTH
    first = len(PROMPT)
    requests = [Request(5, first, i, stream, 2) for i, stream in enumerate(streams)]
    tokens = streams[0][:change] + streams[1][change:]
    return replace(with_requests(5, *requests), kept={5: [kept(5, tokens=tokens)]})


def test_an_honest_account_passes_every_check() -> None:
    assert {name: found for name, found in audit(honest(), RULES).items() if found} == {}
    assert [loss.tokens for loss in tokens_lost(honest())] == [2]


def test_lag_counts_from_where_the_lineages_part() -> None:
    evidence = honest()
    assert part_step(evidence.attaches, 0, 1) == 2
    assert part_step(evidence.attaches, 1, 1) is None
    later = batch(1, 3, 3)
    assert lag_of(evidence, later, PolicyVersion(0, 2)) == 1
    # made by updates that the kill undid: worth what the checkpoint was
    assert lag_of(evidence, later, PolicyVersion(0, 9)) == 1
    assert lag_of(evidence, later, PolicyVersion(1, 3)) == 0


DOCTORED: list[tuple[str, str, Callable[[], Evidence]]] = [
    ("finished trajectories lost", "kept 0 times", lambda: with_kept(0)),
    (
        "finished trajectories lost",
        "is partial now",
        lambda: with_kept(0, kept(0, state="partial")),
    ),
    ("finished trajectories lost", "had reward 1.0", lambda: with_kept(0, kept(0, reward=0.0))),
    ("trained twice", "trajectory 0 was trained 2 times", lambda: with_batches(batch(1, 4, 0))),
    ("steps without a batch", "step 4 has no batch", lambda: with_batches(batch(1, 5, 5))),
    (
        "store and trainer disagree",
        "consumed by None, the trainer has (1, 3)",
        lambda: with_kept(3, kept(3, consumed=None)),
    ),
    (
        "more than a chunk lost",
        "trajectory 3 lost 6 tokens",
        lambda: replace(
            honest(), requests={**honest().requests, 3: [request(3), request(3, 2, 6, 100)]}
        ),
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
    ("wrong tokens", "token 2 is of another stream", lambda: two_streams(2)),
    (
        "wrong tokens",
        "trained with other tokens",
        lambda: with_kept(3, kept(3, tokens=generated(LENGTH - 1))),
    ),
    (
        "wrong end",
        "trajectory 0 has 2 tokens after a stop token",
        lambda: with_kept(0, kept(0, tokens=(*generated(3), STOP, *generated(2)))),
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
        "wrong tokens",
        "trajectory 0 has another response's reward",
        lambda: with_kept(0, kept(0, reward=0.0)),
    ),
    (
        "healthy engines given up",
        "engine engine0 (http://h:1) was given up, and nothing was wrong with it",
        lambda: replace(honest(), injected=[Injected("engine hangs", "http://h:3")]),
    ),
]


def played(*calls: Call, **changes: object) -> Evidence:
    """Episode `ab` of seed 5 has these answers in the store."""
    episodes = {"ab": Episode(1, "ab", 5, ("x", "y"), "batched")}
    evidence = replace(honest(), calls=list(calls), episodes=episodes, lives=2)
    return replace(evidence, **changes)  # type: ignore[arg-type]


def step(turn: int, text: str) -> Call:
    return Call("step", "ab", 5, turn, text)


SEEN = (Call("reset", "ab", 5), step(0, "x"), Call("restore", "ab", 5, 1), step(1, "y"))

DOCTORED += [
    (
        "actions not stored",
        "got 'z' in turn 1, and 'y' is stored",
        lambda: played(*SEEN, step(1, "z")),
    ),
    (
        "answers not given",
        "has the answer 'y' in turn 1, and its environment never got it",
        lambda: played(*SEEN[:3]),
    ),
    (
        "repeated too often",
        "got the answer of turn 1 3 times in 2 lives",
        lambda: played(*SEEN, step(1, "y"), step(1, "y")),
    ),
    (
        "episodes begun again",
        "1 of 2 episodes that were open at a kill went on",
        lambda: played(*SEEN, open_at=[frozenset({"ab", "gone"})]),
    ),
]


@pytest.mark.parametrize(("check", "sentence_part", "doctored"), DOCTORED)
def test_a_doctored_account_is_found_out(
    check: str, sentence_part: str, doctored: Callable[[], Evidence]
) -> None:
    found = audit(doctored(), RULES)[check]
    assert any(sentence_part in sentence for sentence in found), found


def test_every_check_has_a_doctored_account() -> None:
    assert {check for check, _, _ in DOCTORED} == set(CHECKS)


@pytest.mark.parametrize("preset", PRESETS)
def test_faults_are_done_to_the_preset_and_its_own_lag_bound(tmp_path: Path, preset: str) -> None:
    """`sync` with a bound of 4 is another schedule: its check of the lag would pass on lag 1."""
    configs = [settings(preset), episode_settings(preset, tmp_path / "run")]
    bound = {"sync": 0, "rapid": 0, "async": 2}.get(preset, 4)
    assert {rules_of(config).max_async_level for config in configs} == {bound}


def test_a_machine_that_stands_still_explains_lost_engines_and_nothing_else() -> None:
    lost, twice = "healthy engines given up: engine0", "trained twice: 5"
    for broken, seconds, explained in (
        ([lost], 0.1, False),
        ([lost], 2.0, True),
        ([], 2.0, False),
        ([lost, twice], 2.0, False),
    ):
        result = Result("async", "", broken=broken, slow_seconds=seconds)
        assert is_due_to_a_slow_machine(result) is explained
