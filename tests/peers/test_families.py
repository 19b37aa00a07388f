"""Families of Hugging Face models, each against transformers: log-probabilities, gradients and exported bits.

Needs Megatron-Bridge, and with it Python 3.12: see requirements/bridge.txt. TransformerEngine's layers run in another
process, with a stand-in for them; ``benchmarks/families.py`` is that process.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.commands import run_process

if importlib.util.find_spec("megatron.bridge") is None:  # importing it needs a stand-in
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)
pytest.importorskip("transformers")
from hf_folders import FAMILIES, saved_model
from hf_jobs import (
    EP2,
    LOCAL,
    OWN_LAYERS,
    PP2,
    QUICK,
    REFERENCE,
    TP2,
    TP2_SP,
    check_checkpoints,
    check_layout,
    errors_of,
    run_ranks,
    run_with_engine,
)

from mcore_prefix_tree.mcore.models.bridge import make_provider
from mcore_prefix_tree.settings import LoraConfig, ModelConfig, ParallelConfig, RecipeError
from mcore_prefix_tree.settings.hf_folder import HuggingFaceFolder

pytestmark = pytest.mark.usefixtures("megatron_bridge")
ROOT = Path(__file__).parents[2]
# Layouts that have tests of their own, or that local layers of latent attention do not have.
ELSEWHERE = [("Llama 3", "tp2-sp"), ("Qwen3", "pp2"), *((name, "tp2-sp") for name in ("DeepSeek-V3", "GLM-4.7-Flash"))]
ELSEWHERE += [(name, layout) for name in OWN_LAYERS for layout in ("tp2-sp", "pp2")]
LAYOUTS = {"tp2": TP2, "tp2-sp": TP2_SP, "pp2": PP2, "ep2": EP2, "tp2-sp-ep2": (*TP2_SP, *EP2)}


def cases(names: tuple[str, ...], quick: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("family", cases(LOCAL, QUICK))
def test_local_layers(family: str, tmp_path: Path) -> None:
    check(errors_of(family, tmp_path, *options_of(family)))


def options_of(family: str) -> tuple[str, ...]:
    """On a CPU windows need the back-end that has them."""
    return (REFERENCE,) if family in OWN_LAYERS else ()


@pytest.mark.parametrize("family", OWN_LAYERS)
@pytest.mark.parametrize(
    "option",
    [
        pytest.param("batch.over_budget=carry", id="carry"),
        pytest.param("model.transformer.recompute_granularity=selective", id="recompute"),
    ],
)
def test_layers_that_the_bridge_names_itself(family: str, option: str, tmp_path: Path) -> None:
    """Layers that share keys carry them one by one."""
    check(errors_of(family, tmp_path, REFERENCE, "batch.max_tokens=12", option))


def check(errors: dict[str, float]) -> None:
    assert errors["logprob"] <= 1e-5
    assert errors["gradient"] <= 1e-4
    assert errors["worst_gradient"] <= 1e-4


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("Llama 3", "tp2-sp"),
        pytest.param("Qwen3", "pp2", marks=pytest.mark.ci),
        pytest.param("Qwen3-MoE", "ep2", marks=pytest.mark.ci),
        pytest.param("Qwen3-MoE", "tp2-sp-ep2", marks=pytest.mark.ci),
        pytest.param("DeepSeek-V3", "ep2", marks=pytest.mark.slow),
        pytest.param("Gemma 4 E2B", "tp2", marks=pytest.mark.ci),
        pytest.param("Gemma 4 31B", "tp2", marks=pytest.mark.slow),
        *(
            pytest.param(family, layout, marks=pytest.mark.slow)
            for family in LOCAL
            for layout in ("tp2-sp", "pp2")
            if (family, layout) not in ELSEWHERE
        ),
    ],
)
def test_layouts(family: str, layout: str, tmp_path: Path) -> None:
    """``verify`` compares folded with unfolded before the step."""
    assert check_layout(family, tmp_path, *LAYOUTS[layout], *options_of(family)) <= 1e-5


@pytest.mark.parametrize(
    ("family", "parallel", "more", "says"),
    [
        ("Nemotron-H", {"virtual_pipeline_model_parallel_size": 3}, {}, "virtual pipeline stages"),
        (
            "Granite 4",
            {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 1},
            {},
            "does not divide the mamba",
        ),
        ("Nemotron-H", {}, {"lora": LoraConfig()}, "get no adapters here"),
        ("Gemma 4", {}, {}, "of TransformerEngine; set model.transformer_impl=transformer_engine"),
        ("Gemma 4 E2B", {"pipeline_model_parallel_size": 2}, {}, "in one stage; set parallel.pipeline_model_parallel"),
        (
            "Gemma 4 E2B",
            {},
            {"transformer_impl": "transformer_engine"},
            "Core's own layers; set model.transformer_impl",
        ),
        ("Gemma 4 31B", {}, {"lora": LoraConfig()}, "get no adapters here"),
        ("GLM-5", {"virtual_pipeline_model_parallel_size": 2}, {}, "the keys that a layer of another chose"),
        ("GLM-5", {}, {}, "of TransformerEngine; set model.transformer_impl=transformer_engine"),
    ],
)
def test_folders_refuse(family: str, parallel: dict[str, int], more: dict[str, Any], says: str, tmp_path: Path) -> None:
    saved_model(family, tmp_path / "source", {})
    sizes = HuggingFaceFolder.read(tmp_path / "source").sizes
    model = ModelConfig(hf=str(tmp_path / "source"), **{"transformer_impl": "local"} | sizes | more)
    parallel = {"pipeline_model_parallel_size": 2, **parallel} if parallel else {}
    with pytest.raises(RecipeError, match=says):
        make_provider(model, ParallelConfig(**parallel), on_gpu=False)


@pytest.fixture(scope="module")
def with_engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results by family."""
    output = tmp_path_factory.mktemp("families") / "families.json"
    script = [sys.executable, str(ROOT / "benchmarks" / "families.py"), "--layers", "transformer_engine"]
    run_process([*script, "--no-layouts", "--output", str(output)], timeout=600, code=0)
    return {one["family"]: one for one in json.loads(output.read_text())["results"]}


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in OWN_LAYERS])
def test_layers_of_transformer_engine(family: str, with_engine: dict[str, Any]) -> None:
    check(with_engine[family])


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [(), ("granularity=selective", "modules=[moe]")])
def test_separate_inputs_of_experts_are_balanced_by_samples(recompute: tuple[str, ...], tmp_path: Path) -> None:
    """Gemma 4's experts need a stand-in and another process."""
    options = [
        "model.transformer_impl=transformer_engine",
        *(f"model.transformer.recompute_{one}" for one in recompute),
    ]
    call = f"check_balancing('Gemma 4', pathlib.Path(sys.argv[1]), REFERENCE, *{options})"
    run_with_engine(f"from hf_jobs import REFERENCE, check_balancing; {call}", tmp_path)


