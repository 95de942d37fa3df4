# What every node of a cluster launch sets; sourced by launch/slurm/* and launch/torchrun/*.
# A site's own set-up and where Python is, no more: what a process needs wherever it runs (NCCL,
# Gloo, the allocator, interfaces) is set by megatron_async/launcher/environment.py, for Slurm, by
# hand and on one machine alike; a variable that is set already, here or by sbatch, wins.
#
#   MEGATRON_ASYNC_VENV       the Python environment     (default: .venv in the repository, in a
#                             container /opt/venv, where launch/Dockerfile puts it)
#   MEGATRON_ASYNC_SETUP      a file to source first: module load ..., proxies, paths
#   MEGATRON_ASYNC_SRUN_ARGS  more arguments of every srun, e.g. for Pyxis
#                             "--container-image=/images/train.sqsh --container-mounts=/shared"
#   MEGATRON_ASYNC_INTERFACE  interface between the nodes (ib0, eth0); default: the default route's
if [ -n "${MEGATRON_ASYNC_SETUP:-}" ]; then
  set +u # `module` and many site profiles read variables that may not be there
  source "$MEGATRON_ASYNC_SETUP"
  set -u
fi

# Under `sbatch --export=NONE` (or SBATCH_EXPORT=NONE) Slurm sets this variable, and every srun would
# start its tasks without PATH and without what is exported here. MEGATRON_ASYNC_SRUN_ARGS may still
# hold an --export.
unset SLURM_EXPORT_ENV

case "${MEGATRON_ASYNC_SRUN_ARGS:-}" in
  *--container-image*) VENV="${MEGATRON_ASYNC_VENV:-/opt/venv}" ;;
  *) VENV="${MEGATRON_ASYNC_VENV:-$ROOT/.venv}" ;;
esac
# Every role compares its code with this: an image may hold an older one than the host.
if [ -d "$ROOT/megatron_async" ]; then
  MEGATRON_ASYNC_CODE="$(cd "$ROOT" && find megatron_async -name '*.py' -type f -print0 |
    LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d ' ' -f 1)"
  export MEGATRON_ASYNC_CODE
fi
PYTHON="$VENV/bin/python"
export PATH="$VENV/bin:$PATH" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

# A core file of a rank is as large as its memory.
ulimit -c 0
