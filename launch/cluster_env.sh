# What every node of a cluster launch sets; sourced by launch/slurm/* and launch/torchrun/*.
# The one place for modules, containers, NCCL and InfiniBand. Nothing here needs root. What a role
# needs wherever it runs is in megatron_async/launcher/environment.py.
#
#   MEGATRON_ASYNC_VENV       the Python environment     (default: .venv in the repository)
#   MEGATRON_ASYNC_SETUP      a file to source first: module load ..., proxies, paths
#   MEGATRON_ASYNC_SRUN_ARGS  more arguments of every srun, e.g. for Pyxis
#                             "--container-image=/images/train.sqsh --container-mounts=/shared"
#   MEGATRON_ASYNC_INTERFACE  interface between the nodes (ib0, eth0); default: the default route's
if [ -n "${MEGATRON_ASYNC_SETUP:-}" ]; then
  set +u # `module` and many site profiles read variables that may not be there
  source "$MEGATRON_ASYNC_SETUP"
  set -u
fi

VENV="${MEGATRON_ASYNC_VENV:-$ROOT/.venv}"
PYTHON="$VENV/bin/python"
export PATH="$VENV/bin:$PATH" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

# Bootstrap traffic of NCCL and Gloo goes over this interface; data goes over InfiniBand or NVLink.
if [ -n "${MEGATRON_ASYNC_INTERFACE:-}" ]; then
  export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$MEGATRON_ASYNC_INTERFACE}"
  export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$MEGATRON_ASYNC_INTERFACE}"
fi
# A core file of a rank is as large as its memory.
ulimit -c 0
# A dead rank must end the others' collectives as an error instead of leaving them to wait.
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"
# Which InfiniBand adapters NCCL may use. Only for clusters where its own choice is wrong.
#export NCCL_IB_HCA="mlx5"
# `INFO` says which transport every pair of ranks uses: the first thing to look at when it is slow.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
