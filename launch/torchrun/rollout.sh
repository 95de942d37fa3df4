#!/usr/bin/env bash
# The rollout role on one node, without Slurm. The same on every rollout node but for --index:
#   bash launch/torchrun/rollout.sh runs/NAME --index 0 --count 1 --session SESSION
# SESSION is any new name, alike on all nodes of this launch. `megatron-async launch --config FILE`
# makes runs/NAME and prints the commands. Exit code 75: it stopped with a checkpoint, start it
# again with a new SESSION. To ask for that: touch runs/NAME/launch/SESSION/stop
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/launch/cluster_env.sh"
exec "$PYTHON" -P -m megatron_async.launcher.node rollout "$@"
