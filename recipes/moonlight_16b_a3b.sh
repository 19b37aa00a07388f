# shellcheck shell=bash disable=SC2034
# Moonlight 16B A3B, built like DeepSeek-V3: multi-latent attention, 64 experts and two that all tokens share. EP=8.
#
# Hardware  1, 2, 4, ... nodes of 8 GPUs with 80 GB. TransformerEngine, for the attention and the grouped GEMM.
# Expect    on one node, by an estimate, 41.1 GiB of weights, gradients and optimizer on a rank and 12.1 GiB of
#           activations in a micro-batch of MAX_TOKENS with balanced routing, logits aside. Speed: not yet measured.
# Start     recipes/launch/{dry_run.sh,torchrun.sh} recipes/moonlight_16b_a3b.sh
#           sbatch --nodes=1 recipes/launch/slurm.sbatch recipes/moonlight_16b_a3b.sh
# Edit      the numbers below, or export them; settings of your site are in recipes/launch/site.sh.

: "${MAX_TOKENS:=16384}"      # unique tokens per micro-batch, and the longest sample; determines the memory
: "${GLOBAL_BATCH_SIZE:=256}" # samples per step
: "${TRAIN_ITERS:=500}"
: "${LR:=1e-5}"

MODEL_ARGS=(
    --num-layers 27
    --hidden-size 2048
    --ffn-hidden-size 11264
    --num-attention-heads 16
    --multi-latent-attention
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --qk-layernorm
    --rope-type rope
    --rotary-base 50000
    --no-rope-fusion # the fusion counts positions along the micro-batch, which folding does not support
    --vocab-size 163840
    --max-position-embeddings 16384
    --position-embedding-type rope
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
    --num-experts 64
    --moe-layer-freq "[0]*1+[1]*26"
    --moe-ffn-hidden-size 1408
    --moe-shared-expert-intermediate-size 2816
    --moe-router-topk 6
    --moe-router-score-function sigmoid
    --moe-router-topk-scaling-factor 2.446
    --moe-router-dtype fp32
    # The biases of the checkpoint choose the experts. With a rate, they are updated: docs/experts.md.
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0
    --moe-router-load-balancing-type none
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    # Routing is therefore not balanced, and experts would hold most of the activations, so they are recomputed.
    --recompute-granularity selective
    --recompute-modules moe mla_up_proj
)

LAYOUT_ARGS=(
    --tensor-model-parallel-size 1 # more needs --sequence-parallel
    --pipeline-model-parallel-size 1
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
)
