"""Runs SGLang's HTTP server with the additions that training needs.

Start it with `python -m megatron_async.engines.sglang.server`; it takes SGLang's command line
unchanged. The additions apply to the server and to every process that it starts. They are installed
when this module is imported as the main module, which also happens first in a spawned process; a
forked process inherits them.

- `--device cpu`: stand-ins for GPU packages, the attention backend `torch_batched`, faster matrix
  products on AMD processors, faster sampling (sampling.py).
- Every streamed chunk has the version of each of its tokens (`meta_info.weight_versions`). SGLang
  itself reports them only in the last chunk, so it would be unknown which version made the tokens
  around a weight update until then. A hook calls SGLang's own function for these versions earlier.
- `POST /receive_weights` builds the complete weights of a published version on this machine, from
  their differences to the previous version or from a whole copy (receiver.py).
- While a bucket of weights (tensors that are broadcast together) is loaded, the next bucket is
  received already (weight_updater.py).
- No request reuses a prompt prefix that older weights have computed (prefix.py).
- The requests by which this engine is verified after a weight update are started before all other
  waiting requests (queue.py).
- Requests that are sent together are prefilled together (burst.py).
- Weights may change while requests are running, in spite of SGLang's overlap scheduler, which
  computes one step ahead, and its watchdog (in_flight.py).
- A lifeline: the server ends itself and all its processes at once when the process that started it
  ends or closes the lifeline. (SGLang itself checks for SIGTERM only every five seconds.)
- The server starts faster, and aborts can be repeated (hooks.py).
- The files in which SGLang's schedulers report their load (such as their number of running
  requests) are in the server's own directory, which is removed with the server.

Invariants
- Each server has one process group, led by this process. Killing the group leaves no process.
"""

import importlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_async.process_backends.child_process import hold_lifeline
from megatron_async.runtime.garbage_collection import gc_disabled

# Environment variable with the server's API key. It is not on the command line, because every user
# of a machine can read command lines.
KEY_VARIABLE = "MEGATRON_ASYNC_ENGINE_KEY"
CPU_VARIABLE = "SGLANG_USE_CPU_ENGINE"
# Environment variable with a directory for temporary files of this server, which is removed with
# the server.
DIRECTORY_VARIABLE = "MEGATRON_ASYNC_ENGINE_DIRECTORY"
# Defined here and not in attention.py, so that processes that only start servers need not import
# torch.
CPU_ATTENTION_BACKEND = "torch_batched"
_ACCEPT = (
    "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"
)

_LOADS = "sglang.srt.managers.load_snapshot.shm_path_for"


def _report_versions_of_unfinished(result: Any, accumulator: Any, *, req: Any) -> None:
    """Hook after SGLang has added a request's output to a batch: set the versions of its tokens.

    SGLang itself sets them only for a finished request. As in its final chunk, the versions are
    given as spans of tokens whose positions are counted from the request's first token.
    """
    from sglang.srt.utils.weight_versions import compute_weight_version_spans

    versions = accumulator.weight_versions
    if versions and versions[-1] is None and accumulator.rids[-1] == req.rid:
        versions[-1] = compute_weight_version_spans(
            req.weight_version_events,
            current_version=accumulator.current_weight_version,
            num_output_tokens=req.send_token_offset,
        )


def _import_dumper() -> None:
    """Import SGLang's module for dumping tensors while megatron-core cannot be imported. That
    module would import megatron-core, which no engine needs."""
    if "megatron.core" in sys.modules:
        return
    sys.modules["megatron.core"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("sglang.srt.debug_utils.dumper")
    finally:
        del sys.modules["megatron.core"]


def _loads_in_own_directory(original: Callable[[str], str], name: str) -> str:
    """Hook around SGLang's choice of the path of a file in which a scheduler reports its load: put
    the file into the server's own directory.

    SGLang would put it into /dev/shm, where a killed server would leave it in memory.
    """
    path = original(name)
    return str(Path(os.environ.get(DIRECTORY_VARIABLE) or "/dev/shm", Path(path).name))


def install() -> None:
    """Prepare this process to run SGLang, by stand-ins and hooks. Repeated calls do nothing."""
    on_cpu = os.environ.get(CPU_VARIABLE) == "1"
    if on_cpu:
        from megatron_async_kernels.cpu_matmul import use_onednn

        from megatron_async.engines.sglang import attention, cpu

        use_onednn()
        cpu.install_stand_ins()
        attention.register(CPU_ATTENTION_BACKEND)
    _import_dumper()
    from sglang.srt.plugins.hook_registry import HookRegistry

    from megatron_async.engines.sglang import burst, hooks, in_flight, prefix, queue, sampling
    from megatron_async.engines.sglang import weight_updater as updater

    if HookRegistry._hooks.get(_ACCEPT):
        return
    ahead = updater.AheadHooks()
    drawn = (sampling.SAMPLE, sampling.in_two_draws, "AROUND", "engines would be slower")
    if on_cpu:
        hooks.register_hooks([drawn])
    hooks.register_hooks(
        [
            (_ACCEPT, _report_versions_of_unfinished, "AFTER", "tokens have no policy version"),
            (_LOADS, _loads_in_own_directory, "AROUND", "each start leaves a file"),
            (updater.RECEIVE, ahead.receive, "AROUND", "weights cannot be received"),
            (updater.JOIN, updater.join, "AROUND", "a lost node would end healthy engines"),
            (updater.LEAVE, ahead.leave, "AROUND", "weight-update groups cannot be left"),
            (updater.BEGIN, ahead.begin, "BEFORE", "weight updates cannot be started"),
            (prefix.QUEUE, prefix.before_queue, "BEFORE", "old prefixes are reused"),
            (burst.DISPATCH, burst.Collector().dispatch, "AROUND", "boundaries take more passes"),
            (queue.QUEUE, queue.after_queue, "AFTER", "checks of engines wait for others"),
            (prefix.CHANGE, prefix.after_change, "AFTER", "old prefixes are reused"),
            (in_flight.PAUSE, in_flight.after_pause, "AFTER", "long pauses would end engines"),
            (in_flight.CHANGE, in_flight.around_change, "AROUND", "versions are off by a token"),
        ]
    )


def _remove_files() -> None:
    """Remove the files of this server: weights that it received, and SGLang's metrics."""
    from megatron_async.weight_sync.receiver import remove_roots

    remove_roots(os.getpid())
    metrics = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if metrics:
        shutil.rmtree(metrics, ignore_errors=True)


def take_key() -> str:
    """Remove the server's API key from the environment, so that child processes do not inherit it;
    return it."""
    return os.environ.pop(KEY_VARIABLE, "")


def main() -> None:
    """Run the server until a signal stops it."""
    # Delete an inherited setting of the directory for metrics, so that SGLang creates a separate
    # one.
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    hold_lifeline(_remove_files)
    key = take_key()
    # The key is passed in one argument with its option, because it may begin with a dash.
    arguments = sys.argv[1:]
    if key:
        arguments.append(f"--api-key={key}")
    with gc_disabled(frozen=True):
        from sglang.launch_server import run_server
        from sglang.srt.entrypoints.http_server import app
        from sglang.srt.server_args import prepare_server_args
        from sglang.srt.utils import kill_process_tree

        from megatron_async.engines.sglang import hooks
        from megatron_async.engines.sglang.receiver import receiver_of

    hooks.register(on_cpu=os.environ.get(CPU_VARIABLE) == "1")
    try:
        with receiver_of(app):
            run_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ in ("__main__", "__mp_main__"):
    with gc_disabled(frozen=True):
        install()

if __name__ == "__main__":
    main()
