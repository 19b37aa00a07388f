# shellcheck shell=bash
# Sourced by the launchers beside it, with a recipe and further arguments of pretrain_gpt.py. Makes of them:
#
#   JOB        what Python is to run, word by word
#   TORCHRUN   torchrun and what it is told of the machines, but for where they meet
#
# Nothing here is to be edited: site.sh and the recipes hold what may be, and an argument at the end of the command wins.

if [ $# -eq 0 ] || [ ! -f "$1" ]; then
    echo "error: ${1:+$1 does not exist; }name a recipe: $0 recipes/llama3_8b.sh [ARGUMENT]..." >&2
    exit 2
fi
recipe=$1
shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=recipes/launch/site.sh
. "$root/recipes/launch/site.sh"
# shellcheck source=recipes/llama3_8b.sh
. "$recipe"

: "${NNODES:=1}"
if [ -z "$DATA" ]; then
    DATA=$root/recipes/data/quickstart_rollouts.jsonl
    TOKENIZER=mistral-v7
fi
if [ -z "$SAVE" ]; then
    SAVE=runs/$(basename "$recipe" .sh)
fi

DATA_ARGS=(--prefix-tree-data-path "$DATA")
if [ -n "$TOKENIZER" ]; then
    DATA_ARGS+=(--prefix-tree-tokenizer "$TOKENIZER")
    if [ "$EXPAND_TURNS" = yes ]; then
        DATA_ARGS+=(--prefix-tree-expand-turns)
    fi
fi

BATCH_ARGS=(
    --prefix-tree
    --prefix-tree-max-tokens "$MAX_TOKENS"
    --seq-length "$MAX_TOKENS" # no sample may be longer
    --micro-batch-size "$MICRO_BATCH_SIZE"
    --global-batch-size "$GLOBAL_BATCH_SIZE"
    --train-iters "$TRAIN_ITERS"
)

OPTIMIZER_ARGS=(
    --bf16
    --lr "$LR"
    --min-lr 0
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

# The same folder to save to and to load from: whoever starts this job again continues it.
CHECKPOINT_ARGS=(
    --save "$SAVE"
    --load "$SAVE"
    --save-interval "$SAVE_INTERVAL"
    --ckpt-format torch_dist
    --exit-signal-handler # SIGTERM: save after this step and end
)
if [ -n "$WEIGHTS" ]; then
    CHECKPOINT_ARGS+=(--pretrained-checkpoint "$WEIGHTS")
fi

LOG_ARGS=(
    --log-interval 1
    --eval-iters 0 # with --prefix-tree-valid-data-path FILE at the end of the command, also another --eval-iters
    --eval-interval 100
    --tensorboard-dir "$SAVE/tensorboard"
)

# shellcheck disable=SC2034
JOB=(
    -m mcore_prefix_tree.pretrain_gpt
    "${MODEL_ARGS[@]}" "${LAYOUT_ARGS[@]}" "${BATCH_ARGS[@]}" "${OPTIMIZER_ARGS[@]}"
    "${DATA_ARGS[@]}" "${CHECKPOINT_ARGS[@]}" "${LOG_ARGS[@]}" "$@"
)

# shellcheck disable=SC2034
TORCHRUN=(
    torchrun
    --nnodes "$NNODES"
    --nproc-per-node "$GPUS_PER_NODE"
    --max-restarts "$MAX_RESTARTS"
    --rdzv-backend c10d
)

export MEGATRON_LM_PATH
# What Megatron asks for with tensor parallelism on GPUs before Blackwell.
export CUDA_DEVICE_MAX_CONNECTIONS=1
# Every micro-batch has another length: without it freed memory stays in pieces of the wrong size.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# A store of its own for every start of the workers: see https://github.com/pytorch/pytorch/issues/135712.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Seconds that torchrun leaves the workers for their last checkpoint after a SIGTERM; an older torchrun leaves 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600
