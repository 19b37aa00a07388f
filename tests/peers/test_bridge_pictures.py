"""Megatron-Bridge's models of pictures and text fold inside: each row as by itself, with gradients of tower and layers.

Needs Megatron-Bridge, and with it Python 3.12: see requirements/bridge.txt.
"""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("megatron.bridge") is None:  # importing it needs a stand-in
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)
pytest.importorskip("transformers")
from harness.worlds import Layout, world
from qwen_vl_jobs import FAMILIES, TEXT, VisionJob, errors, said

TP2_SP, PP2 = Layout(tp=2, sequence_parallel=True), Layout(pp=2)


def check(job: VisionJob, layout: Layout, size: int) -> None:
    for different, fold_ratio in world(size).run(errors, job, layout, layout=layout):
        worst = max(different, key=lambda name: different[name])
        # Upstream's routers, and the decay of its Gated DeltaNet, are in fp32.
        assert different[worst] < (1e-12 if job.family == "Qwen3VL" else 1e-6), worst
        assert fold_ratio > 1.3


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_pictures_equal_each_row_by_itself(family: str) -> None:
    check(VisionJob(family=family), Layout(), 1)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(VisionJob(family="Qwen3VL", rows=tuple(map(tuple, TEXT))), id="text"),
        pytest.param(VisionJob(family="Qwen3VL", by_rows=True), id="rows that the model packs"),
        pytest.param(VisionJob(family="Qwen3VL", recompute=True), id="recompute"),
        pytest.param(VisionJob(family="Qwen3VLMoE", routed=True), id="routes"),
    ],
)
def test_other_calls(job: VisionJob) -> None:
    check(job, Layout(), 1)


@pytest.mark.ci
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", [pytest.param(TP2_SP, id="tp2-sp"), pytest.param(PP2, id="pp2")])
def test_rows_in_layouts(family: str, layout: Layout) -> None:
    check(VisionJob(family=family), layout, 2)


def test_calls_and_settings_that_cannot_be_folded_are_refused_by_name() -> None:
    (found,) = world(1).run(said, layout=Layout())
    expected = (
        "does not support pixel_values_videos",
        "image_grid_thw has no pixel_values: every pipeline stage compares pictures; pass both to all",
        "the rows have 54 tokens of pictures (id 7), but image_grid_thw describes 0: pass pixel_values",
        "image_grid_thw describes 192 patches, but pixel_values have 216",
        "takes packed rows",
        "max_tokens of folding inside the model does not support a Qwen3VLGPTModel: its first layers add",
        "check_first does not support position_embedding_type='mrope'",
        "this model folds inside already",
    )
    assert len(found) == len(expected), found
    for sentence, words in zip(found, expected, strict=True):
        assert words in sentence
