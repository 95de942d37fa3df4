"""Tests that requests that are sent together reach SGLang's scheduler in few messages."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megatron_async.engines.sglang import burst
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.engines.sglang.queue import URGENT
from tests.engine import EngineUnderTest, collect, make_request


class Message(SimpleNamespace):
    """Stand-in for SGLang's tokenized request with `tokens` tokens."""


class Manager:
    """Stand-in for SGLang's tokenizer manager that records what reaches the scheduler."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self._collector = burst.Collector()

    def batch_tokenized_generate_req_type(self, batch: list[Any]) -> list[Any]:
        return batch

    def dispatch(self, message: Any) -> None:
        def original(manager: Manager, dispatched: Any) -> None:
            manager.sent.append(dispatched)

        self._collector.dispatch(original, self, message)

    def request(self, name: str, together: int, tokens: int = 10) -> None:
        priority = burst.priority_of(together) if together > 1 else None
        self.dispatch(Message(rid=name, priority=priority, input_ids=[0] * tokens))

    @property
    def names(self) -> list[list[str]]:
        """Ids of the requests in each message; other messages are shown as their text."""
        return [
            [one.rid for one in sent] if isinstance(sent, list) else [getattr(sent, "rid", sent)]
            for sent in self.sent
        ]


@pytest.fixture
def manager() -> Any:
    struct = "sglang.srt.managers.io_struct"
    modules = {struct: SimpleNamespace(TokenizedGenerateReqInput=Message)}
    with (
        mock.patch.dict("sys.modules", modules),
        mock.patch.object(burst, "_tokens_of_a_pass", lambda: 100),
        mock.patch.object(burst, "_QUIET_SECONDS", 0.05),
    ):
        yield Manager()


async def test_requests_are_passed_on_together_when_all_have_arrived(manager: Manager) -> None:
    manager.request("single", 1)
    for number in range(3):
        assert manager.names == [["single"]]
        manager.request(f"r{number}", 3)
    assert manager.names == [["single"], ["r0", "r1", "r2"]]
    manager.request("next", 1)
    assert manager.names[2:] == [["next"]]


async def test_requests_are_passed_on_when_they_fill_a_prefill_pass(manager: Manager) -> None:
    for number in range(5):
        manager.request(f"r{number}", 5, tokens=50)
    assert manager.names == [["r0", "r1"], ["r2", "r3"], ["r4"]], "the last one waits for no other"


async def test_requests_are_passed_on_when_no_further_one_arrives(manager: Manager) -> None:
    manager.request("r0", 5)
    await asyncio.sleep(0.03)
    manager.request("r1", 5)
    await asyncio.sleep(0.03)
    assert manager.names == []
    await asyncio.sleep(0.05)
    assert manager.names == [["r0", "r1"]]


async def test_urgent_request_does_not_wait_for_collected_requests(manager: Manager) -> None:
    manager.request("r0", 5)
    manager.dispatch(Message(rid="probe", priority=URGENT, input_ids=[0]))
    assert manager.names == [["probe"]]


async def test_abort_follows_the_requests_that_arrived_before_it(manager: Manager) -> None:
    manager.request("r0", 5)
    manager.request("single", 1)
    manager.dispatch("abort r0")
    assert manager.names == [["r0", "single"], ["abort r0"]]


@pytest.mark.engine
@pytest.mark.slow
def test_many_requests_sent_together_need_few_prefill_passes(
    sglang_engine: EngineUnderTest,
) -> None:
    sglang_engine.reset_to("a")
    count = 340

    def passes() -> int:
        return sglang_engine.process.log_path.read_text(errors="replace").count("Prefill batch")

    async def ask(client: SGLangClient) -> None:
        requests = [
            make_request(f"r{i}", [5, i % 100, i // 100] * 4, 4, together=count)
            for i in range(count)
        ]
        answers = await asyncio.gather(*(collect(client, request) for request in requests))
        assert all(sum(len(chunk.token_ids) for chunk in chunks) == 4 for chunks in answers)

    before = passes()
    sglang_engine.run(ask)
    assert passes() - before <= 10
