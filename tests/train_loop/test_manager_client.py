"""How long the trainer waits for the rollout side to be there, and for each of its answers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import ray
from ray.exceptions import RaySystemError

from megatron_async.config import RunConfig, build_config
from megatron_async.errors import ComponentFailure
from megatron_async.rollout.manager import ResumePoint, RolloutManager
from megatron_async.train_loop.manager_client import RayLink, RolloutLink, _manager_actor
from megatron_async.train_loop.stop import StopAsked


class NotingLink(RayLink):
    """Records the limit of every call in place of making it."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.limits: dict[str, float] = {}

    def _call(self, method: str, limit: float, *arguments: Any, **options: Any) -> Any:
        self.limits[method] = limit


def test_an_evaluation_may_take_longer_than_an_update() -> None:
    link = NotingLink(
        build_config({"eval": {"timeout_seconds": 5000}, "weights": {"timeout_seconds": 7}})
    )
    link.end_update(0, [], False)
    link.verify_update(0, None, False)
    link.evaluate(0)
    assert link.limits["end_update"] < 60
    assert link.limits["evaluate"] > 5000, "the rollout side gives up first, with its reason"


class Manager:
    """Ray's handle, whose calls never come to an end."""

    def __init__(self) -> None:
        self.call = self

    def remote(self, method: str, *arguments: Any) -> str:
        return method


def link(
    monkeypatch: pytest.MonkeyPatch,
    absent: Sequence[Exception],
    *,
    stop: bool = False,
    config: RunConfig | None = None,
) -> tuple[RayLink, list[str]]:
    """Looking for a manager raises `absent` first; an answer is there at the second look.

    Returns what was looked up and asked.
    """
    trouble, log = list(absent), []

    def get_actor(name: str) -> Manager:
        log.append(name)
        if trouble:
            raise trouble.pop(0)
        return Manager()

    looked: list[str] = []

    def at_the_second_look(answers: list[str], timeout: float) -> tuple[list[str], list[str]]:
        if looked == answers:
            looked.clear()
            return answers, []
        looked[:] = answers
        log.extend(answers)
        return [], answers

    monkeypatch.setattr(ray, "init", lambda **options: None)
    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray, "wait", at_the_second_look)
    monkeypatch.setattr(ray, "get", lambda answer, timeout: None)
    return RayLink(config or build_config({}), "127.0.0.1:1", lambda: stop), log


def test_attach_waits_for_the_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = ValueError("Failed to look up actor with name 'rollout_manager'.")
    ours, log = link(monkeypatch, [nobody, RaySystemError(RuntimeError("no GCS yet"))])
    ours.attach(ResumePoint(0))
    ours.attach(ResumePoint(0))
    assert log == ["rollout_manager"] * 3 + ["attach"] * 2


def test_a_manager_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_actor", lambda name: (_ for _ in ()).throw(ValueError(name)))
    with pytest.raises(ComponentFailure, match="waited 0 s for the rollout manager"):
        _manager_actor(0.1)


CALLS: dict[str, Callable[[RolloutLink], Any]] = {
    "next_batch": lambda link: link.next_batch(),
    "drop_batch": lambda link: link.drop_batch(4, "nonfinite"),
    "begin_update": lambda link: link.begin_update(4),
    "end_update": lambda link: link.end_update(4, ["engine0"], False),
    "verify_update": lambda link: link.verify_update(4, None, False),
    "evaluate": lambda link: link.evaluate(4),
    "position": lambda link: link.position(),
    "checkpoint_finalised": lambda link: link.checkpoint_finalised(4, [2, 4]),
}


@pytest.mark.parametrize("method", CALLS)
def test_every_call_carries_the_lineage_of_its_trainer(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """So that the manager can refuse one that was replaced; and its parameters are those sent."""
    sent: dict[str, tuple[Any, ...]] = {}

    def note(manager: Manager, name: str, *arguments: Any) -> str:
        sent[name] = arguments
        return name

    monkeypatch.setattr(Manager, "remote", note)
    ours, _ = link(monkeypatch, [])
    monkeypatch.setattr(ray, "wait", lambda answers, timeout: (answers, []))
    ours.attach(ResumePoint(3, 4))
    CALLS[method](ours)
    taken = inspect.signature(getattr(RolloutManager, method)).bind(None, *sent[method])
    assert taken.arguments["lineage"] == 3
    assert {taken.arguments.get(name, 4) for name in ("step", "number")} == {4}


@pytest.mark.parametrize("method", ["next_batch", "evaluate"])
def test_what_may_take_long_is_given_up_when_the_run_is_asked_to_stop(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    ours, log = link(monkeypatch, [], stop=True)
    ours.attach(ResumePoint(0))
    with pytest.raises(StopAsked):
        ours.next_batch() if method == "next_batch" else ours.evaluate(3)
    assert log[-1] == method


def test_colocated_engines_end_their_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come to rest after it; only then may the trainer have the memory."""
    engines, schedule = {"placement": "colocated"}, {"preset": "rapid", "updates_per_batch": 2}
    weights = {"transport": "tensor"}
    config = build_config({"engines": engines, "schedule": schedule, "weights": weights})
    ours, log = link(monkeypatch, [], stop=True, config=config)
    ours.attach(ResumePoint(0))
    ours.evaluate(3)
    assert log[-1] == "evaluate"
