#!/usr/bin/env bash
# Runs the rollout role on one node, without Slurm. Start it on every rollout node, with a different
# --index on each:
#   bash launch/torchrun/rollout.sh runs/NAME --index 0 --count 1 --session SESSION
# SESSION is any new name, equal on all nodes of this launch. `megatron-async launch --config FILE`
# creates runs/NAME and prints the commands. Exit code 75 means that the run stopped with a checkpoint;
# start it again with a new SESSION. To request such a stop: touch runs/NAME/launch/SESSION/stop
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/launch/cluster_env.sh"
exec "$PYTHON" -P -m megatron_async.launcher.node rollout "$@"
