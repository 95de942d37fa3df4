"""Prints how SGLang resolves the command lines of engines on an assumed GPU.

    python -m tests.engines.sglang_arguments < commands.json

The input maps names to the arguments of a server; the output maps the names to the arguments after
SGLang's own resolution on `H100`. Only the facts about the machine are replaced; the project's
hooks are installed.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from dataclasses import asdict
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final
from unittest import mock

from megatron_async.engines.sglang import hooks
from megatron_async.engines.sglang.server import CPU_VARIABLE, install

MEMORY_MIB: Final = 81_559.0  # As nvidia-smi reports for an H100 of 80 GB.
H100: Final = {
    "is_cuda": True,
    "is_sm90": True,
    "is_hopper_with_cuda_12_3": True,
    "has_flashinfer": True,
    "device_sm": 90,
    "device_capability": (9, 0),
}
REPORTED: Final = (
    "attention_backend",
    "chunked_prefill_size",
    "cuda_graph_config",
    "device",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "dtype",
    "enable_memory_saver",
    "load_format",
    "max_running_requests",
    "max_total_tokens",
    "mem_fraction_static",
    "skip_tokenizer_init",
    "stream_interval",
    "tp_size",
    "weight_version",
)


def resolved(arguments: list[str]) -> dict[str, Any]:
    """Return the settings in `REPORTED` with which a server with these arguments runs."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import prepare_server_args

    server = prepare_server_args(arguments)
    server.resolve_once()
    found = resolving_view(server)
    # On GPUs SGLang spawns its schedulers, so the arguments that it passes to them are pickled.
    scheduler = Engine.run_scheduler_process_func
    unpickled, target = pickle.loads(ForkingPickler.dumps((server, scheduler)))
    assert target is scheduler and vars(unpickled).keys() == vars(server).keys()
    values = {name: getattr(found, name) for name in REPORTED}
    values["cuda_graph_config"] = asdict(found.cuda_graph_config)
    return values


def main() -> None:
    os.environ[CPU_VARIABLE] = "1"  # Installs stand-ins for packages that need a GPU.
    install()
    hooks.register(on_cpu=False)
    from sglang.srt.arg_groups import memory_hook
    from sglang.srt.runtime_context import override_platform

    commands: dict[str, list[str]] = json.load(sys.stdin)
    memory = mock.patch.object(memory_hook, "get_device_memory_capacity", lambda _: MEMORY_MIB)
    with override_platform(**H100), memory:
        found = {name: resolved(arguments) for name, arguments in commands.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
