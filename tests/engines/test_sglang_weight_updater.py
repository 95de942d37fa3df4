"""What a lost trainer leaves in an engine is ended when the next one's updates begin."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest

from megatron_async.engines.sglang.weight_updater import AheadHooks, join


@dataclass
class Group:
    aborted: bool = False

    def abort(self) -> None:
        self.aborted = True


@dataclass
class Updater:
    """SGLang's, as far as the hooks see it; `receive` and `destroy…` are called through them."""

    hooks: AheadHooks = field(default_factory=AheadHooks)
    _model_update_group: dict[str, Group] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def destroy_weights_update_group(self, name: str) -> tuple[bool, str]:
        return self.hooks.leave(Updater._destroy, self, name)

    def _destroy(self, name: str) -> tuple[bool, str]:
        state = "aborted" if self._model_update_group.pop(name).aborted else "alive"
        self.log.append(f"{name} {state}")
        return True, ""

    def join(self, *names: str) -> None:
        self._model_update_group.update({name: Group() for name in names})

    def update(self, *names: str) -> list[str]:
        """A whole update by the senders with these groups; the groups that are there after it."""
        self.hooks.begin(self)
        for name in names:
            self.hooks.receive(lambda updater, **asked: [], self, group_name=name)
        return sorted(self._model_update_group)


def test_groups_that_take_part_stay_however_many_updates_there_are() -> None:
    engine = Updater()
    engine.join("first stage", "last stage")
    for _ in range(4):
        assert engine.update("first stage", "last stage") == ["first stage", "last stage"]
    assert engine.log == []


def test_the_groups_of_a_trainer_killed_between_updates_end_after_one_update_without_them() -> None:
    engine = Updater()
    engine.join("old 0", "old 1")
    engine.update("old 0", "old 1")
    engine.join("new 0", "new 1")
    engine.update("new 0", "new 1")
    assert engine.update("new 0", "new 1") == ["new 0", "new 1"]
    assert sorted(engine.log) == ["old 0 aborted", "old 1 aborted"]


def test_a_group_that_its_sender_has_left_in_between_is_no_one_elses_business() -> None:
    engine = Updater()
    engine.join("one", "other")
    engine.update("one")
    engine._model_update_group.clear()
    engine.join("next")
    assert engine.update("next") == ["next"] and engine.log == []


def test_an_update_that_is_begun_twice_ends_nobody() -> None:
    engine = Updater()
    engine.join("ours")
    engine.hooks.begin(engine)
    assert engine.update("ours") == ["ours"]
    assert engine.update("ours") == ["ours"] and engine.log == []


def test_a_receive_that_is_posted_is_ended_with_its_group_when_an_update_begins() -> None:
    engine = Updater()
    engine.join("old")
    engine.update("old")
    posted: Any = engine.hooks._ahead
    posted.take("old", 4, 4, lambda tensor: _Done(), "cpu")
    engine.join("new")
    assert engine.update("new") == ["new"] and engine.log == ["old aborted"]


class _Done:
    def wait(self) -> None:
        return None


def test_joining_restores_the_users_variables_when_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    seen: list[tuple[str, str]] = []

    def original(_updater: Any, group_name: str) -> None:
        names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT")
        seen.append((os.environ[names[0]], os.environ[names[1]]))
        raise RuntimeError(group_name)

    with pytest.raises(RuntimeError, match="lost"):
        join(original, None, group_name="lost")
    assert seen == [("2", "1")]
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
