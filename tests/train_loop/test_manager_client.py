"""How long the trainer waits for the rollout side to be there, and for each of its answers."""

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


class NotingLink(RemoteLink):
    """Records the limit of every call in place of making it."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.limits: dict[str, float] = {}

    def _call(self, what: Any, limit: float, unless_stopped: bool = False) -> Any:
        self.limits[what(CallRecorder(), 0).method] = limit


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
    """A placed manager: `absent` is raised first; an answer is there at the second look."""

    def __init__(self, absent: Sequence[Exception] = ()) -> None:
        self.trouble = list(absent)
        self.asked: list[tuple[str, tuple[Any, ...]]] = []

    def find(self, name: str, what: type) -> Manager:
        assert (name, what) == (MANAGER_NAME, ManagerHost)
        return self

    def call_blocking(self, what: Any, *, limit: float, while_waiting: Callable[[], None]) -> None:
        [call] = recorded(what).arguments
        self.asked.append((call.method, call.arguments))
        if self.trouble:
            raise self.trouble.pop(0)
        while_waiting()

    @property
    def methods(self) -> list[str]:
        return [method for method, _ in self.asked]


def link(manager: Any, *, stop: bool = False, config: RunConfig | None = None) -> RemoteLink:
    return RemoteLink(config or build_config({}), manager, lambda: stop)


def test_attach_waits_for_the_manager() -> None:
    manager = Manager([RemoteObjectLost("not started yet"), NotAttached("lost half-way")])
    ours = link(manager)
    ours.attach(ResumePoint(0))
    ours.attach(ResumePoint(0))
    assert manager.methods == ["attach"] * 4


def test_a_manager_that_never_comes_is_named() -> None:
    config = build_config({"engines": {"start_timeout_seconds": 0.1}})
    manager = Manager([RemoteObjectLost("rollout-manager is not there")] * 1000)
    with (
        mock.patch("megatron_async.train_loop.manager_client._CALL_SECONDS", 0.2),
        pytest.raises(
            ComponentFailure, match=r"did not restart within \d s: rollout-manager is not there"
        ),
    ):
        link(manager, config=config).attach(ResumePoint(0))


def test_a_manager_that_is_dead_for_good_is_not_waited_for() -> None:
    manager = Manager([RemoteObjectDead("rollout-manager has died")] * 1000)
    with pytest.raises(ComponentFailure, match="rollout-manager has died"):
        link(manager).attach(ResumePoint(0))
    assert manager.methods == ["attach"]


@pytest.mark.parametrize("lost", [RemoteObjectLost("it has died"), NotAttached("a new manager")])
def test_a_manager_that_is_lost_in_a_call_is_attached_to_again(lost: Exception) -> None:
    manager = Manager()
    ours = link(manager)
    ours.attach(ResumePoint(0))
    manager.trouble = [lost]
    with pytest.raises(ManagerLost, match=str(lost)):
        ours.next_batch()


CALLS: dict[str, Callable[[RolloutLink], Any]] = {
    "next_batch": lambda link: link.next_batch(),
    "drop_batch": lambda link: link.drop_batch(4, "nonfinite"),
    "begin_update": lambda link: link.begin_update(4),
    "end_update": lambda link: link.end_update(4, ["engine0"], False),
    "verify_update": lambda link: link.verify_update(4, None, False),
    "evaluate": lambda link: link.evaluate(4),
    "position": lambda link: link.position(),
    "checkpoint_finalized": lambda link: link.checkpoint_finalized(4, [PolicyVersion(3, 4)]),
}


@pytest.mark.parametrize("method", CALLS)
def test_every_call_carries_the_lineage_of_its_trainer(method: str) -> None:
    """So that the manager can refuse one that was replaced; and its parameters are those sent."""
    manager = Manager()
    ours = link(manager)
    ours.attach(ResumePoint(3, 4))
    CALLS[method](ours)
    asked, sent = manager.asked[-1]
    assert asked == method
    taken = inspect.signature(getattr(RolloutManager, method)).bind(None, *sent)
    assert taken.arguments["lineage"] == 3
    assert {taken.arguments.get(name, 4) for name in ("step", "number")} == {4}


@pytest.mark.parametrize("method", CALLS)
def test_what_may_take_long_is_given_up_when_the_run_is_asked_to_stop(method: str) -> None:
    manager = Manager()
    ours = link(manager, stop=True)
    ours.attach(ResumePoint(0))
    if method in ("next_batch", "evaluate"):
        with pytest.raises(StopAsked):
            CALLS[method](ours)
    else:
        CALLS[method](ours)
    assert manager.methods[-1] == method


def test_colocated_engines_end_their_evaluation() -> None:
    """They come to rest after it; only then may the trainer have the memory."""
    engines, schedule = {"placement": "colocated"}, {"preset": "rapid", "updates_per_batch": 2}
    weights = {"transport": "tensor"}
    config = build_config({"engines": engines, "schedule": schedule, "weights": weights})
    manager = Manager()
    ours = link(manager, stop=True, config=config)
    ours.attach(ResumePoint(0))
    ours.evaluate(3)
    assert manager.methods[-1] == "evaluate"
