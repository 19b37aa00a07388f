# shellcheck shell=bash disable=SC2034
# Qwen3 30B A3B, a mixture of 128 experts: TP=2 with sequence parallelism, PP=2, EP=8.
#
# Hardware  2, 4, ... nodes of 8 GPUs with 80 GB: EP and PP take 16 GPUs. TransformerEngine, for the grouped GEMM.
# Expect    on two nodes, by an estimate, 33.6 GiB of weights, gradients and optimizer on a rank and 20 GiB of
#           activations in a micro-batch of MAX_TOKENS with balanced routing, logits aside. Speed: not yet measured.
# Start     NNODES=2 recipes/launch/{dry_run.sh,torchrun.sh} recipes/qwen3_30b_a3b.sh
#           sbatch --nodes=2 recipes/launch/slurm.sbatch recipes/qwen3_30b_a3b.sh
# Edit      the numbers below, or export them; settings of your site are in recipes/launch/site.sh.

: "${NNODES:=2}"
: "${MAX_TOKENS:=16384}"      # unique tokens per micro-batch, and the longest sample; determines the memory
: "${GLOBAL_BATCH_SIZE:=256}" # samples per step
: "${TRAIN_ITERS:=500}"
: "${LR:=1e-5}"

MODEL_ARGS=(
    --num-layers 48
    --hidden-size 2048
    --ffn-hidden-size 6144
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 4
    --kv-channels 128
    --qk-layernorm
    --vocab-size 151936
    --max-position-embeddings 40960
    --position-embedding-type rope
    --rotary-base 1000000
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
    --num-experts 128
    --moe-ffn-hidden-size 768
    --moe-router-topk 8
    --moe-router-dtype fp32
    # A balancing loss counts a shared token once per sample: docs/experts.md.
    --moe-router-load-balancing-type none
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    # Routing is therefore not balanced, and experts would hold over half of the activations, so they are recomputed.
    --recompute-granularity selective
    --recompute-modules moe
)

LAYOUT_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 2
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
)
