#!/usr/bin/env bash
# Sets everything up and passes the tests: lint, types, then pytest (fast tests first).
#   bash launch/test.sh [pytest args]      with arguments only pytest runs, with these
#
#   MEGATRON_ASYNC_SLURM_TESTS=1    test launch/slurm on a cluster of virtual nodes (else skipped);
#                                   as root on Debian Slurm is installed for it (13 MB)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$ROOT"
if [ "${MEGATRON_ASYNC_SLURM_TESTS:-}" = 1 ] && ! command -v slurmctld >/dev/null; then
  { [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null && apt-get -qq update &&
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends \
      slurmctld slurmd slurm-client munge >/dev/null; } ||
    echo "test: Slurm could not be installed; its tests are skipped" >&2
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ $# -eq 0 ]; then
  ruff check .
  ruff format --check .
  mypy megatron_async kernels
  pytest -q -m "not slow and not engine"
  exec pytest -q -m "slow or engine"
fi
exec pytest "$@"
