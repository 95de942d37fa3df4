#!/usr/bin/env bash
# A run's newest checkpoint (or a named one) as a Hugging Face directory, for use inside a job.
#   bash launch/convert_to_hf.sh runs/NAME DESTINATION [--dtype bfloat16] [--shard-gb 5]
#   bash launch/convert_to_hf.sh runs/NAME/checkpoints/step_000100 DESTINATION
set -euo pipefail
if [ $# -lt 2 ]; then sed -n '2,4p' "${BASH_SOURCE[0]}" >&2; exit 2; fi
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
src="$1" dst="$2"
shift 2
exec megatron-async convert megatron-to-hf --src "$src" --dst "$dst" "$@"
