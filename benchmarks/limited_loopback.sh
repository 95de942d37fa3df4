#!/usr/bin/env bash
# Runs a command while the loopback carries no more than a network would (root, and tc of iproute2):
#   bash benchmarks/limited_loopback.sh 10gbit python -m benchmarks.weights --transports distributed
# The limit holds for the whole machine, and ends with the command.
set -euo pipefail
rate="$1"
shift
tc qdisc add dev lo root tbf rate "$rate" burst 4mb latency 100ms
trap 'tc qdisc del dev lo root' EXIT
LOOPBACK_LIMIT="$rate" "$@"
