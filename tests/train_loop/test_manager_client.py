"""Tests how long the trainer waits for the rollout side to start, and for the result of each
call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest

from megatron_async.config import RunConfig, build_config
from megatron_async.errors import ComponentFailure
from megatron_async.process_backends.backend import (
    CallRecorder,
    RemoteObjectDead,
    RemoteObjectLost,
    recorded,
)
from megatron_async.rollout.manager import RolloutManager
from megatron_async.rollout.manager_host import MANAGER_NAME, ManagerHost
from megatron_async.rollout.messages import NotAttached, ResumePoint
from megatron_async.train_loop.manager_client import ManagerLost, RemoteLink, RolloutLink
from megatron_async.train_loop.stop import StopAsked
from megatron_async.trajectory.types import PolicyVersion


class RecordingLink(RemoteLink):
    """Link that records the time limit of every call instead of making the call."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.limits: dict[str, float] = {}

    def _call(self, what: Any, limit: float, unless_stopped: bool = False) -> Any:
        self.limits[what(CallRecorder(), 0).method] = limit


def test_evaluate_call_has_a_longer_limit_than_update_calls() -> None:
    link = RecordingLink(
        build_config({"eval": {"timeout_seconds": 5000}, "weights": {"timeout_seconds": 7}})
    )
    link.end_update(0, [], False)
    link.verify_update(0, None, False)
    link.evaluate(0)
    assert link.limits["end_update"] < 60
    assert link.limits["evaluate"] > 5000, "the rollout side must fail first, with its reason"


class Manager:
    """Remote manager that first raises the exceptions in `absent`, and returns results on the
    second poll."""

    def __init__(self, absent: Sequence[Exception] = ()) -> None:
        self.failures = list(absent)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def find(self, name: str, what: type) -> Manager:
        assert (name, what) == (MANAGER_NAME, ManagerHost)
        return self

    def call_blocking(self, what: Any, *, limit: float, while_waiting: Callable[[], None]) -> None:
        [call] = recorded(what).arguments
        self.calls.append((call.method, call.arguments))
        if self.failures:
            raise self.failures.pop(0)
        while_waiting()

    @property
    def methods(self) -> list[str]:
        return [method for method, _ in self.calls]


def link(manager: Any, *, stop: bool = False, config: RunConfig | None = None) -> RemoteLink:
    return RemoteLink(config or build_config({}), manager, lambda: stop)


def test_attach_retries_until_the_manager_is_available() -> None:
    manager = Manager([RemoteObjectLost("not started yet"), NotAttached("lost half-way")])
    attached = link(manager)
    attached.attach(ResumePoint(0))
    attached.attach(ResumePoint(0))
    assert manager.methods == ["attach"] * 4


def test_attach_fails_when_the_manager_never_starts() -> None:
    config = build_config({"engines": {"start_timeout_seconds": 0.1}})
    manager = Manager([RemoteObjectLost("rollout-manager does not exist")] * 1000)
    with (
        mock.patch("megatron_async.train_loop.manager_client._CALL_SECONDS", 0.2),
        pytest.raises(
            ComponentFailure, match=r"did not restart within \d s: rollout-manager does not exist"
        ),
    ):
        link(manager, config=config).attach(ResumePoint(0))


def test_attach_fails_immediately_when_the_manager_is_dead() -> None:
    manager = Manager([RemoteObjectDead("rollout-manager has died")] * 1000)
    with pytest.raises(ComponentFailure, match="rollout-manager has died"):
        link(manager).attach(ResumePoint(0))
    assert manager.methods == ["attach"]


@pytest.mark.parametrize("lost", [RemoteObjectLost("it has died"), NotAttached("a new manager")])
def test_call_raises_manager_lost_when_the_manager_fails_during_it(lost: Exception) -> None:
    manager = Manager()
    attached = link(manager)
    attached.attach(ResumePoint(0))
    manager.failures = [lost]
    with pytest.raises(ManagerLost, match=str(lost)):
        attached.next_batch()


CALLS: dict[str, Callable[[RolloutLink], Any]] = {
    "next_batch": lambda link: link.next_batch(),
    "drop_batch": lambda link: link.drop_batch(4, "nonfinite"),
    "begin_update": lambda link: link.begin_update(4),
    "end_update": lambda link: link.end_update(4, ["engine0"], False),
    "verification_samples": lambda link: link.verification_samples(4),
    "verify_update": lambda link: link.verify_update(4, None, False),
    "evaluate": lambda link: link.evaluate(4),
    "position": lambda link: link.position(),
    "checkpoint_finalized": lambda link: link.checkpoint_finalized(4, [PolicyVersion(3, 4)]),
}


@pytest.mark.parametrize("method", CALLS)
def test_every_manager_call_has_the_lineage_of_its_trainer(method: str) -> None:
    """The manager uses the lineage to refuse superseded trainers. The sent parameters must match
    the manager's signature."""
    manager = Manager()
    attached = link(manager)
    attached.attach(ResumePoint(3, 4))
    CALLS[method](attached)
    called, sent = manager.calls[-1]
    assert called == method
    bound = inspect.signature(getattr(RolloutManager, method)).bind(None, *sent)
    assert bound.arguments["lineage"] == 3
    assert {bound.arguments.get(name, 4) for name in ("step", "number")} == {4}


@pytest.mark.parametrize("method", CALLS)
def test_only_long_manager_calls_are_canceled_by_a_stop_request(method: str) -> None:
    manager = Manager()
    attached = link(manager, stop=True)
    attached.attach(ResumePoint(0))
    if method in ("next_batch", "evaluate"):
        with pytest.raises(StopAsked):
            CALLS[method](attached)
    else:
        CALLS[method](attached)
    assert manager.methods[-1] == method


def test_evaluate_is_not_canceled_by_a_stop_when_engines_are_colocated() -> None:
    """Colocated engines pause after the evaluation; only then may the trainer use the memory."""
    engines, schedule = {"placement": "colocated"}, {"preset": "rapid", "updates_per_batch": 2}
    weights = {"transport": "tensor"}
    config = build_config({"engines": engines, "schedule": schedule, "weights": weights})
    manager = Manager()
    attached = link(manager, stop=True, config=config)
    attached.attach(ResumePoint(0))
    attached.evaluate(3)
    assert manager.methods[-1] == "evaluate"
