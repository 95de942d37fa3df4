#!/usr/bin/env bash
# Runs a command while the loopback interface is limited to the bandwidth of a network. It needs root
# and `tc` of iproute2:
#   bash benchmarks/limited_loopback.sh 10gbit python -m benchmarks.weights --transports distributed
# The limit applies to the whole machine until the command ends.
set -euo pipefail
rate="$1"
shift
tc qdisc add dev lo root tbf rate "$rate" burst 4mb latency 100ms
trap 'tc qdisc del dev lo root' EXIT
LOOPBACK_LIMIT="$rate" "$@"
