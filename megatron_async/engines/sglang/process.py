"""Starts, watches and ends one SGLang server process (or its stand-in, `engines.kind: simulated`).

    server = SGLangProcess(model_dir, EngineConfig(), log_path=run_dir / "engine0.log")
    server.start()          # returns when the server answers, or raises ComponentFailure
    ... server.url ...
    server.stop()

Invariants
- A server lives in a process group of its own; `stop` returns when no process of the group is
  left. If whoever started it dies without `stop`, the server ends itself (a lifeline).
- `start` never waits longer than `engines.start_timeout_seconds`, and notices at once when the
  process ends. Either failure is a ComponentFailure that quotes the cause from the log.
- No port is fixed: the kernel picks a free one, and a start that loses the race for it is
  repeated with another.
"""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_async.config.rollout import EngineConfig
from megatron_async.config.sampling_contract import without_breaking_variables
from megatron_async.engines.nodes import (
    communication_environment,
    is_loopback,
    reserve_port,
    without_expandable_segments,
)
from megatron_async.engines.sglang import models
from megatron_async.engines.sglang.server import (
    CPU_ATTENTION_BACKEND,
    CPU_VARIABLE,
    DIRECTORY_VARIABLE,
    KEY_VARIABLE,
)
from megatron_async.errors import ComponentFailure, ProcessKilled
from megatron_async.files.disk import writing
from megatron_async.files.private_directory import private_directory, temporary_files
from megatron_async.models.architecture import read_config_json, yarn_context
from megatron_async.process_backends.child_process import (
    TAIL_CHARACTERS,
    ChildProcess,
    module_command,
)
from megatron_async.runtime.gpus import sees_gpu
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.http import EngineAddress, EngineCallError, call

_PORT_ATTEMPTS = 3
_POLL_SECONDS = 0.1
_HEALTH_SECONDS = 2.0
_TERMINATE_SECONDS = 3.0
_PORT_TAKEN = "address already in use"
# What a fresh server reports to hold: no version of any run, until the first update has verified.
NO_VERSION = PolicyVersion(-1, 0)


def resolve_device(settings: EngineConfig) -> str:
    """`cpu` or `cuda`; `auto` is cuda where torch sees a GPU. A simulated engine needs neither."""
    if settings.kind == "simulated":
        return "cpu"
    if settings.device != "auto":
        return settings.device
    return "cuda" if sees_gpu() else "cpu"


def resolve_dtype(settings: EngineConfig, device: str) -> str:
    """The weights' type: float32 on CPU and bfloat16 on GPU unless set."""
    if settings.dtype != "auto":
        return settings.dtype
    return "float32" if device == "cpu" else "bfloat16"


def server_command(
    settings: EngineConfig,
    model_path: Path,
    port: int,
    device: str,
    awaits_weights: bool = False,
) -> list[str]:
    """The command line of one server.

    Token ids go in and come out, so SGLang's tokenizer and detokenizer are off. `awaits_weights`:
    it serves nothing before an update has replaced all weights, so on a GPU none are read from the
    model's files. In half precision the head's logits stay in float32, as the trainer's do.
    """
    dtype = resolve_dtype(settings, device)
    command = [
        *module_command("megatron_async.engines.sglang.server"),
        f"--model-path={model_path}",
        f"--host={settings.host}",
        f"--port={port}",
        f"--device={device}",
        f"--dtype={dtype}",
        f"--tp-size={settings.tensor}",
        f"--weight-version={NO_VERSION}",
        f"--stream-interval={settings.stream_interval}",
        "--incremental-streaming-output",
        "--skip-tokenizer-init",
        "--enable-metrics",
        "--log-level=info",
        "--log-level-http=warning",
        "--decode-log-interval=500",
    ]
    if dtype != "float32":
        command.append("--enable-fp32-lm-head")
    if device == "cpu":
        # An idle scheduler otherwise polls without pause and takes the trainer's cores.
        command += ["--attention-backend", CPU_ATTENTION_BACKEND, "--sleep-on-idle"]
        command += ["--skip-server-warmup"]  # nothing is compiled; it would take two seconds
    if settings.max_total_tokens is not None:
        command += ["--max-total-tokens", str(settings.max_total_tokens)]
    if settings.max_running_requests is not None:
        command += ["--max-running-requests", str(settings.max_running_requests)]
    if settings.cuda_graph_batch is not None and device == "cuda":
        command += ["--cuda-graph-max-bs-decode", str(settings.cuda_graph_batch)]
    if settings.context_length is not None:
        command += ["--context-length", str(settings.context_length)]
    if settings.placement == "colocated" and device == "cuda":
        command += ["--enable-memory-saver"]
    if override := _override(settings, model_path):
        command += ["--json-model-override-args", json.dumps(override)]
    if settings.quantization == "fp8" or (awaits_weights and device == "cuda"):
        command += ["--load-format", "dummy"]
    return [*command, *settings.extra_args]


