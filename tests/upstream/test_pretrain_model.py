"""The model of a folded job is the one that the checkout's own builder makes, but for layers that follow the tree.

Arguments together and hybrid models; :mod:`test_pretrain_sweep` tries each argument by itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_lm import CPU, FOLDED, HYBRID_LAYERS, MODEL, TRAIN, VARIABLE, require_checkout, search_path

require_checkout(trains=False)

SCRIPT = Path(__file__).with_name("built_models.py")
COMMON = f"{CPU} {MODEL} {TRAIN} {FOLDED} --prefix-tree-data-path /dev/null"
UNTIED = "--untie-embeddings-and-output-weights "
TIED = COMMON.replace(UNTIED, "")
CASES = {
    "as it is": COMMON,
    "tied": f"{TIED} --normalization LayerNorm --qk-layernorm --padded-vocab-size 256 --max-position-embeddings 96",
    "rope": f"{COMMON} --rotary-percent 0.5 --rotary-base 500 --use-rope-scaling",
    "interpolated rope": f"{COMMON} --rotary-seq-len-interpolation-factor 2",
    "learned positions": f"{COMMON} --position-embedding-type learned_absolute",
    "experts": f"{COMMON} --num-experts 4 --moe-token-dispatcher-type alltoall --qk-l2-norm "
    "--make-vocab-size-divisible-by 64",
    "spec": f"{COMMON} --spec mcore_prefix_tree.mcore.seam.layer_specs gpt_layer_local",
}
OPTION = "hybrid-layer-pattern"
HYBRID = COMMON.replace("--num-layers 4", f"{HYBRID_LAYERS} *-*-")
# Of scripts of a newer Megatron-LM, by the option that they came with.
NEWER = {
    "logits of another type": ("--output-logit-dtype", f"{COMMON} --output-logit-dtype bf16 --bf16"),
    "hybrid": (OPTION, HYBRID),
    "hybrid, tied": (
        OPTION,
        f"{HYBRID.replace(UNTIED, '')} --padded-vocab-size 256 --max-position-embeddings 96 --rotary-percent 0.5 "
        "--rotary-base 500",
    ),
    "hybrid, experts": (
        OPTION,
        f"{HYBRID.replace('*-*-', '*E-*E')} --num-experts 4 --moe-token-dispatcher-type alltoall",
    ),
    "hybrid, interpolated rope": (OPTION, f"{HYBRID} --rotary-seq-len-interpolation-factor 2"),
    "hybrid, learned positions": (OPTION, f"{HYBRID} --position-embedding-type learned_absolute"),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("models")
    arguments = (Path(os.environ[VARIABLE]) / "megatron" / "training" / "arguments.py").read_text()
    cases = CASES | {name: words for name, (option, words) in NEWER.items() if option in arguments}
    (folder / "cases").write_text(json.dumps([words.split() for words in cases.values()]))
    subprocess.run(
        [sys.executable, str(SCRIPT), str(folder / "cases"), str(folder / "answers")],
        check=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PATH": search_path(), "MASTER_ADDR": "localhost"},
    )
    return dict(zip(cases, json.loads((folder / "answers").read_text()), strict=True))


@pytest.mark.parametrize("case", [*CASES, *NEWER])
def test_tree_model_is_the_stock_model(answers: dict[str, list[str]], case: str) -> None:
    if case not in answers:
        pytest.skip("this Megatron-LM has no such argument")
    assert answers[case] == []
