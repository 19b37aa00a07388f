# shellcheck shell=bash
# Sourced by the launchers beside it, with a recipe and further arguments of pretrain_gpt.py. Makes of them:
#
#   JOB        what Python is to run, word by word; decide_sizes adds what the data decides
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

# Samples folded into one micro-batch on average. Empty: as many as MAX_TOKENS allows in every step, which a dry run
# finds in the data, together with the longest sample.
: "${MICRO_BATCH_SIZE:=}"
for argument in "$@"; do
    case $argument in
    # No step is trained, or the model is not known yet: a dry run takes neither.
    --prefix-tree-score | --prefix-tree-score=* | --use-checkpoint-args) : "${MICRO_BATCH_SIZE:=1}" ;;
    esac
done

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
    --global-batch-size "$GLOBAL_BATCH_SIZE"
    --train-iters "$TRAIN_ITERS"
)
if [ -n "$MICRO_BATCH_SIZE" ]; then
    BATCH_ARGS+=(--micro-batch-size "$MICRO_BATCH_SIZE" --seq-length "$MAX_TOKENS") # no sample may be longer
fi

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
# Megatron-LM adds weight gradients up in a kernel of NVIDIA Apex by default, and refuses to start if it is missing.
if ! python -c 'import sys; from importlib.util import find_spec; sys.exit(not find_spec("fused_weight_gradient_mlp_cuda"))'; then
    echo "NVIDIA Apex is not installed: --no-gradient-accumulation-fusion is added" >&2
    OPTIMIZER_ARGS+=(--no-gradient-accumulation-fusion)
fi

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

# decide_sizes: print the dry run of a job that leaves sizes to its data, and add the sizes to JOB.
decide_sizes() {
    if [ -n "$MICRO_BATCH_SIZE" ]; then return; fi
    local plan found
    plan=$(WORLD_SIZE=$((NNODES * GPUS_PER_NODE)) python "${JOB[@]}" --prefix-tree-dry-run)
    echo "$plan"
    read -r -a found < <(sed -n 's/^sizes that the data decides: //p' <<<"$plan") || true
    JOB+=("${found[@]}")
}

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
# The kernels that FlashAttention-4 compiles, on disk: else every process compiles them at every start. They are kept in
# FLASH_ATTENTION_CUTE_DSL_CACHE_DIR, by default in the machine's folder for temporary files.
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=${FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED:-1}
# A store of its own for every start of the workers: see https://github.com/pytorch/pytorch/issues/135712.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Seconds that torchrun leaves the workers for their last checkpoint after a SIGTERM; an older torchrun leaves 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600
