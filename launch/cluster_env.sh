# Environment of every node of a cluster launch; launch/slurm/* and launch/torchrun/* source this file.
# It only applies the site's own set-up and selects Python. megatron_async/launcher/environment.py sets
# the variables that a process needs on any machine (NCCL, Gloo, the allocator, interfaces). It keeps a
# variable that is already set, for example by this file or by sbatch.
#
#   MEGATRON_ASYNC_VENV       Python environment. Default: .venv in the repository; in a container
#                             /opt/venv, which launch/Dockerfile creates.
#   MEGATRON_ASYNC_SETUP      File that is sourced first, for `module load`, proxies and paths.
#   MEGATRON_ASYNC_SRUN_ARGS  Additional arguments of every srun, for example for Pyxis:
#                             "--container-image=/images/train.sqsh --container-mounts=/shared"
#   MEGATRON_ASYNC_INTERFACE  Network interface between the nodes (ib0, eth0). Default: the interface of
#                             the default route.
if [ -n "${MEGATRON_ASYNC_SETUP:-}" ]; then
  set +u # `module` and many site profiles read variables that may not be set.
  source "$MEGATRON_ASYNC_SETUP"
  set -u
fi

# Under `sbatch --export=NONE` (or SBATCH_EXPORT=NONE), Slurm sets this variable. Every srun would then
# start its tasks without PATH and without the variables that this file exports. You can still pass an
# --export in MEGATRON_ASYNC_SRUN_ARGS.
unset SLURM_EXPORT_ENV

case "${MEGATRON_ASYNC_SRUN_ARGS:-}" in
  *--container-image*) VENV="${MEGATRON_ASYNC_VENV:-/opt/venv}" ;;
  *) VENV="${MEGATRON_ASYNC_VENV:-$ROOT/.venv}" ;;
esac
# Every role compares its code with this digest, because an image may contain older code than the host.
if [ -d "$ROOT/megatron_async" ]; then
  MEGATRON_ASYNC_CODE="$(cd "$ROOT" && find megatron_async -name '*.py' -type f -print0 |
    LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d ' ' -f 1)"
  export MEGATRON_ASYNC_CODE
fi
PYTHON="$VENV/bin/python"
export PATH="$VENV/bin:$PATH" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

# No core files, because the core file of a rank is as large as its memory.
ulimit -c 0
