"""Environment variables of a run's processes, for every way of starting them.

Each function takes the environment of the starting process and returns the variables that the new
process gets in addition. `train`, `sft`, Slurm scripts and manual starts all use them. Further
settings of a cluster (modules, proxies, paths) belong in the script whose path is in
MEGATRON_ASYNC_SETUP. Variables that all roles must share are in `engines.nodes`; those of an
engine's server are in `engines.sglang.process.server_environment`.

Invariants
- A variable that the user has set is kept, unless the run cannot work with its value, or the
  variable configures a Ray node that a launch starts (`_RAY_NODE`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from megatron_async.config import RunConfig
from megatron_async.engines.nodes import (
    ALLOCATOR_VARIABLES,
    communication_environment,
    without_expandable_segments,
)
from megatron_async.process_backends.child_process import SAFE_PATH_VARIABLE
from megatron_async.process_backends.local import VISIBLE_VARIABLE
from megatron_async.train_loop.attempt import FIRST_LINEAGE_VARIABLE
from megatron_async.train_loop.rank import BACKEND_VARIABLE
from megatron_async.train_loop.stop import STOP_FILE_VARIABLE

_TRAINER_DEFAULTS: Final = {
    # By default, each rank would start one thread per core, so that the ranks of a machine would
    # compete with each other and with the engines.
    "OMP_NUM_THREADS": "1",
    # With several hardware queues, the GPU may start kernels in another order than they were
    # launched, and tensor parallelism then does not overlap communication with computation.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
# Setting of torch's CUDA allocator. Without it, the changing lengths of sequences fragment the GPU
# memory.
_ALLOCATOR: Final = "expandable_segments:True"
# By default, torchrun's ranks exchange their addresses through one key-value store for all
# attempts, so after a restart a rank finds the addresses of dead ranks. With this variable, each
# attempt has its own store. Keys with the attempt's number would not help, because the torchrun
# agents of several nodes may count attempts differently.
_TRAINER_FIXED: Final = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

_RAY_NODE: Final = {
    # When a Ray node is stopped, the run's processes on it have already ended, so Ray need not wait
    # 30 seconds for them.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # By default, Ray's workers, which include the engines, run at a lower priority than other
    # processes.
    "RAY_worker_niceness": "0",
    # Use any free ports for Ray's own metrics. The two default ports may be in use.
    "AUTOSCALER_METRIC_PORT": "0",
    "DASHBOARD_METRIC_PORT": "0",
}


def ray_node_environment(base: Mapping[str, str], *, nvls: bool) -> dict[str, str]:
    """Return the variables that `ray start` gets on a node of a launch over several nodes. The
    rollout manager and the engines are started by Ray and inherit them.

    Args:
        base: Environment of this process.
        nvls: Whether NCCL may use NVLink SHARP.
    """
    return _RAY_NODE | communication_environment(base, one_machine=False, nvls=nvls)


def trainer_environment(
    base: Mapping[str, str],
    *,
    one_machine: bool,
    nvls: bool = True,
    backend: str | None = None,
    stop_file: Path | None = None,
    gpus: str | None = None,
    hands_memory_to_engines: bool = False,
    first_lineage: str | None = None,
) -> dict[str, str]:
    """Return the variables that torchrun and its ranks get in addition to the environment `base`.

    Args:
        base: Environment of this process.
        one_machine: Whether all ranks and engines are on this machine.
        nvls: Whether NCCL may use NVLink SHARP; must be equal for ranks and engines.
        backend: Address of the process backend that runs the rollout side.
        stop_file: File whose existence asks the run to stop.
        gpus: Value of CUDA_VISIBLE_DEVICES; None to keep the value in `base`.
        hands_memory_to_engines: Whether engines receive weights by opening the CUDA memory of
            ranks. This does not work if torch allocates memory as expandable segments.
        first_lineage: Number of the first lineage of this launch. Every start or restart of the
            trainer ranks creates a new lineage, with the next number.
    """
    added = {name: value for name, value in _TRAINER_DEFAULTS.items() if name not in base}
    if hands_memory_to_engines:
        added |= without_expandable_segments(base)
    elif not any(name in base for name in ALLOCATOR_VARIABLES):
        added[ALLOCATOR_VARIABLES[0]] = _ALLOCATOR
    added |= communication_environment(base, one_machine=one_machine, nvls=nvls)
    # torchrun starts ranks with `-m`, which would add the working directory to their import path.
    added |= {**_TRAINER_FIXED, SAFE_PATH_VARIABLE: "1"}
    stop = None if stop_file is None else str(stop_file)
    chosen = {BACKEND_VARIABLE: backend, STOP_FILE_VARIABLE: stop, VISIBLE_VARIABLE: gpus}
    chosen[FIRST_LINEAGE_VARIABLE] = first_lineage
    return added | {name: value for name, value in chosen.items() if value is not None}


def allocator_notices(config: RunConfig, device: str, base: Mapping[str, str]) -> tuple[str, ...]:
    """Return a notice for each variable of `base` that makes torch allocate expandable segments,
    which do not work if trainer and engines share GPUs.

    Args:
        config: The run's settings. Without `engines.placement: colocated` there are no notices.
        device: Kind of device of the engines. On the CPU there are no notices.
        base: Environment of this process.
    """
    if config.engines.placement != "colocated" or device != "cuda":
        return ()
    return tuple(
        f"{name} is {base[name]!r}; engines.placement colocated does not work with expandable "
        f"segments. Trainer and engines start with {value!r} instead."
        for name, value in without_expandable_segments(base).items()
    )