def _override(settings: EngineConfig, model_path: Path) -> dict[str, Any]:
    """Settings of the model that SGLang takes instead of those in its config.json."""
    override: dict[str, Any] = {}
    if (model_path / "config.json").is_file():
        context = yarn_context(read_config_json(model_path))
        override |= {"max_position_embeddings": context} if context else {}
    if settings.quantization == "fp8":
        # Imported here: whoever only starts servers need not import torch.
        from megatron_async.models.families import read_architecture
        from megatron_async.weight_sync.quantize import quantization_config

        # The directory has no fp8 weights: they come with the first update, as every version does.
        override["quantization_config"] = quantization_config(read_architecture(model_path))
    return override


def server_environment(
    settings: EngineConfig, device: str, gpus: Sequence[str] | None, base: Mapping[str, str]
) -> dict[str, str]:
    """The environment of one server: offline, a cheap health check, one thread per CPU rank.

    Nothing in it changes what is sampled or the log-probs of it. How it communicates is as in the
    trainer (`engines.nodes`).

    The key is here because every user of the machine can read command lines.
    """
    environment = without_breaking_variables(base)
    local = is_loopback(settings.host)
    environment |= communication_environment(base, one_machine=local, nvls=settings.uses_nvls)
    if settings.placement == "colocated":
        environment |= without_expandable_segments(base)
    environment[KEY_VARIABLE] = settings.api_key
    environment["HF_HUB_OFFLINE"] = "1"
    environment["PYTHONUNBUFFERED"] = "1"
    # Otherwise /health generates a token, and a paused engine looks dead.
    environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    # Otherwise it imports all of its models at each start, not only for one that is not in here.
    environment.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", models.__name__)
    if device == "cpu":
        environment[CPU_VARIABLE] = "1"
        # More threads fight the server's own processes: 150 -> 8 tokens/s at concurrency 1.
        environment["OMP_NUM_THREADS"] = "1"
        environment["CUDA_VISIBLE_DEVICES"] = ""
        # KV tokens kept free for each new request, instead of 4096: 96 requests of up to 1,900 run
        # at once in 65,536, not 34. Where responses fill it after all, SGLang retracts some.
        environment.setdefault("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "256")
        if settings.tensor > 1:
            cores = [str(core % (os.cpu_count() or 1)) for core in range(settings.tensor)]
            environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(cores))
    elif gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return environment


def rendezvous_of_ranks(settings: EngineConfig, directory: Path, port: int) -> dict[str, str]:
    """Environment in which a server's ranks make their process group by a file.

    SGLang's own store listens on every interface, without a key. An engine that other machines
    reach keeps it. Several ranks were tried on CPUs alone.
    """
    if not is_loopback(settings.host):
        return {}
    return {
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{directory}/ranks",
        # SGLang takes the names of its shared memory from these where no store has an address.
        "MASTER_ADDR": settings.host,
        "MASTER_PORT": str(port),
    }


def simulated_command(settings: EngineConfig, model_path: Path, port: int) -> list[str]:
    """The command line of one simulated server."""
    return [
        *module_command("megatron_async.engines.simulated.server"),
        f"--model-path={model_path}",
        f"--port={port}",
        f"--weight-version={NO_VERSION}",
        f"--settings={settings.model_dump_json(exclude={'api_key'})}",
    ]


