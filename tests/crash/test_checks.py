"""Every check of the crash test passes on an honest account, and fails on a doctored one.

The account: line 0 trained steps 0, 1 and 2, and lost step 2 in a kill; line 1 went on from the
checkpoint of step 2 and trained steps 2 and 3. Trajectory i is in the batch of step i; trajectory 4
was dropped, trajectory 5 runs. Trajectory 3 was interrupted and lost two tokens, which were written
again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.crash.checks import (
    CHECKS,
    Rules,
    audit,
    lag_of,
    part_step,
    surviving_batches,
    surviving_path,
    tokens_lost,
)
from benchmarks.crash.evidence import Attach, Batch, Evidence, Kept, Request, Seen
from megatron_async.rollout.simulated_engine import SimulatedEngineModel
from megatron_async.trajectory.types import PolicyVersion

MODEL = SimulatedEngineModel(vocab_size=64, mean_length=10**9)
RULES = Rules(chunk_tokens=4, max_async_level=1, simulated=MODEL, stop_token_id=2)
PROMPT = (7, 9)
LENGTH = 8


def says(count: int, prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    """The simulated engine's answer."""
    tokens: list[int] = []
    for place in range(len(prompt), len(prompt) + count):
        tokens.append(MODEL.next_token(tokens[-1] if tokens else prompt[-1], place))
    return tuple(tokens)


def kept(trajectory_id: int, **changes: object) -> Kept:
    consumed = {0: (0, 0), 1: (0, 1), 2: (1, 2), 3: (1, 3)}.get(trajectory_id)
    version = {2: PolicyVersion(0, 2), 3: PolicyVersion(1, 2)}.get(
        trajectory_id, PolicyVersion(0, 0)
    )
    one = Kept(
        trajectory_id,
        "batched" if consumed else "dropped" if trajectory_id == 4 else "partial",
        PROMPT,
        says(LENGTH),
        (version,) * LENGTH,
        reward=1.0 if consumed else None,
        drop_reason="stale" if trajectory_id == 4 else None,
        consumed=consumed,
    )
    return replace(one, **changes)  # type: ignore[arg-type]


def batch(lineage: int, step: int, trajectory_id: int) -> Batch:
    return Batch(lineage, step, (trajectory_id,), (says(LENGTH),), lag=0)


def request(trajectory_id: int, start: int = 0, count: int = LENGTH, offset: int = 0) -> Request:
    first = len(PROMPT) + start
    return Request(trajectory_id, first, offset, says(LENGTH)[start : start + count], 2)


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
    )


def with_kept(trajectory_id: int, *copies: Kept) -> Evidence:
    return replace(honest(), kept={**honest().kept, trajectory_id: list(copies)})


def with_batches(*batches: Batch) -> Evidence:
    return replace(honest(), batches=[*honest().batches, *batches])


def test_an_honest_account_passes_every_check() -> None:
    assert {name: found for name, found in audit(honest(), RULES).items() if found} == {}
    assert [lost for _, _, lost, _ in tokens_lost(honest())] == [2]


def test_the_surviving_line_leaves_out_what_a_kill_undid() -> None:
    evidence = honest()
    assert surviving_path(evidence.attaches) == {1: None, 0: 2}
    steps = [(b.lineage, b.step) for b in surviving_batches(evidence)]
    assert steps == [(0, 0), (0, 1), (1, 2), (1, 3)]


def test_lag_counts_from_where_the_lines_part() -> None:
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
    ("finished trajectories lost", "kept 2 times", lambda: with_kept(0, kept(0), kept(0))),
    (
        "finished trajectories lost",
        "is partial now",
        lambda: with_kept(0, kept(0, state="partial")),
    ),
    (
        "finished trajectories lost",
        "had 8 tokens, now 7",
        lambda: with_kept(0, kept(0, tokens=says(7))),
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
        "dropped for no reason",
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
        lambda: with_kept(5, kept(5, tokens=says(1))),
    ),
    (
        "wrong tokens",
        "token 0 never arrived",
        lambda: with_kept(5, kept(5, tokens=(63, *says(LENGTH)[1:]))),
    ),
    (
        "wrong tokens",
        "not the engine's answer",
        lambda: replace(
            with_kept(5, kept(5, tokens=(11, 11))),
            requests={**honest().requests, 5: [Request(5, 2, 0, (11, 11), 2)]},
        ),
    ),
    (
        "wrong tokens",
        "trained with other tokens",
        lambda: with_kept(3, kept(3, tokens=says(LENGTH - 1))),
    ),
    (
        "lag bound broken",
        "trained at 1.3 with lag 3",
        lambda: with_kept(3, kept(3, versions=(PolicyVersion(0, 0),) * LENGTH)),
    ),
    (
        "lag bound broken",
        "batch 4 of line 1 came with lag 2",
        lambda: with_batches(replace(batch(1, 4, 5), lag=2)),
    ),
]


@pytest.mark.parametrize(("check", "says_what", "doctored"), DOCTORED)
def test_a_doctored_account_is_found_out(
    check: str, says_what: str, doctored: Callable[[], Evidence]
) -> None:
    found = audit(doctored(), RULES)[check]
    assert any(says_what in sentence for sentence in found), found


def test_every_check_has_a_doctored_account() -> None:
    assert {check for check, _, _ in DOCTORED} == set(CHECKS)
