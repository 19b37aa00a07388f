"""Every argument of Megatron-LM's that reaches a model is refused by name, or folding is exact with it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_lm import require_checkout, search_path

require_checkout(trains=False)

SCRIPT = Path(__file__).with_name("swept_arguments.py")
# Values that no rule finds, with the arguments that they need.
EXAMPLES = {
    "--window-size": ["3,0"],
    "--window-attn-skip-freq": ["2 --window-size 3,0"],
    "--no-rope-freq": ["2"],
    "--group-query-attention": ["--num-query-groups 2"],
    "--use-mup": ["--mup-base-hidden-size 8"],
    "--glu-linear-offset": ["0.5 --quick-geglu"],
    "--fp32-residual-connection": ["--bf16"],
    "--batch-invariant-mode": ["--attention-backend flash", "--attention-backend flash --bf16"],
    "--multi-latent-attention": [
        "--q-lora-rank 12 --kv-lora-rank 10 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 --swiglu "
        "--normalization RMSNorm --disable-bias-linear --spec latent_spec dense_layer"
    ],
    "--experimental-attention-variant": ["dsa --disable-bias-linear"],
    "--linear-attention-freq": ["2"],
    "--hybrid-layer-pattern": ["*- --spec mcore_prefix_tree.cpu.hybrid hybrid_stack"],
    "--cuda-graph-scope": ["attn"],
    "--cuda-graph-modules": ["attn"],
    "--spec": ["mcore_prefix_tree.mcore.seam.layer_specs gpt_layer_local"],
    "--use-legacy-models": ["--ckpt-format torch"],
    "--recompute-granularity": [
        "full --recompute-method uniform --recompute-num-layers 1",
        "full --recompute-method block --recompute-num-layers 1",
    ],
    "--moe-layer-freq": ["2"],
    "--moe-router-topk": ["1 --moe-router-pre-softmax"],
    "--moe-router-group-topk": ["1 --moe-router-num-groups 2"],
    "--moe-router-enable-expert-bias": ["--moe-router-score-function sigmoid --moe-router-bias-update-rate 0"],
    "--moe-use-grouped-tensor": ["--moe-grouped-gemm"],
    "--gtp-remat-opt-in-modules": ["moe_latent_proj"],
    "--moe-single-grouped-weight": ["--moe-grouped-gemm"],
    "--moe-single-grouped-bias": ["--moe-grouped-gemm"],
    "--moe-expert-rank-capacity-factor": ["1 --moe-flex-dispatcher-backend hybridep"],
    "--moe-paged-stash": ["--moe-expert-rank-capacity-factor 1 --moe-flex-dispatcher-backend hybridep"],
    "--moe-pad-expert-input-to-capacity": ["--moe-expert-capacity-factor 1"],
    "--moe-apply-probs-on-input": ["--moe-router-topk 1 --moe-router-pre-softmax"],
}
# Its losses are those of test_pretrain_kinds.py; this sweep gives no labels.
ELSEWHERE = {"--mtp-num-layers"}
# Parts that upstream computes in fp32 and that fp64 cannot replace.
IN_FP32 = {"--moe-router-dtype", "--moe-layer-recompute"}
TOLD = {"exact", "exact in fp32", "refused"}
# Why Megatron-LM itself does not take an argument on one CPU, in its own words.
NOT_HERE = {
    "one rank": r"world size|divisible by|model parallel|expert model parallelism|PP stages|TPxEP|across tensor|"
    r"sequence parallelism|overlap_|Overlap|pipeline model|layout_str|flex|context parallelism",
    "no TransformerEngine": r"\bTE\b|[Tt]ransformer.?[Ee]ngine|TESpecProvider|fused_|"
    r"'NoneType' and 'Version'|zero_centered_gamma|'NoneType' object is not callable|Grouped GEMM|CPU [Oo]ffload",
    "no inference": r"inference",
    "fp8, fp4 or fp16": r"fp8|fp4|fp16 mode",
    "a file": r"No such file|Is a directory",
    "another attention": r"linear_attention|linear gated|mrope.section|bias-based",
    "CUDA graphs": r"cuda.graph",
    "upstream's own fault": r"unexpected keyword argument 'scaled_init_method'",
}
# A model of layers of several kinds, as Llama-Nemotron has them.
KEPT = {"no_op": False, "replace_with_linear": False}
BLOCKS = {
    **{"hidden_act": "silu", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "rope_theta": 10000},
    **{"tie_word_embeddings": False, "rope_scaling": {"factor": 8.0}},
    "block_configs": [
        {"attention": {"n_heads_in_group": 2, **KEPT}, "ffn": {"ffn_mult": 2.0, **KEPT}},
        {"attention": {"n_heads_in_group": 2, **KEPT}, "ffn": {"ffn_mult": 4.0, **KEPT}},
    ],
}
OF_BLOCKS = (
    "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 --use-rope-scaling "
    "--disable-bias-linear --use-rotary-position-embeddings --untie-embeddings-and-output-weights"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Outcome of each case."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "blocks.json").write_text(json.dumps(BLOCKS))
    examples = EXAMPLES | {"--heterogeneous-layers-config-path": [f"{folder / 'blocks.json'} {OF_BLOCKS}"]}
    (folder / "examples").write_text(json.dumps(examples))
    subprocess.run(
        [sys.executable, str(SCRIPT), str(folder / "examples"), str(folder / "answers")],
        check=True,
        timeout=600,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "PATH": search_path(), "MASTER_ADDR": "localhost", "NCCL_ALGO": "Ring"}
        | {"PYTHONPATH": os.pathsep.join(filter(None, [str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH")]))},
    )
    cases: list[dict[str, str]] = json.loads((folder / "answers").read_text())
    return [case for case in cases if case["option"] not in ELSEWHERE]


def test_accepted_arguments_are_exact(found: list[dict[str, str]]) -> None:
    assert [case for case in found if case["outcome"] in ("different", "broken")] == []
    assert sum(case["outcome"] == "exact" for case in found) > 100
    assert {case["option"] for case in found if case["outcome"] == "exact in fp32"} <= IN_FP32


def test_every_argument_is_tried(found: list[dict[str, str]]) -> None:
    here = re.compile("|".join(NOT_HERE.values()))
    told = {case["option"] for case in found if case["outcome"] in TOLD or here.search(case["said"])}
    assert [case for case in found if case["option"] not in told] == []


def test_refusals_name_a_setting(found: list[dict[str, str]]) -> None:
    refused = [case for case in found if case["outcome"] == "refused"]
    assert len(refused) > 15
    assert [case for case in refused if not re.search(r"--[a-z]+-|[a-z]+_[a-z]+|fp8|--fp16", case["said"])] == []
