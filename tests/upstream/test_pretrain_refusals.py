"""Everything that folding cannot do is refused by Megatron-LM's arguments, before there is a model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron_lm import CPU, FOLDED, MODEL, TRAIN, VARIABLE, require_checkout, search_path

require_checkout(trains=False)

SCRIPT = Path(__file__).with_name("refusals.py")
COMMON = f"{CPU} {MODEL} {TRAIN} {FOLDED} --prefix-tree-data-path /dev/null"
FP8 = "--fp8-format hybrid --fp8-recipe tensorwise"
PLANNED = "--transformer-impl transformer_engine --no-rope-fusion --prefix-tree-dry-run"
MOE = "--num-experts 4 --moe-token-dispatcher-type alltoall"
LATENT = "without --group-query-attention --no-rope-fusion -- --multi-latent-attention"

EXISTING = Path(__file__).parents[2] / "recipes" / "data" / "quickstart_rollouts.jsonl"
INTERLEAVED = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"


def has_hybrid_model() -> bool:
    return Path(os.environ[VARIABLE], "megatron", "core", "models", "hybrid").is_dir()


# Arguments, and the beginning of their error after "prefix-tree training does not support ".
SPINE = [
    ("--context-parallel-size 2", "--context-parallel-size 2"),
    ("--attention-dropout 0.1", "--attention-dropout 0.1"),
    ("--hidden-dropout 0.1", "--hidden-dropout 0.1"),
    (f"{LATENT} --rope-type yarn", "apply_rope_fusion=True with multi_latent_attention"),
    (
        f"{LATENT} --no-rope-fusion --tensor-model-parallel-size 2 --transformer-impl transformer_engine",
        "multi_latent_attention with tensor_model_parallel_size=2 and without sequence_parallel",
    ),
    ("--window-size 16,1", "window_size=(16, 1)"),
    ("--window-size=-1,0", "window_size=(-1, 0)"),
    ("--qk-clip", "qk_clip or log_max_attention_logit"),
    ("--log-max-attention-logit", "qk_clip or log_max_attention_logit"),
    ("--fp8-format hybrid", "fp8_recipe='delayed'"),
    (f"{FP8} --fp8-param-gather --use-distributed-optimizer", "fp8_param=True"),
    (f"{MOE} {FP8} --moe-router-padding-for-quantization", "moe_router_padding_for_quantization=True"),
    (f"{FP8} --mtp-num-layers 1", "fp8 with mtp_num_layers=1"),
    ("--fp4-format e2m1", "fp4='e2m1'"),
    ("--cuda-graph-impl local", "--cuda-graph-impl local"),
    ("--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap", "tp_comm_overlap=True"),
    (f"{MOE} --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm", "overlap_moe_expert_parallel_comm"),
    (f"{MOE} --moe-router-load-balancing-type sinkhorn", "moe_router_load_balancing_type='sinkhorn'"),
    (f"{MOE} --moe-router-topk 64", "moe_router_topk=64 with num_moe_experts="),
    (f"{MOE} --moe-expert-capacity-factor 1.5", "moe_expert_capacity_factor=1.5"),
    (
        f"{MOE} --moe-expert-capacity-factor 4 --moe-pad-expert-input-to-capacity",
        "moe_pad_expert_input_to_capacity=True",
    ),
    (f"{MOE} --moe-router-force-load-balancing", "moe_router_force_load_balancing or moe_router_force_biased"),
    (f"{MOE} --moe-input-jitter-eps 0.1", "moe_input_jitter_eps=0.1"),
    (f"{LATENT} --no-rope-fusion --cache-mla-latents", "cache_mla_latents=True"),
]
# Arguments that older checkouts lack.
NEWER = [
    (f"{MOE} --moe-router-load-balancing-type quantile_balancing", "moe_router_load_balancing_type='quantile_bal"),
    (f"{MOE} --moe-router-force-biased 0.1", "moe_router_force_load_balancing or moe_router_force_biased"),
    (f"{MOE} --moe-expert-rank-capacity-factor 1.5", "moe_expert_rank_capacity_factor"),
    ("--fp8-format hybrid --fp8-recipe mxfp8 --fp8-output-proj", "fp8_output_proj=True"),
    ("--enable-mhc-connections", "enable_mhc_connections=True"),
    (f"{MOE} --moe-dispatch-fwd-dtype mxfp8", "moe_dispatch_fwd_dtype='mxfp8'"),
    (f"{MOE} --moe-combine-bwd-dtype mxfp8", "moe_combine_bwd_dtype='mxfp8'"),
]
# For those who write a TransformerConfig: no argument of Megatron-LM sets the first, or the second to another layer;
# those of the third need nvidia-kitchen or TransformerEngine, and the last is refused only with a mean that this door
# never takes.
WITHOUT_ARGUMENT = {"fused_single_qkv_rope", "experimental_attention_variant", "use_kitchen or quant_recipe"}
WITHOUT_ARGUMENT |= {"dsa_indexer_loss_coeff"}
WITHOUT_ARGUMENT |= {"fp8_dot_product_attention", "fp8_multi_head_attention"}
WITHOUT_ARGUMENT |= {"fp8 with experimental_attention_variant"}  # TransformerEngine has these layers
# The error from its start; unit/test_argument_rules.py has those that need no Megatron-LM.
OTHER = [
    ("--window-size 16,0 --prefix-tree-attention-backend path", "attention backend 'path' does not support window=17 "),
    ("--window-size 16,0 --prefix-tree-attention-backend auto", "attention backend 'auto' finds none that supports"),
    ("--prefix-tree-attention-backend triton", "attention backend 'triton' does not support "),
    (
        "--position-embedding-type learned_absolute --max-position-embeddings 32",
        "Megatron-LM does not take these arguments: max_position_embeddings (32) must be greater than or equal to "
        "seq_length (64)",
    ),
    (FP8, "--fp8-format hybrid needs --transformer-impl transformer_engine, and TransformerEngine installed; set"),
    ("--spec os system", "--spec os system: os.system is a builtin_function_or_method and no spec of layers; for exam"),
    ("--spec os nothing", "--spec os nothing: os.nothing is missing and no spec of layers; for example --spec mcore_"),
    (
        "--spec json.no_part x",
        "--spec json.no_part x: there is no module json.no_part; for example --spec mcore_prefix",
    ),
    (
        "--spec nope layer",
        "--spec nope layer: there is no module nope; for example --spec mcore_prefix_tree.mcore.seam",
    ),
    ("--hidden-size 30", "Megatron-LM does not take these arguments: assert args.hidden_size % args.num_attention_hea"),
    ("--prefix-tree-max-token 3", "unrecognized arguments: --prefix-tree-max-token 3"),
    ("--prefix-tree-max-tokens x", "argument --prefix-tree-max-tokens: 'x' is not a number of at most 2147483647"),
    ("--prefix-tree-chat-template-kwargs [3]", "argument --prefix-tree-chat-template-kwargs: '[3]' is not a JSON o"),
    ("--prefix-tree-chat-template-kwargs {", "argument --prefix-tree-chat-template-kwargs: '{' is not JSON (Expe"),
    ('--prefix-tree-fields {"grop":"a"}', "argument --prefix-tree-fields: 'grop' is not a field that samples have"),
    ("--log-throughput", "prefix-tree training does not support --log-throughput: it counts --seq-length tokens per"),
    ("--log-progress", "prefix-tree training does not support --log-progress: it counts --seq-length tokens per"),
    (
        "without --no-gradient-accumulation-fusion --",
        "--no-gradient-accumulation-fusion is missing: Megatron-LM's default needs NVIDIA Apex, ",
    ),
    (
        "GPUS=1 LOCAL_RANK=3",
        "this machine has 4 ranks, each of which takes the GPU numbered LOCAL_RANK, and this one sees 1: ",
    ),
    (
        "GPUS=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=8",
        "this machine has 8 ranks, each of which takes the GPU numbered LOCAL_RANK, and this one sees 4: ",
    ),
    (
        f"{LATENT} --no-rope-fusion --tensor-model-parallel-size 2 --sequence-parallel",
        "prefix-tree training does not support --transformer-impl local with --multi-latent-attention and --tensor-",
    ),
    (
        f"{LATENT} --no-rope-fusion GPUS=1",
        "--multi-latent-attention needs --transformer-impl transformer_engine: megatron-core's own attention has one ",
    ),
    ("--use-distributed-optimizer --save s", "--use-distributed-optimizer with --save: without the FusedAdam of "),
    # In Megatron's own words, which differ between its versions.
    ("--micro-batch-size 5", "Megatron-LM does not take these arguments: "),
    ("--micro-batch-size 32 --prefix-tree-dry-run", "Megatron-LM does not take these arguments: "),
    (
        f"WORLD_SIZE=4 {INTERLEAVED} --micro-batch-size 8",
        "a step has 1 micro-batches on each rank, but an interleaved pipeline of 2 stages takes them 2 at a time",
    ),
    (
        f"WORLD_SIZE=4 {INTERLEAVED} --micro-batch-size 2 --no-overlap-p2p-communication",
        "Megatron-LM does not take these arguments: When interleaved schedule is used and p2p ",
    ),
    (
        "--prefix-tree-objective critic --ckpt-format torch",
        "prefix-tree training does not support --ckpt-format torch with --prefix-tree-objective critic: only torch",
    ),
    ("--prefix-tree-score s.jsonl", "--prefix-tree-score needs --load, the folder of the checkpoints to score with"),
    ("--prefix-tree-score s.jsonl --load /dev/shm", "--load /dev/shm holds no checkpoint; name the folder of a run "),
    ("--prefix-tree-score s.txt", "--prefix-tree-score s.txt: give a name that ends in .jsonl, .json, "),
    (f"--prefix-tree-score {EXISTING}", f"--prefix-tree-score {EXISTING}: exists; name another file, or move it away"),
    (
        f"--prefix-tree-score {EXISTING} --prefix-tree-data-path {EXISTING}",
        f"--prefix-tree-score {EXISTING}: is read by this command, which would replace it; name another file",
    ),
    (
        "--prefix-tree-score s.jsonl --save s --prefix-tree-new-data",
        "--prefix-tree-score does not take --save: nothing is saved; remove it; nor --prefix-tree-new-data: not",
    ),
    (
        "--prefix-tree-score s.jsonl --prefix-tree-objective critic --prefix-tree-score-teacher-top-k 2",
        "--prefix-tree-score-teacher-top-k requires a vocabulary, and --prefix-tree-objective=critic has none",
    ),
    (
        "--hybrid-override-pattern *-/*-",
        "--hybrid-layer-pattern without --spec: Megatron-Core's own hybrid layers are TransformerEngine's, which is not"
        if has_hybrid_model()
        else "--hybrid-override-pattern: hybrid models need HybridModel, which came with megatron-core 0.18; check out",
    ),
    (
        f"{FP8} {PLANNED} --prefix-tree-length-buckets 100008",
        "--prefix-tree-length-buckets: 100008 is not a multiple of 16, which parallel layout and FP8 need",
    ),
    ("--prefix-tree-length-buckets 8", "--prefix-tree-length-buckets: the largest, 8, cannot hold a micro-batch"),
]
ACCEPTED = [
    "",
    MOE,
    f"{MOE} --recompute-granularity selective --recompute-modules moe",
    "without --no-gradient-accumulation-fusion -- --prefix-tree-dry-run",
    f"{LATENT} --no-rope-fusion",
    f"{FP8} {PLANNED}",
    f"{MOE} --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias",
    "LOCAL_RANK=3 LOCAL_WORLD_SIZE=8",
    "--window-size 16,0 --prefix-tree-attention-backend reference",
    "--use-distributed-optimizer --save s --no-save-optim",
]


def words_of(case: str) -> list[str]:
    """The case's own, after those of all; "without --flag ... --" takes some of those away."""
    own, without = case.split(), []
    if own[:1] == ["without"]:
        end = own.index("--")
        own, without = own[end + 1 :], own[1:end]
    return [word for word in COMMON.split() if word not in without] + own


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """The error of each command line."""
    folder = tmp_path_factory.mktemp("refusals")
    arguments = [*(case for case, _ in [*SPINE, *NEWER, *OTHER]), *ACCEPTED]
    (folder / "cases").write_text(json.dumps([words_of(case) for case in arguments]))
    subprocess.run(
        [sys.executable, str(SCRIPT), str(folder / "cases"), str(folder / "answers")],
        check=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PATH": search_path()},
    )
    return dict(zip(arguments, json.loads((folder / "answers").read_text()), strict=True))


