#!/usr/bin/env bash
# Run a recipe on this machine, or on several machines.
#
#   recipes/launch/torchrun.sh RECIPE [ARGUMENT]...
#   NNODES=N HEAD=HOST recipes/launch/torchrun.sh RECIPE [ARGUMENT]...       the same on all N machines
#
# HOST is the name of one of the machines, as the others reach it. ARGUMENTs are pretrain_gpt.py's.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/job.sh"

if [ "$NNODES" -eq 1 ]; then
    endpoint=localhost:0 # any free port
else
    endpoint=${HEAD:?with NNODES=$NNODES name one of the machines, the same on all: HEAD=HOST}:${PORT:-29500}
fi
decide_sizes
exec "${TORCHRUN[@]}" --rdzv-endpoint "$endpoint" --rdzv-id "$(basename "$recipe" .sh)" "${JOB[@]}"