@dataclass(eq=False, repr=False)  # the settings hold a key
class SGLangProcess:
    """An SGLang server: start, url, alive, stop. Not thread-safe; blocking.

    `awaits_weights`: see `server_command`.
    """

    model_path: Path
    settings: EngineConfig
    log_path: Path
    gpus: Sequence[str] | None = None
    awaits_weights: bool = False
    _process: ChildProcess | None = field(default=None, init=False)
    _url: str = field(default="", init=False)
    _files: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False)

    @property
    def url(self) -> str:
        """`http://host:port` of the running server."""
        if not self._url:
            raise ComponentFailure("the inference server was asked for its url before it started")
        return self._url

    @property
    def pid(self) -> int | None:
        """Process (and process group) id of the running server."""
        return None if self._process is None else self._process.pid

    def alive(self) -> bool:
        """Return whether the server process exists (not whether it answers)."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises ComponentFailure, quoting the end of the log, when the process ends or the limit
        passes; nothing is left running then.
        """
        if self.alive():
            return
        deadline = time.monotonic() + self.settings.start_timeout_seconds
        for attempt in range(_PORT_ATTEMPTS):
            with reserve_port(self.settings.host) as held:
                port = int(held.getsockname()[1])
                server = self._spawn(port)
                try:
                    self._wait_until_ready(server, port, deadline)
                    return
                except BaseException as error:
                    self.stop()
                    last = attempt + 1 == _PORT_ATTEMPTS
                    if last or not _port_taken(server) or not isinstance(error, ComponentFailure):
                        raise

    def stop(self) -> None:
        """End the server and all its processes; returns when none is left. Idempotent."""
        process, self._process, self._url = self._process, None, ""
        with self._files:
            if process is not None:
                process.end(_TERMINATE_SECONDS)

    def _spawn(self, port: int) -> ChildProcess:
        device = resolve_device(self.settings)
        environment = server_environment(self.settings, device, self.gpus, os.environ)
        if self.settings.kind == "simulated":
            command = simulated_command(self.settings, self.model_path, port)
        else:
            command = server_command(
                self.settings, self.model_path, port, device, self.awaits_weights
            )
            shared = self._files.enter_context(private_directory())
            environment |= rendezvous_of_ranks(self.settings, shared, port)
            environment |= temporary_files(shared, environment)
            environment[DIRECTORY_VARIABLE] = str(shared)
        with writing(self.log_path):
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            if self.settings.api_key:  # SGLang logs all of its settings, the key included.
                self.log_path.touch(mode=0o600)
                self.log_path.chmod(0o600)  # An earlier start may have had no key.
        self._process = ChildProcess(
            command, log=self.log_path, lifeline=True, env=environment, stdin=subprocess.DEVNULL
        )
        return self._process

    def _wait_until_ready(self, server: ChildProcess, port: int, deadline: float) -> None:
        while True:
            if server.poll() is not None:
                code = server.returncode
                kind = ProcessKilled if code < 0 else ComponentFailure
                raise kind(
                    f"the inference server ended with exit code {code} before it was ready"
                    f"{server.why()}"
                )
            url = f"http://{self.settings.host}:{port}"
            with contextlib.suppress(EngineCallError):
                address = EngineAddress("", url)
                call(address, "GET", "health", None, _HEALTH_SECONDS, self.settings.api_key)
                self._url = url
                return
            if _port_taken(server):  # SGLang may live on without ever listening
                raise ComponentFailure(f"the inference server found its port taken{server.why()}")
            if time.monotonic() > deadline:
                raise ComponentFailure(
                    "the inference server was not ready within engines.start_timeout_seconds = "
                    f"{self.settings.start_timeout_seconds:g}{server.why()}"
                )
            time.sleep(_POLL_SECONDS)


def _port_taken(server: ChildProcess) -> bool:
    """Return whether this start has met a port of somebody else: its own, or an inner one."""
    return _PORT_TAKEN in server.output()[-TAIL_CHARACTERS:].lower()
