"""The environment variables of a run's processes, for every way of starting them.

From what the starting process has and what the run needs to the variables that the new process
gets on top. `train`, `sft`, Slurm and by hand all go through here; a site's own set-up (modules,
proxies, paths) is what MEGATRON_ASYNC_SETUP names. What all roles must have alike is
`engines.nodes`; a server's own is `engines.sglang.process.server_environment`.

Invariants
- What the user has set wins, except where the run would be wrong with it.
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
    # With one thread for each core, ranks on one machine fight each other and the engines.
    "OMP_NUM_THREADS": "1",
    # Tensor parallelism overlaps communication with computation only with one hardware queue.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
# Sequences of ever-changing length would fragment memory.
_ALLOCATOR: Final = "expandable_segments:True"
# torchrun's ranks otherwise meet in one key-value store for all attempts, in which a restarted rank
# finds the addresses of dead ones. An attempt's number as a prefix would not do: agents of several
# nodes do not count alike.
_TRAINER_FIXED: Final = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

_RAY_NODE: Final = {
    # What ran on the node has been ended already: nothing is left to drain for 30 seconds.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # By default Ray's workers, and so the engines, give way to every other process.
    "RAY_worker_niceness": "0",
    # Ray's own metrics: any free port instead of two fixed ones.
    "AUTOSCALER_METRIC_PORT": "0",
    "DASHBOARD_METRIC_PORT": "0",
}


def ray_node_environment(base: Mapping[str, str], *, nvls: bool) -> dict[str, str]:
    """Environment of a Ray node of a launch over several nodes: manager and engines inherit it."""
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

    `one_machine`: all ranks and engines are on this one. `nvls`: as engines have it. `place`: where
    the rollout side is. `gpus`: as in CUDA_VISIBLE_DEVICES; None: as in `base`.
    `hands_memory_to_engines`: weights go over CUDA memory that an engine opens, which cannot lie in
    expandable segments. `first_lineage`: number of the first lineage of this launch.
    """
    added = {name: value for name, value in _TRAINER_DEFAULTS.items() if name not in base}
    if hands_memory_to_engines:
        added |= without_expandable_segments(base)
    elif not any(name in base for name in ALLOCATOR_VARIABLES):
        added[ALLOCATOR_VARIABLES[0]] = _ALLOCATOR
    added |= communication_environment(base, one_machine=one_machine, nvls=nvls)
    # torchrun starts the ranks by `-m`, which puts the working directory on their path.
    added |= {**_TRAINER_FIXED, SAFE_PATH_VARIABLE: "1"}
    stop = None if stop_file is None else str(stop_file)
    chosen = {BACKEND_VARIABLE: backend, STOP_FILE_VARIABLE: stop, VISIBLE_VARIABLE: gpus}
    chosen[FIRST_LINEAGE_VARIABLE] = first_lineage
    return added | {name: value for name, value in chosen.items() if value is not None}


def allocator_notices(config: RunConfig, device: str, base: Mapping[str, str]) -> tuple[str, ...]:
    """Return a notice for each variable of `base` that a run on shared GPUs has to change.

    `device`: the engines' kind of device.
    """
    if config.engines.placement != "colocated" or device != "cuda":
        return ()
    return tuple(
        f"{name} is {base[name]!r}; engines.placement colocated does not work with expandable "
        f"segments. Trainer and engines start with {value!r}"
        for name, value in without_expandable_segments(base).items()
    )
