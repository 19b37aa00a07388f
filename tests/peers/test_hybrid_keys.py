"""Checkpoints of hybrid models move between a CPU and a GPU: both stacks save the same tensors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from harness.commands import run_process

hybrid_block = pytest.importorskip("megatron.core.models.hybrid.hybrid_block", reason="HybridModel came with 0.18")
if "mla_layer" not in hybrid_block.HybridStackSubmodules.__dataclass_fields__:
    pytest.skip("multi-latent attention in a HybridModel came with megatron-core 0.19", allow_module_level=True)


@pytest.mark.ci
def test_stacks_of_local_and_of_transformer_engines_layers_save_the_same() -> None:
    done = run_process(
        [sys.executable, str(Path(__file__).with_name("hybrid_keys.py"))],
        env={"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        code=0,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert sorted(found) == ["dense", "experts", "latent"]
    for name, (upstreams, tree, local) in found.items():
        assert len(upstreams) > 12
        assert tree == upstreams, name
        assert local == upstreams, name
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in found["dense"][0]
