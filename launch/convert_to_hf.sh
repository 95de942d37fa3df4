#!/usr/bin/env bash
# Converts a run's newest checkpoint, or a named one, to a Hugging Face directory. For use inside a job:
# it installs nothing and uses the Python environment that launch/cluster_env.sh selects.
#   bash launch/convert_to_hf.sh runs/NAME DESTINATION [--dtype bfloat16] [--shard-gb 5]
#   bash launch/convert_to_hf.sh runs/NAME/checkpoints/step_000100 DESTINATION
set -euo pipefail
if [ $# -lt 2 ]; then sed -n '2,5p' "${BASH_SOURCE[0]}" >&2; exit 2; fi
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$ROOT/launch/cluster_env.sh"
src="$1" dst="$2"
shift 2
exec "$PYTHON" -P -m megatron_async.cli convert megatron-to-hf --src "$src" --dst "$dst" "$@"
