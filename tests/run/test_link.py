"""How long the trainer waits for the rollout side to be there, and for each of its answers."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from megatron_async.config import RunConfig, build_config
from megatron_async.errors import ComponentFailure
from megatron_async.run.link import RayLink


class NotingLink(RayLink):
    """Notes the limit of every call in place of making it."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.limits: dict[str, float] = {}

    def _call(self, method: str, limit: float, *arguments: Any) -> Any:
        self.limits[method] = limit


def test_an_evaluation_may_take_longer_than_an_update() -> None:
    link = NotingLink(
        build_config({"eval": {"timeout_seconds": 5000}, "weights": {"timeout_seconds": 7}})
    )
    link.end_update(0, [], None, None)
    link.evaluate(0)
    assert link.limits["end_update"] < 60
    assert link.limits["evaluate"] > 5000, "the rollout side gives up first, and says why"


def link(monkeypatch: pytest.MonkeyPatch, absent: int, seconds: float) -> tuple[RayLink, list[str]]:
    """Made while no manager answers to its name for the first `absent` questions."""
    asked: list[str] = []

    def get_actor(name: str) -> str:
        asked.append(name)
        if len(asked) <= absent:
            raise ValueError(f"Failed to look up actor with name '{name}'.")
        return "the manager"

    monkeypatch.setattr(ray, "init", lambda **options: None)
    monkeypatch.setattr(ray, "get_actor", get_actor)
    config = build_config({"engines": {"start_timeout_seconds": seconds}})
    return RayLink(config, "127.0.0.1:1"), asked


def test_it_waits_for_the_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked = link(monkeypatch, absent=2, seconds=30)
    assert asked == ["rollout_manager"] * 3


def test_a_manager_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ComponentFailure, match="waited 0 s for the rollout manager"):
        link(monkeypatch, absent=1000, seconds=0.1)
