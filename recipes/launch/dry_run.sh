#!/usr/bin/env bash
# What a job would do, without a GPU and without starting it: the plan of its first step, its bound, and an
# estimate of each rank's memory.
#
#   [NNODES=N] recipes/launch/dry_run.sh RECIPE [ARGUMENT]...
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/job.sh"

export WORLD_SIZE=$((NNODES * GPUS_PER_NODE))
exec python "${JOB[@]}" --prefix-tree-dry-run
