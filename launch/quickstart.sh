#!/usr/bin/env bash
# Sets everything up and runs the main job: a small language model gets better by RL.
#   bash launch/quickstart.sh [setting=value ...]      e.g. name=second seed=2
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$ROOT"
if [ $# -eq 0 ]; then
  # Each run has a directory of its own: quickstart, quickstart-2, quickstart-3, ...
  name=quickstart number=1
  while [ -e "runs/$name" ]; do number=$((number + 1)); name="quickstart-$number"; done
  set -- "name=$name"
fi
exec megatron-async quickstart --config configs/quickstart.yaml "$@"
