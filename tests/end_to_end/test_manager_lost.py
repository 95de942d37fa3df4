"""Tests that a lost rollout manager costs the trainer no step: the trainer attaches to the next
manager and repeats its calls."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.distributed import run_ranks


class ForgetfulLink:
    """Link that loses its manager at the calls whose numbers are in `lost_at`, and records all
    calls."""

    def __init__(self, trainer: Any, lost_at: set[int]) -> None:
        self._trainer = trainer
        self._lost_at = lost_at
        self._calls = 0
        self._attached = True
        self._fresh = False
        self.calls: list[Any] = []

    def _call(self, *what: Any) -> None:
        from megatron_async.train_loop.manager_client import ManagerLost

        self._calls += 1
        if self._calls in self._lost_at:
            self._attached = False
        if not self._attached:
            self.calls.append((*what, "lost"))
            raise ManagerLost("the rollout manager has died")
        self.calls.append(what)

    def attach(self, resume: Any) -> None:
        self._attached, self._fresh = True, True
        position = (resume.lineage, resume.step, resume.parent, resume.store_position)
        self.calls.append(("attach", *position))

    def next_batch(self) -> Any:
        from megatron_async.rollout.trainer_task import TrainerTask

        self._call("next_batch")
        if self._fresh:  # Engines of a new manager need weights first.
            self._fresh = False
            return TrainerTask.SEND_WEIGHTS
        return SimpleNamespace(step=self._trainer.step, store_position=100 + self._trainer.step)

    def begin_update(self, number: int) -> list[Any]:
        self._call("begin_update", number)
        return []

    def end_update(self, number: int, *rest: Any) -> Any:
        self._call("end_update", number)
        self._fresh = False
        # Versions 0 and 2 are verified at once, version 1 during the next step.
        return number != 1

    def verification_samples(self, number: int) -> Any:
        self._call("verification_samples", number)
        return None

    def verify_update(self, number: int, *rest: Any) -> Any:
        self._call("verify_update", number)
        return SimpleNamespace(evaluation_due=number == 0, passed=True, metrics={})

    def evaluate(self, number: int) -> Any:
        self._call("evaluate", number)

    def position(self) -> dict[str, Any]:
        self._call("position")
        return {}

    def checkpoint_finalized(self, step: int, kept: Any) -> None:
        self._call("finalized", step)


def train(lost_at: set[int]) -> tuple[list[Any], list[int]]:
    """Run a loop of two steps over stand-ins, with one checkpoint for each step; return the
    recorded calls and the trained steps."""
    from megatron_async.checkpoint.manager import Finalized
    from megatron_async.rollout.manager import ResumePoint
    from megatron_async.train_loop.loop import TrainLoop
    from megatron_async.trajectory.types import PolicyVersion

    trained: list[int] = []
    commits: list[Finalized] = []
    trainer = SimpleNamespace(step=0, vocab_size=32, version=PolicyVersion(4, 0))
    link = ForgetfulLink(trainer, lost_at)

    def train_batch(batch: Any, before_update: Any) -> Any:
        before_update()
        trained.append(batch.step)
        trainer.step += 1
        trainer.version = PolicyVersion(4, trainer.step)
        return SimpleNamespace(skipped=False)

    def take() -> list[Finalized]:
        taken, commits[:] = list(commits), []
        return taken

    trainer.train_batch = train_batch
    checkpoints = SimpleNamespace(
        save=lambda trainer, extra: commits.append(Finalized(trainer.step, ())),
        wait=lambda: None,
        take_finalized=take,
    )
    config: Any = SimpleNamespace(
        steps=2,
        checkpoint=SimpleNamespace(every_steps=1),
        weights=SimpleNamespace(verify="never"),
    )
    publisher: Any = SimpleNamespace(publish=lambda *_: [], settle=lambda: None)
    resume = ResumePoint(4, 0, 3, 99)
    loop = TrainLoop(
        config=config,
        trainer=trainer,
        publisher=publisher,
        checkpoints=checkpoints,
        link=link,
        metrics=None,
        resume=resume,
    )  # type: ignore[arg-type]
    assert loop.run()
    return link.calls, trained


def lose_everywhere() -> dict[int, tuple[list[Any], list[int]]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = {call: train({call}) for call in range(22)}
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_every_step_is_trained_once_when_the_manager_dies_at_any_call(tmp_path: Path) -> None:
    found = run_ranks(lose_everywhere, 1, timeout_seconds=60)[0]
    undisturbed = found.pop(0)[0]
    assert not any(line[0] == "attach" for line in undisturbed)
    for number, (calls, trained) in found.items():
        assert trained == [0, 1], number
        attached = [line for line in calls if line[0] == "attach"]
        assert len(attached) == int(number <= len(undisturbed)), number
        for *_, step, _, position in attached:  # The position of the newest batch or of the resume.
            assert position == 99 + step, number
        successful = [line for line in calls if line[-1] != "lost"]
        for step in (1, 2):
            assert ("finalized", step) in successful
            assert successful.index(("end_update", step)) > successful.index(("begin_update", step))
    # If the manager is lost during an update, the new engines get the complete update.
    update = ["begin_update", "end_update", "verification_samples", "verify_update"]
    for call in update[1:]:
        calls = found[undisturbed.index((call, 2)) + 1][0]
        lost = calls.index((call, 2, "lost"))
        assert calls[lost + 1 : lost + 6] == [("attach", 4, 2, 3, 101), *((c, 2) for c in update)]
    # If it is lost during a verification in the middle of a step, the step is completed, and the
    # new engines get the next version.
    for call in update[2:]:
        assert undisturbed.index((call, 1)) > undisturbed.index(("next_batch",), 6)
        calls = found[undisturbed.index((call, 1)) + 1][0]
        lost = calls.index((call, 1, "lost"))
        assert calls[lost + 1 : lost + 4] == [
            ("begin_update", 2, "lost"),
            ("attach", 4, 2, 3, 101),
            ("begin_update", 2),
        ]
    # If the manager is lost at an evaluation, the new engines get the update before it.
    calls = found[undisturbed.index(("evaluate", 0)) + 1][0]
    lost = calls.index(("evaluate", 0, "lost"))
    assert calls[lost + 2 : lost + 7] == [*((call, 0) for call in update), ("evaluate", 0)]
