#!/usr/bin/env bash
# Print the plan of a job's first step and its expected speed-up. Needs no GPU and does not start the job.
#
#   [NNODES=N] recipes/launch/dry_run.sh RECIPE [ARGUMENT]...
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/job.sh"

export WORLD_SIZE=$((NNODES * GPUS_PER_NODE))
exec python "${JOB[@]}" --prefix-tree-dry-run