@pytest.mark.parametrize(("arguments", "setting"), [*SPINE, *NEWER], ids=[case for case, _ in [*SPINE, *NEWER]])
def test_unsupported_settings_are_rejected_by_name(told: dict[str, str | None], arguments: str, setting: str) -> None:
    said = told[arguments]
    assert said is not None
    if (arguments, setting) in NEWER and re.match("unrecognized|argument .* invalid choice", said):
        pytest.skip("this checkout has no such argument")
    assert said.startswith(f"prefix-tree training does not support {setting}")
    assert "; nor " not in said, "nothing else is at fault"


@pytest.mark.parametrize(("arguments", "sentence"), OTHER, ids=[arguments for arguments, _ in OTHER])
def test_other_mistakes_are_rejected(told: dict[str, str | None], arguments: str, sentence: str) -> None:
    said = told[arguments]
    assert said is not None
    assert said.startswith(sentence)
    assert "\n" not in said


@pytest.mark.parametrize("arguments", ACCEPTED)
def test_supported_settings_are_accepted(told: dict[str, str | None], arguments: str) -> None:
    assert told[arguments] is None


def test_every_refusal_of_the_spine_is_driven_here() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mcore_prefix_tree.mcore.seam.validation import _refusals

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, num_moe_experts=4)
    sentences = [sentence for _, sentence in _refusals(SimpleNamespace(**vars(config)))]
    settings = [setting for _, setting in [*SPINE, *NEWER]]
    left = {name for name in map(setting_of, sentences) if not any(setting_of(case) == name for case in settings)}
    assert left == WITHOUT_ARGUMENT
    assert sum("moe_router_load_balancing_type" in sentence for sentence in sentences) == 2


def setting_of(sentence: str) -> str:
    """The name before a value or a colon; an option's as the field's."""
    name = sentence.partition(":")[0].partition("=")[0]
    return name.partition(" ")[0].removeprefix("--").replace("-", "_") if name.startswith("--") else name
