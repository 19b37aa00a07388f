"""A model built like DeepSeek-V3: multi-latent attention, a shared expert, experts chosen with biases."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_lm import (
    CPU,
    ENTRY,
    FOLDED,
    LOSS,
    MODEL,
    STOCK,
    TRAIN,
    UNFOLDED,
    Stock,
    assert_same_tensors,
    only_checkpoint,
    require_checkout,
    trained,
)

require_checkout()

LATENT = (
    MODEL.replace("--group-query-attention --num-query-groups 2", "--multi-latent-attention")
    + " --q-lora-rank 12 --kv-lora-rank 10 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 "
    "--rope-type yarn --rotary-scaling-factor 4 "
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 16 "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias"
)
BIASES_AS_THEY_ARE = "--moe-router-bias-update-rate 0"
LAST = 5


def test_latent_attention_and_biased_experts(stock: Stock, tmp_path: Path) -> None:
    alone = (*STOCK, "--spec", "latent_spec", "expert_layer")
    arguments = (CPU, LATENT, TRAIN, UNFOLDED, stock.data, f"--save {tmp_path / 'alone'}")
    trained(alone, *arguments, "--moe-router-bias-update-rate 0.1 --exit-interval 1")  # biases that are not zero
    rest = f"--load {tmp_path / 'alone'} --exit-interval {LAST}"
    losses = trained(alone, *arguments, BIASES_AS_THEY_ARE, rest).losses
    start = only_checkpoint(tmp_path / "alone", 1, tmp_path / "start")

    folded = (CPU, LATENT, TRAIN, FOLDED, stock.data, f"--save {tmp_path / 'folded'}")
    run = trained(ENTRY, *folded, BIASES_AS_THEY_ARE, f"--load {start} --exit-interval {LAST}")
    assert sorted(run.losses) == list(range(2, LAST + 1))
    for iteration, loss in run.losses.items():
        assert loss == pytest.approx(losses[iteration], rel=LOSS), iteration
        assert run.iterations[iteration]["fold ratio"] > 1.3
    assert_same_tensors(tmp_path / "folded", tmp_path / "alone", LAST)
