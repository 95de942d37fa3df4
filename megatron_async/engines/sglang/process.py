"""Starts, watches and ends one SGLang server process, or, with `engines.kind: simulated`, a
simulated one.

    server = SGLangProcess(model_dir, EngineConfig(), log_path=run_dir / "engine0.log")
    server.start()          # returns when the server replies, or raises ComponentFailure
    ... server.url ...
    server.stop()

Invariants
- A server has its own process group. `stop` returns when no process of the group exists. If the
  process that started the server dies without `stop`, the server ends itself: it holds one end of a
  pipe (a lifeline), which closes with that process.
- `start` raises a ComponentFailure if the server is not ready after
  `engines.start_timeout_seconds`, and at once if its process ends. The message quotes the end of
  the log.
- The port is chosen by the kernel among the free ports. If another process takes it during the
  start, the start is repeated with another port.
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
# Version that a new server reports until its first update; no run has this version.
NO_VERSION = PolicyVersion(-1, 0)


def resolve_device(settings: EngineConfig) -> str:
    """Return the device of an engine, `cpu` or `cuda`. The setting `auto` means `cuda` if torch
    sees a GPU. A simulated engine always uses `cpu`."""
    if settings.kind == "simulated":
        return "cpu"
    if settings.device != "auto":
        return settings.device
    return "cuda" if sees_gpu() else "cpu"


def resolve_dtype(settings: EngineConfig, device: str) -> str:
    """Return the dtype of an engine's weights. The setting `auto` means float32 on CPU and bfloat16
    on GPU."""
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
    """Return the command line of one server.

    Requests and replies contain token ids, so SGLang's tokenizer and detokenizer are off. With
    weights in half precision, the logits are computed in float32 all the same, as in the trainer.

    Args:
        settings: Settings of the engines.
        model_path: Directory of the model.
        port: Port on which the server listens.
        device: `cpu` or `cuda`.
        awaits_weights: Whether the server is used only after an update has replaced all weights. On
            a GPU it then starts with arbitrary weights, and so faster.
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
        # Without `--sleep-on-idle` an idle scheduler polls without pause and uses the trainer's
        # cores.
        command += ["--attention-backend", CPU_ATTENTION_BACKEND, "--sleep-on-idle"]
        # The warm-up would take 2 s, and it is useless on CPU, where nothing is compiled.
        command += ["--skip-server-warmup"]
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
    """Return the entries that SGLang is to use instead of those in the model's config.json."""
    override: dict[str, Any] = {}
    if (model_path / "config.json").is_file():
        context = yarn_context(read_config_json(model_path))
        override |= {"max_position_embeddings": context} if context else {}
    if settings.quantization == "fp8":
        # Imported here, so that processes that only start servers need not import torch.
        from megatron_async.models.families import read_architecture
        from megatron_async.weight_sync.quantize import quantization_config

        # SGLang must create fp8 parameters although the model directory has none. The first update
        # brings their weights.
        override["quantization_config"] = quantization_config(read_architecture(model_path))
    return override


