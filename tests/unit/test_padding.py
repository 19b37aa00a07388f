from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_prefix_tree.layout import Padding, sequence_multiple
from mcore_prefix_tree.recipe import RecipeError, load_recipe


@pytest.mark.parametrize(
    ("layout", "multiple"),
    [
        ({}, 1),
        ({"tensor_model_parallel_size": 4}, 1),
        ({"tensor_model_parallel_size": 4, "sequence_parallel": True}, 4),
        ({"fp8": "hybrid"}, 16),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 32),
        ({"fp8": "hybrid", "fp8_recipe": "blockwise", "tensor_model_parallel_size": 4}, 16),
        ({"fp8": "hybrid", "tensor_model_parallel_size": 4, "sequence_parallel": True}, 64),
        ({"fp8": None, "fp8_recipe": "mxfp8"}, 1),
    ],
)
def test_multiples(layout, multiple):
    assert sequence_multiple(**layout) == multiple


def test_fp8_is_aligned_as_megatron_aligns_it():
    fp8 = pytest.importorskip("megatron.core.fp8_utils")
    recipes = pytest.importorskip("megatron.core.enums").Fp8Recipe
    for recipe in recipes:
        assert sequence_multiple(fp8="hybrid", fp8_recipe=recipe.value) == fp8.get_fp8_align_size(recipe)


@given(st.integers(1, 64), st.integers(0, 5000))
def test_no_more_padding_than_needed(multiple, tokens):
    size = Padding(multiple=multiple).size(tokens)
    assert size % multiple == 0
    assert max(tokens, 1) <= size < max(tokens, 1) + multiple


@given(st.sets(st.integers(1, 50), min_size=1), st.integers(1, 4), st.data())
def test_the_smallest_bucket_that_holds(buckets, multiple, data):
    sizes = tuple(sorted(bucket * multiple for bucket in buckets))
    tokens = data.draw(st.integers(0, sizes[-1]))
    size = Padding(multiple=multiple, buckets=sizes).size(tokens)
    assert size == min(one for one in sizes if one >= tokens)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"multiple": 0}, "must be at least 1"),
        ({"multiple": 4, "buckets": (8, 10)}, "length_buckets: 10 is not a multiple of 4"),
        ({"buckets": (0, 8)}, "length_buckets: 0 is not"),
        ({"buckets": (16, 8)}, "must increase"),
        ({"buckets": (8, 8)}, "must increase"),
    ],
)
def test_what_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Padding(**options)


def test_a_micro_batch_needs_a_bucket():
    with pytest.raises(ValueError, match="the largest, 16, cannot hold a micro-batch of max_tokens=17"):
        Padding(buckets=(8, 16)).check_holds(17)
    Padding(buckets=(8, 16)).check_holds(16)
    Padding().check_holds(10**9)


RECIPE = """
data: {path: unused.jsonl}
model: {num_layers: 2, hidden_size: 8, num_attention_heads: 2, vocab_size: 64, transformer: {fp8: hybrid}}
batch: {global_batch_size: 4, max_tokens: 64}
train_iters: 1
parallel: {tensor_model_parallel_size: 2, sequence_parallel: true}
"""


def test_a_recipe_s_padding(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    assert load_recipe(path).padding == Padding(multiple=32)
    assert load_recipe(path, ["batch.length_buckets=[32,96]"]).padding == Padding(multiple=32, buckets=(32, 96))
    with pytest.raises(RecipeError, match=r"^batch\.length_buckets: 48 is not a multiple of 32"):
        load_recipe(path, ["batch.length_buckets=[48,64]"]).padding  # noqa: B018
    with pytest.raises(RecipeError, match=r"^batch\.length_buckets: the largest, 32, .* max_tokens=64"):
        load_recipe(path, ["batch.length_buckets=[32]"]).padding  # noqa: B018
