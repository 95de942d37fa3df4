#!/usr/bin/env bash
# Creates or reuses the virtual environment, with pinned packages, SGLang for CPU or GPU, and this
# project.
#   bash launch/setup_env.sh [group ...]     run (default), test, docs, tasks
#
# quickstart.sh and test.sh set SETUP_GROUPS to the groups that they need, and source this script. It
# writes pip's output to setup.log in the environment.
#
#   MEGATRON_ASYNC_VENV    Directory of the environment. Default: .venv in the repository.
#   MEGATRON_ASYNC_PYTHON  Interpreter, 3.11 to 3.13, for gpu 3.11 or 3.12. Default: the first usable of
#                          python3.11, python3.12, python3.13, python3.
#   MEGATRON_ASYNC_FLAVOR  cpu or gpu. Default: gpu if nvidia-smi finds a GPU, otherwise cpu. Set it to
#                          gpu on a login node without GPUs, to install for GPU nodes.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${MEGATRON_ASYNC_VENV:-$ROOT/.venv}"
LOG="$VENV/setup.log"

fail() { echo "setup: $*" >&2; exit 2; }

# Prints the first interpreter with venv whose version the pinned packages support. megatron-core has
# no wheel for 3.14, and outlines-core, which SGLang's GPU packages pin, has no wheel for 3.13.
find_python() {
  local candidate newest=13 without_venv=""
  if [ "$flavor" = gpu ]; then newest=12; fi
  for candidate in "${MEGATRON_ASYNC_PYTHON:-}" python3.11 python3.12 python3.13 python3; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null || continue
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, int(sys.argv[1])))' "$newest"; then
      if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
        command -v "$candidate"
        return
      fi
      without_venv="${without_venv:-$candidate}"
    fi
  done
  [ -z "$without_venv" ] ||
    fail "$without_venv cannot make a virtual environment. On Debian or Ubuntu: apt install python3-venv"
  fail "Python 3.11 to 3.$newest is needed ($flavor packages). Install one, or set MEGATRON_ASYNC_PYTHON."
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

# phase DESCRIPTION COMMAND...: runs COMMAND with its output in the log, and prints one line with
# DESCRIPTION and the seconds that COMMAND took.
phase() {
  local description="$1" began=$SECONDS
  shift
  printf 'setup: %-42s' "$description"
  echo "== $*" >>"$LOG"
  if ! "$@" >>"$LOG" 2>&1; then
    echo " failed"
    { echo "setup: the last lines of $LOG:"; tail -n 15 "$LOG"; } >&2
    if tail -n 15 "$LOG" | grep -q 'from versions: none'; then
      echo "setup: pip found no package. Check the network, the proxy and pip's index." >&2
    fi
    echo "setup: to continue, run the same command again; installed packages stay." >&2
    return 1
  fi
  echo " $((SECONDS - began)) s"
}

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

# list_of GROUP: prints the path of the group's requirements file without `.txt`.
list_of() {
  local name="$1"
  if [ "$name" = run ]; then name="$flavor"; fi
  echo "$ROOT/launch/requirements-$name"
}

# wanted GROUP: prints the flavor and a digest of the files that name the group's packages.
wanted() {
  echo "$flavor $(cat "$(list_of "$1")"{,-nodeps}.txt "$ROOT"/launch/requirements-gpu-lock.txt \
    "$ROOT"/{,kernels/}pyproject.toml 2>/dev/null | sha256sum | cut -c1-16)"
}

is_set_up() { [ "$(cat "$VENV/.megatron_async-$1" 2>/dev/null)" = "$(wanted "$1")" ]; }

# Prints the GiB that the environment, pip's downloads and pip's cache take together.
needed_gib() {
  if [ "$flavor" = gpu ]; then echo 19; return; fi
  case "${PIP_INDEX_URL:-} ${PIP_EXTRA_INDEX_URL:-}" in
    *whl/cpu*) echo 5 ;;
    *) echo 12 ;; # PyPI's torch is a CUDA build.
  esac
}

# Fails if the disk has too little free space, before anything is installed.
check_disk() {
  local parent free needed
  parent="$(dirname "$VENV")" needed="$(needed_gib)"
  mkdir -p "$parent"
  free="$(df -Pk "$parent" | awk 'NR == 2 {print int($4 / 1048576)}')"
  [ "$free" -ge "$needed" ] ||
    fail "$parent has $free GiB of free space; $needed are needed. Set MEGATRON_ASYNC_VENV to another disk, or use the CPU build of torch (README.md)."
}

# make_venv PYTHON: creates the environment, or completes an environment whose set-up was interrupted.
# The stamp file is written last, so it exists only in a complete environment.
make_venv() {
  mkdir -p "$VENV"
  phase "virtual environment, $("$1" --version)" "$1" -m venv "$VENV" || exit 2
  phase "pip and build tools" pip install --upgrade 'pip>=25' 'setuptools>=77' || exit 2
  touch "$VENV/.megatron_async-venv"
}

# install_group GROUP: installs the group's packages; the group `run` includes this project.
install_group() {
  local group="$1" listed alone within=()
  listed="$(list_of "$group").txt" alone="$(list_of "$group")-nodeps.txt"
  if [ "$flavor" = gpu ]; then within=(-c "$ROOT/launch/requirements-gpu-lock.txt"); fi
  if ! phase "$(grep -c == "$listed") packages ($group)" pip install -r "$listed" "${within[@]}"; then
    if [ "$group" = tasks ]; then
      echo "setup: pycosat needs a C compiler. On Debian or Ubuntu: apt install gcc python3-dev" >&2
    fi
    return 1
  fi
  if [ -f "$alone" ]; then
    phase "$(grep -c == "$alone") packages without dependencies ($group)" pip install --no-deps -r "$alone" ||
      return 1
  fi
  if [ "$group" = run ]; then
    phase "megatron_async" pip install --no-deps --no-build-isolation -e "$ROOT/kernels" -e "$ROOT" ||
      return 1
  fi
  wanted "$group" >"$VENV/.megatron_async-$group"
}

flavor="${MEGATRON_ASYNC_FLAVOR:-}"
if [ -z "$flavor" ]; then
  flavor=cpu
  if has_gpu; then flavor=gpu; fi
fi
case "$flavor" in cpu | gpu) ;; *) fail "MEGATRON_ASYNC_FLAVOR is '$flavor'; it must be cpu or gpu" ;; esac

groups="${SETUP_GROUPS:-run}"
if [ "${BASH_SOURCE[0]}" = "$0" ] && [ $# -gt 0 ]; then groups="run $*"; fi
for group in $groups; do
  case "$group" in run | test | docs | tasks) ;; *) fail "'$group' is not a group; the groups are run, test, docs, tasks" ;; esac
done
missing=()
for group in $groups; do
  is_set_up "$group" || missing+=("$group")
done
if [ ${#missing[@]} -gt 0 ]; then
  python=""
  if [ ! -f "$VENV/.megatron_async-venv" ]; then
    python="$(find_python)" || exit 2
    check_disk
  fi
  echo "setup: $flavor environment in $VENV; pip's output is in $LOG"
  [ -z "$python" ] || make_venv "$python"
  for group in "${missing[@]}"; do
    install_group "$group" || exit 2
  done
fi
if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  echo "setup: complete. To use it: source $VENV/bin/activate"
fi

export PATH="$VENV/bin:$PATH" VIRTUAL_ENV="$VENV" HF_HUB_OFFLINE=1
