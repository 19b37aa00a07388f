"""NeMo-RL's own passes and losses answer the same with its model and with the one that folds inside.

Needs a checkout of NeMo-RL in NEMO_RL_PATH, and Megatron-Bridge: see requirements/bridge.txt.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

if not os.getenv("NEMO_RL_PATH"):
    pytest.skip("NEMO_RL_PATH does not name a checkout of NeMo-RL", allow_module_level=True)
if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)
pytest.importorskip("transformers")
from harness.layouts import in_layouts
from harness.seam_runs import FP32_INSIDE
from harness.worlds import Layout, world
from nemo_rl_runs import WORKER, compare, refusals


@in_layouts("single", "tp2-sp", slow=["tp2", "dp2"])
def test_logprobs_losses_and_gradients(size: int, layout: Layout) -> None:
    results = world(size).run(compare, layout, layout=layout)
    for result in results:
        assert {"logprobs logprobs", "loss loss"} <= {*result["names"]}
    # NeMo-RL adds up the results of its data-parallel ranks.
    replicas = size // layout.tp
    added = {name: sum(result["report"][name][0] for result in results[:: layout.tp]) for name in results[0]["report"]}
    assert added["fold/fold_ratio"] > 1.3
    assert (added["fold/micro_batches"], added["fold/rows"]) == (2 * replicas, 16 * replicas)


def test_precision_of_its_recipes() -> None:
    """``policy.precision: bfloat16``: both models round, to 8 bits, but not at the same places."""
    (result,) = world(1).run(compare, Layout(), 3e-2, None, False, None, "bfloat16", layout=Layout())
    assert result["report"]["fold/fold_ratio"][0] > 1.3


@in_layouts("single", "tp2-sp", "pp2")
def test_multi_token_prediction(size: int, layout: Layout) -> None:
    """Gradients of all layers, of depths that learn from the answers as NeMo-RL masks them."""
    results = world(size).run(compare, layout, FP32_INSIDE, None, False, 2, layout=layout)
    assert any(" mtp.layers." in name for name in results[-1]["names"])


@in_layouts("single", "tp2-sp", "pp2", "ep2")
@pytest.mark.parametrize("layers", [slice(None), slice(1, None)], ids=["all", "with experts"])
def test_routes_of_the_rollout(size: int, layout: Layout, layers: slice) -> None:
    """NeMo-RL gives every router of its model the rows' routes; ours takes them on each stage, of all layers."""
    results = world(size).run(compare, layout, 1e-6, layers, layout=layout)
    assert {"logprobs logprobs", "loss loss"} <= {*results[-1]["names"]}
    assert all(result["report"]["fold/fold_ratio"][0] * size / layout.tp / layout.pp > 1.1 for result in results)


def test_routes_are_exact_if_megatron_keeps_its_scores() -> None:
    world(1).run(compare, Layout(), 1e-12, slice(None), True, layout=Layout())


REFUSED: dict[str, dict[str, Any]] = {
    "policy.sequence_packing.enabled=false": {"sequence_packing": {"enabled": False}},
    "policy.generation.backend=megatron": {"generation": {"backend": "megatron"}},
    "policy.draft.enabled=true": {"draft": {"enabled": True}},
    "policy.megatron_cfg.use_fused_linear_logprobs=true": {"megatron_cfg": {"use_fused_linear_logprobs": True}},
}


def test_refusals_by_name() -> None:
    (said,) = world(1).run(refusals, Layout(), list(REFUSED.values()), layout=Layout())
    assert [name in message for name, message in zip(REFUSED, said, strict=True)] == [True] * len(REFUSED)


@pytest.fixture(scope="module")
def worker() -> dict[str, ast.FunctionDef]:
    """Methods of the real worker, which cannot be imported here: their source is read for names in use."""
    source = Path(os.environ["NEMO_RL_PATH"], *WORKER.split(".")).with_suffix(".py").read_text()
    (impl,) = (
        node for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "MegatronPolicyWorkerImpl"
    )  # fmt: skip
    return {node.name: node for node in impl.body if isinstance(node, ast.FunctionDef)}


def test_the_worker_keeps_its_model(worker: dict[str, ast.FunctionDef]) -> None:
    assert any(ast.unparse(statement).startswith("self.model = ") for statement in worker["__init__"].body)


def test_the_worker_returns_the_metrics_that_the_report_joins(worker: dict[str, ast.FunctionDef]) -> None:
    assert [argument.arg for argument in worker["train"].args.args][:4] == ["self", "data", "loss_fn", "eval_mode"]
    for name in ("train", "_finish_train_step_body"):
        source = ast.unparse(worker[name])
        assert "'all_mb_metrics': mb_metrics" in source
        assert source.endswith("return metrics")
    assert "return self._finish_train_step_body(state)" in ast.unparse(worker["finish_train_step"])
    assert "begin_train_step" in worker
