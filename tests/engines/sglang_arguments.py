"""Prints what SGLang makes of the command lines of engines on an assumed GPU.

    python -m tests.engines.sglang_arguments < commands.json

The input maps names to the arguments of a server; the output maps them to what SGLang's own
resolution of them is on `H100`. Only the machine's facts are replaced; our hooks are installed.
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

MEMORY_MIB: Final = 81_559.0  # as nvidia-smi shows an H100 of 80 GB
H100: Final = {
    "is_cuda": True,
    "is_sm90": True,
    "is_hopper_with_cuda_12_3": True,
    "has_flashinfer": True,
    "device_sm": 90,
    "device_capability": (9, 0),
}
SHOWN: Final = (
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
    """What a server with these arguments runs with."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import prepare_server_args

    server = prepare_server_args(arguments)
    server.resolve_once()
    found = resolving_view(server)
    # On GPUs SGLang spawns its schedulers: what it hands them is pickled.
    scheduler = Engine.run_scheduler_process_func
    again, target = pickle.loads(ForkingPickler.dumps((server, scheduler)))
    assert target is scheduler and vars(again).keys() == vars(server).keys()
    values = {name: getattr(found, name) for name in SHOWN}
    values["cuda_graph_config"] = asdict(found.cuda_graph_config)
    return values


def main() -> None:
    os.environ[CPU_VARIABLE] = "1"  # stand-ins for what the GPU's packages bring
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