@pytest.mark.slow
def test_separate_inputs_of_experts_are_resumed_and_split(tmp_path: Path) -> None:
    """Gemma 4's, whose ranks need the stand-in too; it has no unfolded attention for ``verify``."""
    options = ["model.transformer_impl=transformer_engine", "verify.enabled=false"]
    call = f"check_checkpoints('Gemma 4', pathlib.Path(sys.argv[1]), REFERENCE, *{options})"
    ranks = "from harness import forks; forks.PRELOADED.insert(0, 'te_stand_in')"
    run_with_engine(f"{ranks}; from hf_jobs import REFERENCE, check_checkpoints; {call}", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", OWN_LAYERS)
def test_layers_that_the_bridge_names_itself_are_resumed_and_split(family: str, tmp_path: Path) -> None:
    check_checkpoints(family, tmp_path, REFERENCE, split=TP2)


@pytest.mark.slow
def test_flops_of_a_folder_count_its_indexers(tmp_path: Path) -> None:
    options = "'model.transformer_impl=transformer_engine', REFERENCE"
    call = f"check_sparse_work(pathlib.Path(sys.argv[1]), {options})"
    run_with_engine(f"from hf_jobs import REFERENCE, check_sparse_work; {call}", tmp_path)


@pytest.mark.ci
def test_the_table_is_measured_by_a_script(tmp_path: Path) -> None:
    output = tmp_path / "families.json"
    chosen = ("--layers", "local", "--family", "Qwen3-MoE", "--no-layouts")
    run_ranks(1, "--output", output, *chosen, program=(str(ROOT / "benchmarks" / "families.py"),), code=0)
    (result,) = json.loads(output.read_text())["results"]
    assert result["family"] == "Qwen3-MoE"
    check({name: result[name] for name in ("logprob", "gradient", "worst_gradient")})
