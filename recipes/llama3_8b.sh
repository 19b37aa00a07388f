# shellcheck shell=bash disable=SC2034
# Llama 3.1 8B: TP=4 with sequence parallelism, PP=2, a data-parallel replica on every node.
#
# Hardware  1, 2, 4, ... nodes of 8 GPUs with 80 GB. TransformerEngine.
# Expect    on one node, by an estimate, 16.8 GiB of weights, gradients and optimizer on a rank and 36.5 GiB
#           of activations in a micro-batch of MAX_TOKENS, logits aside. Speed: not yet measured.
# Start     recipes/launch/{dry_run.sh,torchrun.sh,slurm.sbatch} recipes/llama3_8b.sh
# Edit      the numbers below, or export them; settings of your site are in recipes/launch/site.sh.

: "${MAX_TOKENS:=32768}"      # unique tokens per micro-batch, and the longest sample; determines the memory
: "${GLOBAL_BATCH_SIZE:=256}" # samples per step
: "${TRAIN_ITERS:=500}"
: "${LR:=1e-5}"

MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --vocab-size 128256
    --max-position-embeddings 131072
    --position-embedding-type rope
    --rotary-base 500000
    --use-rope-scaling
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
)

LAYOUT_ARGS=(
    --tensor-model-parallel-size 4
    --sequence-parallel
    --pipeline-model-parallel-size 2
)
