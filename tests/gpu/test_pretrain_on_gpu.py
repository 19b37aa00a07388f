"""Megatron-LM's own training loop on a GPU, folded: equal in fp32, in bf16 no further from it than its stock run is."""

from __future__ import annotations

from pathlib import Path

import pytest
from bf16 import assert_no_further, bf16_errors
from megatron_lm import (
    ENTRY,
    ITERATIONS,
    LOSS,
    STOCK,
    TRAIN,
    UNFOLDED,
    VOCAB,
    assert_same_tensors,
    require_checkout,
    trained,
    write_samples,
)

require_checkout()

# Heads of a size that every back-end takes, samples over several of their tiles.
MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--seq-length 512 --max-position-embeddings 512 --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    f"--padded-vocab-size {VOCAB} --vocab-size {VOCAB} --no-gradient-accumulation-fusion"
)
LATENT = (
    MODEL.replace("--group-query-attention --num-query-groups 2", "--multi-latent-attention --no-rope-fusion")
    + " --q-lora-rank 128 --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 --rope-type rope"
)
MODELS = {"grouped queries": MODEL, "latent attention": LATENT}
SCALE = 8
IMPLEMENTATIONS = {
    # Its fusions need Apex or Megatron-LM's own extensions.
    "local": "--transformer-impl local --no-persist-layer-norm --no-rope-fusion --no-masked-softmax-fusion",
    "transformer_engine": "--transformer-impl transformer_engine",
}
FOLDED = f"--prefix-tree --prefix-tree-max-tokens {400 * SCALE} --micro-batch-size 4"


def layers(implementation: str, model: str) -> str:
    """The arguments of a model; upstream's local layers lack an attention with two head sizes, which a spec brings."""
    spec = "--spec latent_spec dense_layer" if (implementation, model) == ("local", "latent attention") else ""
    return f"{MODELS[model]} {IMPLEMENTATIONS[implementation]} {spec}"


@pytest.fixture
def data(tmp_path: Path) -> str:
    """The arguments that name the samples."""
    samples = tmp_path / "samples.jsonl"
    write_samples(samples, scale=SCALE)
    return f"--prefix-tree-data-path {samples} --prefix-tree-order file"


@pytest.mark.parametrize("model", MODELS)
def test_fp32_equals_the_stock_run(model, data, tmp_path):
    """With local layers: those of TransformerEngine multiply matrices in TF32."""
    common = (layers("local", model), TRAIN, data)
    alone = trained(STOCK, *common, UNFOLDED, f"--save {tmp_path / 'alone'}")
    folded = trained(ENTRY, *common, FOLDED, f"--save {tmp_path / 'folded'}")
    assert sorted(alone.losses) == list(range(1, ITERATIONS + 1))
    assert folded.losses == pytest.approx(alone.losses, rel=LOSS)
    assert_same_tensors(tmp_path / "folded", tmp_path / "alone", ITERATIONS)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bf16_stays_as_close_to_fp32_as_the_stock_run(implementation, model, data, tmp_path, record_property):
    if implementation == "transformer_engine":
        pytest.importorskip("transformer_engine.pytorch")
    errors = bf16_errors(data, FOLDED, layers(implementation, model), tmp_path)
    for way, found in errors.items():
        for what, error in vars(found).items():
            record_property(f"{way} {what} error", error)
    assert_no_further(errors)
