"""Provides a fake inference engine that receives weights over SGLang's HTTP endpoints and fails on
command.

    python -m tests.weight_sync.fake_engine MODE

This command runs a fake engine in a separate process and prints its port. MODE decides what the
engine does with each announced bucket: with `dies` the process exits, with `refuses` it replies
with status 400 and receives nothing, and with `works` it receives the bucket; its checksum is the
sum of the received bytes. `serving` runs a fake engine on a thread of the current process.

The server of engines/simulated cannot replace this engine: it imports no torch, stores no weights,
and would share only the endpoint `health`.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from benchmarks.gpu_check.ipc_child import named_tensors
from megatron_async.engines.sglang.receiver import answer
from megatron_async.weight_sync.http import EngineAddress
from megatron_async.weight_sync.prefetch import BucketPrefetcher, next_bytes_of
from megatron_async.weight_sync.receiver import WeightReceiver

PARAMETERS = ("x.weight", "y.weight")


class FakeEngine:
    """The state of a fake engine; each method `do_<endpoint>` handles one endpoint.

    A handler receives the body of the call, and returns the status and the body of the reply.
    """

    def __init__(self, mode: str, known: Iterable[str] = PARAMETERS) -> None:
        self.mode = mode
        self.known = tuple(known)
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.groups: dict[str, Any] = {}
        self.prefetcher = BucketPrefetcher()
        self.received: list[int] = []
        self.session = False
        # An engine loads one bucket at a time, so the fake engine does too.
        self.lock = threading.Lock()
        # Serves `receive_weights`; the test sets it.
        self.receiver: WeightReceiver | None = None
        self.before_receive: Callable[[], None] = lambda: None
        # The tensors of all updates so far, by name.
        self.loaded: dict[str, torch.Tensor] = {}
        self.version = ""
        # A bucket that contains the parameter of this name is refused; empty: none is.
        self.refuses = ""
        self.after_version: Callable[[], object] = lambda: None

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        handler = getattr(self, "do_" + path.strip("/").replace("/", "_"), None)
        return (404, {}) if handler is None else handler(body)

    def _set_version(self, body: dict[str, Any]) -> None:
        """Set the engine's version, and call `after_version`, if the call's body has a version.

        Only the last call of an update has one.
        """
        if "weight_version" in body:
            self.version = body["weight_version"]
            self.after_version()

    def do_reset(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.received, self.session = [], False
        return 200, {}

    def do_health(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return 200, {}

    def do_weights_checker(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        total = str(sum(self.received))
        ranks = [{"checksums": dict.fromkeys(self.known, total)}]
        return 200, {"ranks": ranks, "per_engine_checksum": total}

    def do_init_weights_update_group(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        name, size = body["group_name"], body["world_size"]
        store = dist.TCPStore(
            body["master_address"], body["master_port"], size, timeout=timedelta(seconds=20)
        )
        prefixed = dist.PrefixStore(
            "cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store))
        )
        self.groups[name] = dist.ProcessGroupGloo(
            prefixed, body["rank_offset"], size, timeout=timedelta(seconds=600)
        )
        return 200, {}

    def do_destroy_weights_update_group(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        group = self.groups.pop(body["group_name"], None)
        if group is not None and self.prefetcher.forget(body["group_name"]):
            group.abort()
        return 200, {}

    def do_begin_weight_update(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.session:
            return 400, {"message": "a weight-update session is already open"}
        self.session = True
        for name in self.prefetcher.clear() & self.groups.keys():
            self.groups.pop(name).abort()
        return 200, {}

    def do_end_weight_update(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.session = False
        return 200, {}

    def do_update_weights_from_distributed(
        self, body: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        if self.mode == "dies":
            os._exit(1)
        if self.mode == "refuses" or self.refuses in body["names"]:
            return 400, {"message": "not enough memory for these weights"}
        self.calls.append((body["group_name"], tuple(body["names"])))
        sizes = [
            torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            for shape, dtype in zip(body["shapes"], body["dtypes"], strict=True)
        ]
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        group, next_bytes = self.groups[body["group_name"]], next_bytes_of(body["load_format"])
        assert next_bytes is not None
        with self.lock:
            try:
                flat = self.prefetcher.take(
                    body["group_name"],
                    sum(sizes),
                    next_bytes,
                    lambda tensor: group.broadcast([tensor], options),
                    "cpu",
                )
            except (RuntimeError, ValueError) as error:
                return 400, {"message": f"Failed to receive weights: {error}"}
        self.received.append(int(flat.sum()))
        for name, dtype, shape, data in zip(
            body["names"], body["dtypes"], body["shapes"], flat.split(sizes), strict=True
        ):
            self.loaded[name] = data.clone().view(getattr(torch, dtype)).view(shape)
        self._set_version(body)
        return 200, {}

    def do_update_weights_from_tensor(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        assert body["load_format"] == "flattened_bucket"
        named = named_tensors(pickle.loads(base64.b64decode(body["serialized_named_tensors"][0])))
        if self.refuses in dict(named):
            return 400, {"message": "not enough memory for these weights"}
        self.calls.append(("tensor", tuple(name for name, _ in named)))
        self.loaded.update(named)
        self._set_version(body)
        return 200, {}

    def do_receive_weights(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        assert self.receiver is not None
        self.before_receive()
        status, content = answer(self.receiver, body)
        return int(status), content

    def do_update_weights_from_disk(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.loaded = {}
        for shard in sorted(Path(body["model_path"]).glob("*.safetensors")):
            self.loaded |= load_file(shard)
        self._set_version(body)
        return 200, {}


def make_server(engine: FakeEngine) -> ThreadingHTTPServer:
    """Return an HTTP server for the engine's endpoints on a free port, which does not serve yet."""

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            status, answer = engine.answer(self.path, body or {})
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _serve

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@contextmanager
def serving(engine: FakeEngine, name: str) -> Iterator[EngineAddress]:
    """Serve the engine on a thread of this process; yield its address, with `name` as the engine's
    ID."""
    server = make_server(engine)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield EngineAddress(name, f"http://127.0.0.1:{server.server_address[1]}")
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def main() -> None:
    server = make_server(FakeEngine(sys.argv[1]))
    print(server.server_address[1], flush=True)
    # The standard input closes when the test process dies; this process must then end too.
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
