#!/usr/bin/env bash
# Sets everything up and runs the main job: a small language model gets better by RL.
#   bash launch/quickstart.sh [setting=value ...]      e.g. name=second seed=2
#
# It needs Python 3.11 to 3.13 with venv, and 12 GiB of disk space; both are checked first.
# Its settings are for two CPU cores. Where there is a GPU it stays idle, and the environment for the
# CPU lies beside the other, in .venv-cpu. MEGATRON_ASYNC_FLAVOR=gpu uses the GPUs (untested), of which
# the two trainer ranks and the engine need three.
set -euo pipefail
if [ "${MEGATRON_ASYNC_FLAVOR:-cpu}" = cpu ] && nvidia-smi -L >/dev/null 2>&1; then
  root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
  export MEGATRON_ASYNC_FLAVOR=cpu MEGATRON_ASYNC_VENV="${MEGATRON_ASYNC_VENV:-$root/.venv}-cpu"
  export CUDA_VISIBLE_DEVICES="" # pip's torch may be a CUDA build all the same
fi
SETUP_GROUPS=run
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$ROOT"
if [ $# -eq 0 ]; then
  # Each run has a directory of its own: quickstart, quickstart-2, quickstart-3, ...
  name=quickstart number=1
  while [ -e "runs/$name" ]; do number=$((number + 1)); name="quickstart-$number"; done
  set -- "name=$name"
fi
exec megatron-async quickstart --config configs/quickstart.yaml "$@"
