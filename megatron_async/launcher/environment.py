"""The environment variables of a run's processes, for every way of starting them.

One function for each role, pure: from what the starting process has and what the run needs to the
variables that the new process gets on top. `train`, `sft`, Slurm and by hand all go through here;
what a site needs (modules, proxies, network interfaces) stays in `launch/cluster_env.sh`. That of
an inference server is `engines.sglang.process.server_environment`.

Invariants
- What the user has set wins, except where the run would be wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from megatron_async.launcher.devices import VISIBLE_VARIABLE
from megatron_async.train_loop.rank import RAY_ADDRESS_VARIABLE
from megatron_async.train_loop.stop import STOP_FILE_VARIABLE

_TRAINER_DEFAULTS: Final = {
    # With one thread for each core, ranks on one machine fight each other and the engines.
    "OMP_NUM_THREADS": "1",
    # Tensor parallelism overlaps communication with computation only with one hardware queue.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
# Fragmentation from sequences of ever-changing length.
_ALLOCATOR_VARIABLE: Final = "PYTORCH_CUDA_ALLOC_CONF"
_ALLOCATOR: Final = "expandable_segments:True"
# torchrun's ranks otherwise meet in one key-value store for all attempts, in which a restarted rank
# finds the addresses of dead ones. An attempt's number as a prefix would not do: agents of several
# nodes do not count alike.
_TRAINER_FIXED: Final = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

RAY_NODE_ENVIRONMENT: Final = {
    # What ran on the node has been ended already: nothing is left to drain for 30 seconds.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # By default Ray's workers, and so the engines, give way to every other process.
    "RAY_worker_niceness": "0",
    # Ray's own metrics: any free port instead of two fixed ones.
    "AUTOSCALER_METRIC_PORT": "0",
    "DASHBOARD_METRIC_PORT": "0",
}


def trainer_environment(
    base: Mapping[str, str],
    *,
    ray_address: str | None = None,
    stop_file: Path | None = None,
    gpus: str | None = None,
    hands_memory_to_engines: bool = False,
) -> dict[str, str]:
    """Return the environment of torchrun and its trainer ranks: `base` and more.

    `ray_address`: where the rollout side is. `gpus`: as in CUDA_VISIBLE_DEVICES; None: as in
    `base`. `hands_memory_to_engines`: weights go over CUDA memory that an engine opens, which
    cannot lie in expandable segments.
    """
    defaults = dict(_TRAINER_DEFAULTS)
    if not hands_memory_to_engines:
        defaults[_ALLOCATOR_VARIABLE] = _ALLOCATOR
    added = {name: value for name, value in defaults.items() if name not in base}
    added |= _TRAINER_FIXED
    if ray_address is not None:
        added[RAY_ADDRESS_VARIABLE] = ray_address
    if stop_file is not None:
        added[STOP_FILE_VARIABLE] = str(stop_file)
    if gpus is not None:
        added[VISIBLE_VARIABLE] = gpus
    return added
