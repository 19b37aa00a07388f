"""The FLOPs by which a comparison weighs its parts, against those that torch counts in the passes that it times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.train_jobs import write_job
from torch.utils.flop_counter import FlopCounterMode, mm_flop, sdpa_backward_flop_count, sdpa_flop_count

from mcore_prefix_tree.attention import path as path_attention
from mcore_prefix_tree.mcore.engine import comparison
from mcore_prefix_tree.mcore.loop.jobs import compare_first, run_once
from mcore_prefix_tree.plan import ModelWork, Parts
from mcore_prefix_tree.plan.flops import Work
from mcore_prefix_tree.settings import load_recipe

pytestmark = pytest.mark.filterwarnings("ignore:::megatron", "ignore:::torch")

aten = torch.ops.aten
VOCAB = 67  # the size of nothing else
BATCH = ("batch.global_batch_size=10", "batch.max_tokens=50", f"model.vocab_size={VOCAB}")
MODEL = "model.transformer"
LATENT = (
    "model.num_query_groups=null",
    f"{MODEL}={{multi_latent_attention: true, q_lora_rank: 12, kv_lora_rank: 10, qk_head_dim: 6, "
    "qk_pos_emb_head_dim: 2, v_head_dim: 8}",
)
EXPERTS = (
    f"{MODEL}={{num_moe_experts: 4, moe_router_topk: 2, moe_ffn_hidden_size: 20, moe_layer_freq: 2, "
    "moe_shared_expert_intermediate_size: 28, moe_router_load_balancing_type: none, moe_aux_loss_coeff: 0.0}",
)


@contextmanager
def counted(found: Counter[str], columns: int) -> Iterator[None]:
    """Count multiplications of matrices by part: those of the head are the ones with its columns."""

    def product(*shapes: Sequence[int], **_: Any) -> int:
        one, other = shapes[-2:]
        flops = int(mm_flop(one, other))
        found["head" if columns in (*one, *other) else "body"] += flops
        return flops

    def scores(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        flops = int(sdpa_flop_count(query, key, value))
        found["attention forward"] += flops
        return flops

    def score_gradients(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        flops = int(sdpa_backward_flop_count(grad, query, key, value))
        found["attention backward"] += flops
        return flops

    counts = {
        aten.mm: product,
        aten.addmm: product,
        aten.addmm_: product,
        aten._scaled_dot_product_flash_attention_for_cpu: scores,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: score_gradients,
    }
    with FlopCounterMode(display=False, custom_mapping=counts):
        yield


def assert_agree(found: Counter[str], work: Work) -> None:
    # The back-end computes its scores once more in backward, of which a kernel would keep the statistics.
    assert found.pop("attention forward") == 2 * work.attention.forward
    assert found.pop("attention backward") == work.attention.backward
    assert found == {"body": work.body.total, "head": work.head.total}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param((), id="fused head"),
        pytest.param(("fused_head=false",), id="all logits", marks=pytest.mark.slow),
        pytest.param(("objective.name=critic",), id="scalar head", marks=pytest.mark.ci),
        pytest.param(("model.swiglu=false", "model.kv_channels=16"), id="no gate, wide heads", marks=pytest.mark.slow),
        pytest.param((f"{MODEL}={{attention_output_gate: true}}",), id="gated attention", marks=pytest.mark.slow),
        pytest.param(EXPERTS, id="experts", marks=pytest.mark.ci),
        pytest.param(LATENT, id="latent attention", marks=pytest.mark.slow),
    ],
)
def test_work_equals_torchs_count(changes: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries one at a time: no block computes scores that it masks."""
    monkeypatch.setattr(path_attention, "QUERY_BLOCK", 1)
    monkeypatch.setattr(path_attention, "_fused", lambda *_, **__: path_attention._Fused(roots=False, windows=True))
    run, found = comparison._timed, {}

    def timed(way: Any, *others: Any) -> list[Parts]:
        if way.name in found:
            return [Parts(1.0, 1.0, 1.0, 1.0)] * 2  # the timed round, which is as the one that warms up
        found[way.name] = Counter[str]()
        with counted(found[way.name], 1 if recipe.objective.has_scalar_head else VOCAB):
            return run(way, *others)

    monkeypatch.setattr(comparison, "_timed", timed)
    recipe = load_recipe(write_job(tmp_path), ["attention_backend=path", "device=cpu", *BATCH, *changes])
    compared, _ = run_once(recipe, partial(compare_first, repeats=1), is_trained=True)
    expected = compared.expected
    assert expected.parts["body"][0] == compared.fold_ratio > 1.5
    assert_agree(found["folded"], expected.folded)
    assert_agree(found["unfolded, packed"], expected.unfolded)
    # Megatron's own way multiplies as much in the body, and projects all positions.
    work = ModelWork.from_model(recipe.model, scalar_head=recipe.objective.has_scalar_head)
    stock, whole_head = found["unfolded, stock"], 3 * work.position * compared.logical_tokens
    assert stock["body"] + stock["head"] == expected.unfolded.body.total + whole_head
