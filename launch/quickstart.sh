#!/usr/bin/env bash
# Installs everything and trains a small language model by RL.
#   bash launch/quickstart.sh [setting=value ...]      e.g. name=second seed=2
#
# The script needs Python 3.11 to 3.13 with venv, and 12 GiB of disk space; it checks both first.
# The settings are for two CPU cores. On a machine with a GPU, the GPU stays idle, and the environment
# for the CPU is .venv-cpu next to .venv. With MEGATRON_ASYNC_FLAVOR=gpu, the script uses GPUs
# (untested). It then needs three: two for the trainer ranks and one for the engine.
set -euo pipefail
if [ "${MEGATRON_ASYNC_FLAVOR:-cpu}" = cpu ] && nvidia-smi -L >/dev/null 2>&1; then
  root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
  export MEGATRON_ASYNC_FLAVOR=cpu MEGATRON_ASYNC_VENV="${MEGATRON_ASYNC_VENV:-$root/.venv}-cpu"
  export CUDA_VISIBLE_DEVICES="" # pip may install a CUDA build of torch in this environment too.
fi
SETUP_GROUPS=run
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$ROOT"
if [ $# -eq 0 ]; then
  # Each run has a separate directory: quickstart, quickstart-2, quickstart-3, ...
  name=quickstart number=1
  while [ -e "runs/$name" ]; do number=$((number + 1)); name="quickstart-$number"; done
  set -- "name=$name"
fi
exec megatron-async quickstart --config configs/quickstart.yaml "$@"
