"""Tests that library functions which run only on GPUs accept the arguments that the product passes.

No test on a CPU calls these functions. Without this module, an argument that a release renames
would be noticed only on the first GPU. The signatures that a torch for CPUs lacks are recorded from
a torch for GPUs (`NCCL`).
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import os
import re
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_async.config.rollout import EngineConfig, WeightsConfig
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.nccl_errors import WEIGHT_GROUP_VARIABLES
from megatron_async.weight_sync.transports.base import WeightSender
from megatron_async.weight_sync.transports.distributed import DistributedSender, _Link
from megatron_async.weight_sync.transports.tensor import _DEVICE_ARGUMENT, TensorSender
from tests.syntax import parse
from tests.weight_sync.fake_engine import PARAMETERS, FakeEngine, serving

ROOT = Path(__file__).parents[1]

# torch 2.14.1+cu130, read on 22 November 2026 from the GPU lock (launch/requirements-gpu-lock.txt).
NCCL = {
    "__init__": "store: torch._C._distributed_c10d.Store, rank: typing.SupportsInt | "
    "typing.SupportsIndex, size: typing.SupportsInt | typing.SupportsIndex, options: "
    "c10d::ProcessGroupNCCL::Options",
    "_set_default_timeout": "timeout: datetime.timedelta",
    "abort": "self: torch._C._distributed_c10d.Backend",
}
NCCL_OPTIONS = ("_timeout",)


def test_cuda_handle_has_its_device_at_the_index_that_the_sender_writes() -> None:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    assert list(inspect.signature(rebuild_cuda_tensor).parameters)[_DEVICE_ARGUMENT] == (
        "storage_device"
    )


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
@pytest.mark.parametrize("name", NCCL)
def test_nccl_process_group_has_the_recorded_signature(name: str) -> None:
    assert NCCL[name] in getattr(dist.ProcessGroupNCCL, name).__doc__
    assert all(hasattr(dist.ProcessGroupNCCL.Options, option) for option in NCCL_OPTIONS)


class _FinishedWork:
    """Handle of a collective that has already finished."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class RecordedNccl:
    """Stand-in that accepts only the arguments that `NCCL` has recorded, in this order."""

    class Options:
        __slots__ = NCCL_OPTIONS

    def __init__(self, *arguments: Any) -> None:
        names = re.findall(r"(\w+): ", NCCL["__init__"])
        named = dict(zip(names, arguments, strict=True))
        assert isinstance(named["store"], dist.Store)
        assert (named["rank"], named["size"]) == (0, 3)
        assert named["options"]._timeout > timedelta(0)
        assert {name: os.environ.get(name) for name in WEIGHT_GROUP_VARIABLES} == (
            WEIGHT_GROUP_VARIABLES
        )

    def _set_default_timeout(self, timeout: timedelta) -> None:
        assert timeout == timedelta(seconds=5)

    def abort(self) -> None:
        return None

    def broadcast(self, _tensors: list[torch.Tensor], options: Any) -> _FinishedWork:
        assert (options.rootRank, options.rootTensor) == (0, 0)
        return _FinishedWork()


def test_weight_link_creates_its_nccl_group_as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is rank 0 of a group of the sender and two engines."""
    assert RecordedNccl.__dict__.keys() >= NCCL.keys()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", RecordedNccl, raising=False)
    link = _Link("group", "nccl", socket.create_server(("127.0.0.1", 0)), 3)
    link.join()
    assert not WEIGHT_GROUP_VARIABLES.keys() & os.environ.keys()
    link.set_limit(5.0)
    link.start(torch.zeros(2))
    assert link.done
    link.finish()
    link.drop()


# ------------------------------------------------------------ SGLang's endpoints


@cache
def sglang_sources() -> tuple[ast.Module, ast.Module]:
    """Return the parsed sources of SGLang's HTTP server and messages, without importing them."""
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:
        pytest.skip("sglang is not installed")
    root = Path(found.origin).parent / "srt"
    server, messages = root / "entrypoints/http_server.py", root / "managers/io_struct.py"
    return parse(server.read_text()), parse(messages.read_text())


def message_of(endpoint: str) -> str | None:
    """Return the class whose fields a call of this endpoint accepts, or None if the endpoint has no
    body."""
    server, _ = sglang_sources()
    for node in ast.walk(server):
        if isinstance(node, ast.AsyncFunctionDef):
            routes = [ast.unparse(decorator) for decorator in node.decorator_list]
            if any(f"'/{endpoint}'" in route for route in routes):
                kinds = " ".join(ast.unparse(a.annotation) for a in node.args.args if a.annotation)
                bodies = re.findall(r"\w+ReqInput\b", kinds)
                return bodies[0] if bodies else None
    raise AssertionError(f"SGLang has no endpoint {endpoint}")


def fields_of(message: str) -> tuple[set[str], set[str]]:
    """Return all fields of a message, and its fields without a default, including fields of base
    classes."""
    _, messages = sglang_sources()
    classes = {node.name: node for node in messages.body if isinstance(node, ast.ClassDef)}
    fields: set[str] = set()
    required: set[str] = set()
    for base in classes[message].bases:
        if ast.unparse(base) in classes:
            inherited = fields_of(ast.unparse(base))
            fields |= inherited[0]
            required |= inherited[1]
    for line in classes[message].body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            fields.add(line.target.id)
            if line.value is None:
                required.add(line.target.id)
    return fields, required


class RecordingEngine(FakeEngine):
    """Fake engine that records the bodies of its requests."""

    def __init__(self) -> None:
        super().__init__("works")
        self.bodies: dict[str, dict[str, Any]] = {}

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.bodies.setdefault(path.strip("/"), {}).update(body)
        return super().answer(path, body)


def sent_by(make: Callable[..., WeightSender]) -> dict[str, dict[str, Any]]:
    engine = RecordingEngine()
    sender = make(WeightsConfig(timeout_seconds=30.0), EngineConfig(), torch.device("cpu"))
    with serving(engine, "engine") as address:
        sender.connect([address])
        sender.send([[(name, torch.zeros(4))] for name in PARAMETERS], PolicyVersion(0, 1))
        sender.close()
    return engine.bodies


def sent_by_client() -> dict[str, dict[str, Any]]:
    bodies: dict[str, dict[str, Any]] = {}

    async def post(path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        bodies[path.partition("?")[0]] = body or {}
        return {}

    async def make_every_call() -> None:
        client = SGLangClient("engine", "http://127.0.0.1:1", EngineConfig())
        client._post = post  # type: ignore[method-assign]
        await client.release_memory()
        await client.resume_memory(weights_only=False)
        await client.pause("retract")
        await client.resume()
        await client.load_from_disk(Path("/m"), PolicyVersion(0, 1))

    asyncio.run(make_every_call())
    return bodies


@pytest.mark.parametrize(
    "bodies",
    [partial(sent_by, DistributedSender), partial(sent_by, TensorSender), sent_by_client],
    ids=["distributed", "tensor", "client"],
)
def test_request_bodies_match_the_fields_of_sglang_endpoints(
    bodies: Callable[[], dict[str, dict[str, Any]]],
) -> None:
    sent = bodies()
    assert len(sent) >= 5, sent
    for endpoint, body in sent.items():
        message = message_of(endpoint)
        if message is None:
            assert not body, endpoint
            continue
        fields, required = fields_of(message)
        assert set(body) <= fields, f"{endpoint}: SGLang has no {set(body) - fields}"
        assert required <= set(body), f"{endpoint}: SGLang requires {required - set(body)}"
