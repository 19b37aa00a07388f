from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_prefix_tree.layout import Padding
from mcore_prefix_tree.settings import RecipeError, load_recipe


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
        ({"multiple": 4, "buckets": (8, 10)}, "10 is not a multiple of 4"),
        ({"buckets": (0, 8)}, "a size of 0 is too small"),
        ({"buckets": (16, 8)}, "must increase"),
        ({"buckets": (8, 8)}, "must increase"),
    ],
)
def test_invalid_padding_is_rejected(options, words):
    with pytest.raises(ValueError, match=words):
        Padding(**options)


def test_a_micro_batch_needs_a_bucket():
    with pytest.raises(ValueError, match="the largest, 16, cannot hold a micro-batch of 17 tokens"):
        Padding(buckets=(8, 16)).check_holds(17)
    Padding(buckets=(8, 16)).check_holds(16)
    Padding().check_holds(10**9)


RECIPE = """
data: {path: unused.jsonl}
model: {num_layers: 2, hidden_size: 8, num_attention_heads: 2, vocab_size: 64}
batch: {global_batch_size: 4, max_tokens: 64}
train_iters: 1
parallel: {tensor_model_parallel_size: 2, sequence_parallel: true}
"""


def test_padding_of_a_recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    assert load_recipe(path).padding == Padding(multiple=2)
    assert load_recipe(path, ["parallel.sequence_parallel=false"]).padding == Padding()
    assert load_recipe(path, ["batch.length_buckets=[32,96]"]).padding == Padding(multiple=2, buckets=(32, 96))
    fp8 = "model.transformer.fp8=hybrid"
    for recipe, rows in (("tensorwise", 16), ("blockwise", 16), ("mxfp8", 32)):
        changes = [fp8, f"model.transformer.fp8_recipe={recipe}"]
        assert load_recipe(path, changes).padding == Padding(multiple=2 * rows)
        assert load_recipe(path, [*changes, "parallel.sequence_parallel=false"]).padding == Padding(multiple=rows)
    with pytest.raises(RecipeError, match=r"^batch\.length_buckets: 48 is not a multiple of 32"):
        load_recipe(path, [fp8, "batch.length_buckets=[48,64]"]).padding  # noqa: B018
    with pytest.raises(RecipeError, match=r"^batch\.length_buckets: 49 is not a multiple of 2"):
        load_recipe(path, ["batch.length_buckets=[49,64]"]).padding  # noqa: B018
    with pytest.raises(RecipeError, match=r"^batch\.length_buckets: the largest, 32, .* 64 tokens"):
        load_recipe(path, ["batch.length_buckets=[32]"]).padding  # noqa: B018
