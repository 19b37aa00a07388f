"""A plain Hugging Face model with attn_implementation="prefix_tree" against unfolded samples, in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness.each_tensor import EachTensor
from harness.kept_sets import with_sets
from harness.oracles import forest_samples, random_forest, worst

from mcore_prefix_tree import Sample, TreeMetadata, fold
from mcore_prefix_tree.sample import Tempered

transformers = pytest.importorskip("transformers")
from harness.transformers_models import MODELS, SMALL, InDouble, gradients, tiny, unfolded_logprobs  # noqa: E402

from mcore_prefix_tree.integrations.transformers import model_inputs, sample_logprobs  # noqa: E402


def forest(seed):
    rng = np.random.default_rng(seed)
    samples = forest_samples(*random_forest(seed, nodes=9))
    ids = rng.permutation(97)
    samples = [Sample(tokens=ids[sample.tokens]) for sample in samples]
    return [samples[at] for at in rng.permutation(len(samples))]


def loss_of(rows, seed):
    rng = torch.Generator().manual_seed(seed)
    return sum((row * torch.randn(len(row), generator=rng, dtype=torch.float64)).sum() for row in rows)


def compare(name, backend, seed, *, masked=False, **settings):
    model, samples = tiny(name, **settings), forest(seed)
    if masked:
        samples = with_sets(samples, 97)
    with InDouble():
        folded = sample_logprobs(model, fold(samples, pad_to_multiple_of=8), backend=backend)
        actual = gradients(model, loss_of(folded, seed))
        model.set_attn_implementation("eager")
        plain = [unfolded_logprobs(model, sample) for sample in samples]
        expected = gradients(model, loss_of(plain, seed))
    assert max(worst(one, other) for one, other in zip(folded, plain, strict=True)) < 1e-12
    assert len(actual) == len(expected) == len(list(model.parameters()))
    assert max(worst(actual[weight], expected[weight]) for weight in actual) < 1e-12


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_rows_and_gradients_equal_unfolded_samples(name, seed):
    compare(name, "auto", seed)


def test_sampling_masks_equal_unfolded_samples():
    compare("llama", "auto", 1, masked=True)


def test_routes_are_refused():
    layout = fold([Sample(tokens=[1, 2], routed_experts=[[[0]]])])
    with pytest.raises(ValueError, match="'routed_experts', which models of Transformers do not take"):
        sample_logprobs(tiny("llama"), layout)


@pytest.mark.parametrize("name", MODELS)
def test_windows_and_sinks_are_exact_with_the_reference(name):
    compare(name, "reference", 5)


def test_samples_that_share_nothing_are_exact():
    model = tiny("llama")
    samples = [
        Sample(tokens=[1, 2, 3]),
        Sample(tokens=[4]),
        Sample(tokens=[5, 2, 3], merge_key=Tempered(temperature=2)),
    ]
    with InDouble():
        folded = sample_logprobs(model, fold(samples))
        model.set_attn_implementation("sdpa")
        assert all(worst(row, unfolded_logprobs(model, one)) < 1e-12 for row, one in zip(folded, samples, strict=True))


def in_region(dtype, run, model):
    """Values of a run and all gradients of a weighted sum, in a region of autocast unless ``dtype`` is None."""
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        values = run(model)
    grads = gradients(model, loss_of(values, 0))
    return torch.cat([*values, *(grad.flatten() for _, grad in sorted(grads.items()))]).detach().double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_autocast_is_as_close_to_single_precision_as_unfolded(name, dtype):
    samples, folds = forest(5), tiny(name).float()
    stock = tiny(name).float()
    stock.set_attn_implementation("eager" if name in ("gemma3", "gpt_oss") else "sdpa")
    backend = "auto" if name in ("llama", "qwen3") else "reference"

    def unfolded(model):
        return [unfolded_logprobs(model, sample) for sample in samples]

    def folded(model):
        return sample_logprobs(model, fold(samples), backend=backend)

    expected = in_region(None, unfolded, stock)
    assert (in_region(None, folded, folds) - expected).norm() < 1e-5 * expected.norm()
    error = (in_region(dtype, unfolded, stock) - expected).norm()
    assert 0 < (in_region(dtype, folded, folds) - expected).norm() <= 3 * error
    with torch.autocast("cpu", dtype=dtype), torch.autocast("cpu", enabled=False):
        inside = folded(folds)
    assert all(map(torch.equal, inside, folded(folds)))


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")
def test_recomputed_layers_are_given_the_tree_of_their_batch():
    model = tiny("llama").train()
    layouts = [fold(forest(seed)) for seed in (3, 4)]

    def both():  # two batches go forward before either goes back
        rows = [row for layout in layouts for row in sample_logprobs(model, layout)]
        return gradients(model, loss_of(rows, 0))

    kept = both()
    model.gradient_checkpointing_enable()
    recomputed = both()
    assert max(worst(recomputed[weight], kept[weight]) for weight in kept) < 1e-12


def test_no_tensor_is_as_large_as_a_mask():
    model = tiny("qwen3")
    layout = fold([Sample(tokens=[*range(90), *[last] * 400]) for last in (1, 2)])
    shapes = set()
    with EachTensor(lambda one: shapes.add(tuple(one.shape))):
        sample_logprobs(model, layout, backend="path")
    size = layout.padded_size
    assert (1, size, 32) in shapes
    assert not any(shape[-2:] == (size, size) for shape in shapes)


def call(model, **changed):
    return model(**model_inputs(model, fold([Sample(tokens=[1, 2, 3]), Sample(tokens=[1, 2, 4])])) | changed)


REFUSED_CALLS = {
    "did not receive the argument prefix_tree": {"prefix_tree": None},
    "attention_mask": {"attention_mask": torch.ones(1, 4)},
    "batch of 2": {"input_ids": torch.ones(2, 4, dtype=torch.long)},
    "not causal": {"is_causal": False},
    "pass prefix_tree.with_plans_on": {"prefix_tree": TreeMetadata.from_nodes([0, 4], [-1], device="meta")},
    "backend 'fastest' does not exist": {"prefix_tree_backend": "fastest"},
    "must all have the 4 tokens": {"input_ids": torch.ones(1, 5, dtype=torch.long), "position_ids": None},
}


@pytest.mark.parametrize("message", REFUSED_CALLS)
def test_calls_that_cannot_be_folded_are_refused(message):
    with pytest.raises(ValueError, match=message):
        call(tiny("llama"), **REFUSED_CALLS[message])


def test_plain_calls_and_generation_need_another_attention():
    model = tiny("llama")
    with pytest.raises(ValueError, match=r"set_attn_implementation\('sdpa'\)"):
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=1)
    model.set_attn_implementation("sdpa")
    assert model.generate(torch.tensor([[1, 2]]), max_new_tokens=1).shape == (1, 3)
    with pytest.raises(ValueError, match="'sdpa'"):
        call(model)


def test_dropout_is_refused_in_training():
    model = tiny("llama", attention_dropout=0.1)
    call(model.eval())
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1"):
        call(model.train())


def test_windows_without_a_fast_backend_are_rejected():
    with pytest.raises(ValueError, match=r"window=5.*name 'reference'"):
        call(tiny("gemma3"))


ROPE = "rope_parameters" if hasattr(transformers.LlamaConfig(), "rope_parameters") else "rope_scaling"
MIXER = torch.nn.Conv1d(1, 1, 1)
REFUSED_MODELS = {
    "flash attention": lambda model: setattr(model, "_supports_flash_attn", False),
    "layers of type chunked_attention": lambda model: setattr(model.config, "layer_types", ["chunked_attention"]),
    "mixes tokens by Conv1d": lambda model: model.add_module("conv", MIXER),
    "rope_type='dynamic'": lambda model: setattr(model.config, ROPE, {"rope_type": "dynamic"}),
}


@pytest.mark.parametrize("message", REFUSED_MODELS)
def test_models_that_cannot_be_folded_are_refused(message):
    model = tiny("llama")
    REFUSED_MODELS[message](model)
    with pytest.raises(ValueError, match=message):
        call(model)


def test_capped_scores_are_refused():
    config = transformers.Gemma2Config(**SMALL, layer_types=["full_attention"] * 2)
    with pytest.raises(ValueError, match="attn_logit_softcapping=50"):
        call(transformers.Gemma2ForCausalLM(config))
