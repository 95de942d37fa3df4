#!/usr/bin/env bash
# Makes (or reuses) the virtual environment: pinned packages, SGLang for CPU or GPU, this project.
# Sourced by quickstart.sh and test.sh; run by itself it only sets up.
#
#   MEGATRON_ASYNC_VENV    where the environment lives       (default: .venv in the repository)
#   MEGATRON_ASYNC_PYTHON  interpreter, 3.11 or 3.12 (default: python3.11, python3.12, python3)
#   MEGATRON_ASYNC_FLAVOUR cpu or gpu; default: gpu where nvidia-smi finds one. Set it to set up for
#                          GPU nodes on a login node that has none.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${MEGATRON_ASYNC_VENV:-$ROOT/.venv}"

fail() { echo "setup: $*" >&2; exit 2; }

find_python() {
  local candidate
  for candidate in "${MEGATRON_ASYNC_PYTHON:-}" python3.11 python3.12 python3; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))'; then
      command -v "$candidate"
      return
    fi
  done
  fail "Python 3.11 or 3.12 is needed (the pinned packages are for it); set MEGATRON_ASYNC_PYTHON"
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

flavour="${MEGATRON_ASYNC_FLAVOUR:-}"
if [ -z "$flavour" ]; then
  flavour=cpu
  if has_gpu; then flavour=gpu; fi
fi
case "$flavour" in cpu | gpu) ;; *) fail "MEGATRON_ASYNC_FLAVOUR is '$flavour'; it must be cpu or gpu" ;; esac
wanted="$flavour $(cat "$ROOT"/launch/requirements-*.txt "$ROOT"/{,kernels/}pyproject.toml | sha256sum | cut -c1-16)"

if [ "$(cat "$VENV/.megatron_async" 2>/dev/null)" != "$wanted" ]; then
  PYTHON="$(find_python)"
  echo "setup: $flavour environment in $VENV (a few minutes, once)"
  [ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV" \
    || fail "$PYTHON cannot make a virtual environment (Debian: apt install python3-venv)"
  pip() { "$VENV/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
  echo "setup: pip and build tools"
  pip install --upgrade 'pip>=25' 'setuptools>=77' wheel
  lock="$ROOT/launch/requirements-$flavour-lock.txt" # the CPU's requirements are one themselves
  listed="$ROOT/launch/requirements-$flavour.txt"
  pinned="$listed" within=()
  if [ -f "$lock" ]; then pinned="$lock" within=(-c "$lock"); fi
  echo "setup: $(grep -c == "$pinned") packages, most of the time"
  pip install -r "$listed" "${within[@]}"
  if [ "$flavour" = cpu ]; then
    echo "setup: SGLang, without its packages for GPUs"
    pip install --no-deps -r "$ROOT/launch/requirements-nodeps.txt"
  fi
  echo "setup: megatron_async"
  pip install --no-deps --no-build-isolation -e "$ROOT/kernels" -e "$ROOT"
  echo "$wanted" >"$VENV/.megatron_async"
fi

export PATH="$VENV/bin:$PATH" VIRTUAL_ENV="$VENV" HF_HUB_OFFLINE=1
