"""How long the trainer waits for each answer of the rollout side."""

from __future__ import annotations

from typing import Any

from megatron_async.config import RunConfig, build_config
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