def server_environment(
    settings: EngineConfig, device: str, gpus: Sequence[str] | None, base: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables of one server. They forbid downloads, make the health check
    cheap, and on CPU limit each rank to one thread.

    Variables in `base` that would change sampling or log-probs are removed. The communication
    settings are the same as in the trainer (`engines.nodes`). The API key is passed here and not on
    the command line, because every user of the machine can read command lines.
    """
    environment = without_breaking_variables(base)
    local = is_loopback(settings.host)
    environment |= communication_environment(base, one_machine=local, nvls=settings.uses_nvls)
    if settings.placement == "colocated":
        environment |= without_expandable_segments(base)
    environment[KEY_VARIABLE] = settings.api_key
    environment["HF_HUB_OFFLINE"] = "1"
    environment["PYTHONUNBUFFERED"] = "1"
    # By default, SGLang's /health generates a token, so it would not reply while the engine is
    # paused.
    environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    # With this package of model classes, SGLang need not import all of its own models at each
    # start.
    environment.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", models.__name__)
    if device == "cpu":
        environment[CPU_VARIABLE] = "1"
        # More threads would compete with the server's other processes: with them, the speed at one
        # running request was measured to fall from 150 to 8 tokens/s.
        environment["OMP_NUM_THREADS"] = "1"
        environment["CUDA_VISIBLE_DEVICES"] = ""
        # Largest number of response tokens for which SGLang reserves space in the KV cache when it
        # starts a request; its default is 4096. With 256, 96 requests of up to 1,900 tokens run at
        # once in 65,536 KV tokens, instead of 34. If responses fill the cache, SGLang moves some
        # requests back to its queue.
        environment.setdefault("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "256")
        if settings.tensor > 1:
            cores = [str(core % (os.cpu_count() or 1)) for core in range(settings.tensor)]
            environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(cores))
    elif gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return environment


def rendezvous_of_ranks(settings: EngineConfig, directory: Path, port: int) -> dict[str, str]:
    """Return environment variables with which the tensor-parallel ranks of a server form their
    process group through a file.

    By default, SGLang's ranks rendezvous through a TCP store that listens on every interface
    without a key. A file avoids this. For an engine that other machines can reach, the result is
    empty, and SGLang uses its store. Several ranks were tried on CPUs only.
    """
    if not is_loopback(settings.host):
        return {}
    return {
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{directory}/ranks",
        # SGLang derives names of shared memory from these variables if there is no address of a
        # store.
        "MASTER_ADDR": settings.host,
        "MASTER_PORT": str(port),
    }


def simulated_command(settings: EngineConfig, model_path: Path, port: int) -> list[str]:
    """Return the command line of one simulated server."""
    return [
        *module_command("megatron_async.engines.simulated.server"),
        f"--model-path={model_path}",
        f"--port={port}",
        f"--weight-version={NO_VERSION}",
        f"--settings={settings.model_dump_json(exclude={'api_key'})}",
    ]


# No `repr`, because it would show the API key in the settings.
@dataclass(eq=False, repr=False)
class SGLangProcess:
    """An SGLang server process. Its methods block, and it is not thread-safe.

    `awaits_weights` says whether the server is used only after an update has replaced all weights.
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
        """URL of the running server, `http://host:port`."""
        if not self._url:
            raise ComponentFailure("the inference server has no URL before it is started")
        return self._url

    @property
    def pid(self) -> int | None:
        """Process id of the running server, which is also its process group id; None if it is not
        running."""
        return None if self._process is None else self._process.pid

    def alive(self) -> bool:
        """Return whether the server process exists, even if it does not reply."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server and wait until it replies.

        Raises:
            ComponentFailure: If the process ends or the time limit passes. The message quotes the
                end of the log, and no process is left.
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
        """End the server and all its processes; returns when none is left. May be called
        repeatedly."""
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
            if self.settings.api_key:
                # SGLang logs all of its settings, including the API key, so only this user may read
                # the log. Change the mode of an existing log too, because an earlier start without
                # an API key may have created it with the default mode.
                self.log_path.touch(mode=0o600)
                self.log_path.chmod(0o600)
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
            # An SGLang server whose port is taken may continue to run without ever listening.
            # Report that now instead of waiting for the time limit.
            if _port_taken(server):
                raise ComponentFailure(
                    f"another process has taken the port of the inference server{server.why()}"
                )
            if time.monotonic() > deadline:
                raise ComponentFailure(
                    "the inference server was not ready within engines.start_timeout_seconds = "
                    f"{self.settings.start_timeout_seconds:g}{server.why()}"
                )
            time.sleep(_POLL_SECONDS)


def _port_taken(server: ChildProcess) -> bool:
    """Return whether the end of the log shows that another process has taken a port of the server:
    its HTTP port or an internal port."""
    return _PORT_TAKEN in server.output()[-TAIL_CHARACTERS:].lower()
