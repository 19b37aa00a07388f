"""A model whose output layer scores edges, against the untouched stock model on each sample alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.module import Float16Module
from oracles import worst
from seam_models import VOCAB, branching_samples, tiny_config, twins

from mcore_prefix_tree import Sample, Signals, fold
from mcore_prefix_tree.logprob import chunks, restore
from mcore_prefix_tree.mcore import with_edge_head
from mcore_prefix_tree.mcore.forward_step import objective_output, tree_forward, tree_sft_loss, with_rows
from mcore_prefix_tree.mcore.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.output_layer import HeadRequest, request_arguments
from mcore_prefix_tree.mcore.outputs import (
    tree_edge_loss,
    tree_logprobs,
    tree_logprobs_and_entropy,
    tree_weighted_sum,
)
from mcore_prefix_tree.mcore.train.objective import forward_step_of, output_of, watches_entropy
from mcore_prefix_tree.objectives import make_objective
from mcore_prefix_tree.sample import Tempered
from mcore_prefix_tree.signals import Teacher
from mcore_prefix_tree.testing.emulation import cpu_emulation
from mcore_prefix_tree.testing.launcher import single_process

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")


@pytest.fixture(scope="module", autouse=True)
def megatron_on_the_cpu():
    with cpu_emulation(force=True), single_process():
        yield


SAMPLES = branching_samples()
WARM = [
    Sample(tokens=s.tokens, loss_mask=s.loss_mask, merge_key=Tempered(temperature=0.6 + 0.2 * (i % 3), key=s.merge_key))
    for i, s in enumerate(SAMPLES)
]
SCORED = [s for s in SAMPLES if s.loss_mask[1:].any()]
SCORED = SCORED[: len(SCORED) // 2 * 2]
SFT_OUTPUTS = ["logits", "logprobs", "logprobs_and_entropy", "weighted_sum"]


def batch_of(output: str, samples: list[Sample] = SAMPLES, *, only_supervised: bool = False) -> MicroBatch:
    layout = fold(samples, padded_size=fold(samples).physical_tokens + 3)
    needed = layout.loss_weight != 0 if only_supervised else None
    return MicroBatch.from_layout(layout, output=output, needed=needed)


def alone(model: torch.nn.Module, samples: list[Sample], *, entropy_weight: float = 0.0) -> dict[str, Any]:
    """Each sample by itself through a stock model: rows, loss, and gradients by name."""
    logprobs, entropies, loss = [], [], torch.zeros((), dtype=torch.float64)
    for sample in samples:
        ids = torch.tensor(sample.tokens.tolist()).unsqueeze(0)
        logits = model(ids, torch.arange(len(sample)).unsqueeze(0), None)[0]
        scores = torch.log_softmax(logits / sample.temperature, dim=-1)
        logprob = scores[:-1].gather(1, ids[0, 1:, None])[:, 0]
        entropy = -(scores.exp() * scores).sum(dim=1)[:-1]
        mask = torch.tensor(sample.loss_mask[1:].tolist())
        loss = loss - (logprob * mask).sum() + entropy_weight * (entropy * mask).sum()
        logprobs.append(logprob.detach())
        entropies.append(entropy.detach())
    loss.backward()
    return {"logprob": logprobs, "entropy": entropies, "loss": loss.detach(), "grads": gradients(model)}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    return grads


def assert_same_gradients(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], limit: float) -> None:
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        assert worst(actual[name], wanted) < limit, name


@pytest.mark.parametrize("samples", [SAMPLES, WARM], ids=["plain", "tempered"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("only_supervised", [False, True])
@pytest.mark.parametrize("output", SFT_OUTPUTS)
def test_supervised_training(output: str, only_supervised: bool, tied: bool, samples: list[Sample]) -> None:
    stock, tree = twins(tiny_config(), share_embeddings_and_output_weights=tied)
    expected = alone(stock, samples)
    batch = batch_of(output, samples, only_supervised=only_supervised)
    loss = tree_sft_loss(tree_forward(with_edge_head(tree), batch), batch)
    loss.backward()
    assert worst(loss.detach(), expected["loss"]) < 1e-12
    assert_same_gradients(gradients(tree), expected["grads"], 1e-12)


@pytest.mark.parametrize("samples", [SAMPLES, WARM], ids=["plain", "tempered"])
@pytest.mark.parametrize("output", ["logits", "logprobs_and_entropy"])
def test_rows_and_the_gradient_of_entropies(output: str, samples: list[Sample]) -> None:
    stock, tree = twins(tiny_config())
    expected = alone(stock, samples, entropy_weight=0.1)
    batch = batch_of(output, samples)
    logprob, entropy = tree_logprobs_and_entropy(tree_forward(with_edge_head(tree), batch), batch)
    loss = torch.zeros((), dtype=torch.float64)
    rows = zip(restore(logprob, batch.layout), restore(entropy, batch.layout), strict=True)
    for index, (sample, (scores, spread)) in enumerate(zip(samples, rows, strict=True)):
        assert worst(scores[1:], expected["logprob"][index]) < 1e-12
        assert worst(spread[:-1], expected["entropy"][index]) < 1e-12
        mask = torch.tensor(sample.loss_mask[1:].tolist())
        loss = loss - (scores[1:] * mask).sum() + 0.1 * (spread[:-1] * mask).sum()
    loss.backward()
    assert_same_gradients(gradients(tree), expected["grads"], 1e-12)


def test_an_entropy_that_the_loss_does_not_read_has_no_gradient() -> None:
    """It has its value all the same; and one that is read and not given is missed."""
    _, tree = twins(tiny_config())
    with_edge_head(tree)
    found = {}
    for output in ("edge_loss", "edge_loss_and_entropy"):
        batch = batch_of(output)
        scores = tree_forward(tree, batch, edge_loss=lambda logprob, _: logprob.square().sum())
        gradient, _, entropy = tree_edge_loss(scores, batch)
        gradient.backward()
        found[output] = (entropy, gradients(tree))
    batch = batch_of("logprobs_and_entropy")
    wanted = tree_logprobs_and_entropy(tree_forward(tree, batch), batch)[1]
    (nothing, plain), (watched, grads) = found.values()
    assert nothing is None
    assert torch.equal(watched, wanted)
    assert all(torch.equal(grads[name], grad) for name, grad in plain.items())
    objective: Any = make_objective("grpo", {"entropy_coef": 0.1, "advantage": "given", "on_policy": True})
    samples = informed(SAMPLES)
    batch = with_rows(batch_of("logits", samples), objective, objective.targets(samples), range(len(samples)))
    with pytest.raises(ValueError, match=r"entropy_coef=0\.1 needs the entropy, and none is given"):
        objective_output(tree_forward(tree, batch), batch, objective, with_entropy=False)


_ON_POLICY = {"advantage": "given", "on_policy": True, "tis_cap": 1.2, "tis_level": "sequence"}
OBJECTIVES = [
    ("sft", {"normalise": "sample"}, "row"),
    ("grpo", _ON_POLICY | {"on_policy": False, "kl_coef": 0.1, "kl_importance": "token"}, "row"),
    ("grpo", _ON_POLICY | {"on_policy": False, "kl_coef": 0.1, "kl_importance": "sequence"}, "sample"),
    ("dapo", {"advantage": "given", "entropy_coef": 0.2, "dual_clip": 3.0}, "row"),
    ("cispo", {"advantage": "given", "clip_eps_high": 0.1}, "row"),
    ("rloo", {"advantage": "given", "kl_coef": 0.1, "kl_estimator": "k2"}, "row"),
    ("distill", {"divergence": "jsd"}, "row"),
    ("gspo", {"advantage": "given", "clip_eps_low": 0.1, "clip_eps_high": 0.1, "entropy_coef": 0.2}, "sample"),
    ("grpo", _ON_POLICY, "sample"),
    ("kto", {"reference_point": "zero"}, "sample"),
    ("dpo", {}, "pair"),
    ("ipo", {}, "pair"),
    ("simpo", {}, "pair"),
    ("orpo", {}, "pair"),
]


def informed(samples: list[Sample]) -> list[Sample]:
    """With what these objectives read."""
    rng = np.random.default_rng(0)

    def near_uniform(size: Any) -> Any:
        return -np.log(VOCAB) + 0.3 * rng.standard_normal(size)

    return [
        replace(
            sample,
            signals=Signals(
                advantage=rng.standard_normal(len(sample)),
                old_logprobs=near_uniform(len(sample)),
                ref_logprobs=near_uniform(len(sample)),
                rollout_logprobs=near_uniform(len(sample)),
                pair=index // 2,
                chosen=index % 2 == 0,
                label=index % 3 == 0,
                teacher=Teacher(
                    token_ids=rng.permuted(np.tile(np.arange(VOCAB, dtype=np.int32), (len(sample), 1)), axis=1)[:, :4],
                    logprobs=near_uniform((len(sample), 4)).astype(np.float32),
                ),
            ),
        )
        for index, sample in enumerate(samples)
    ]


@pytest.mark.parametrize("chunk", [2, 5, 1000])
@pytest.mark.parametrize(("name", "options", "terms"), OBJECTIVES)
def test_objectives_form_their_gradients_in_forward(
    name: str, options: dict[str, Any], terms: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss, what is reported, and every gradient of the path that has all logits first."""
    monkeypatch.setattr(chunks, "_CPU", (1, chunk))
    objective: Any = make_objective(name, options)
    assert objective.terms == terms
    output = output_of(objective, fused_head=True)
    assert output == ("edge_loss_and_entropy" if watches_entropy(objective) else "edge_loss")
    samples = informed(SCORED if terms == "pair" or name == "kto" else SAMPLES)
    targets = objective.targets(samples)
    found = []
    for asked in (output, "logits"):
        _, tree = twins(tiny_config())
        batch = with_rows(batch_of(asked, samples), objective, targets, range(len(samples)))
        step = forward_step_of(objective)
        scores, loss_of = step(iter([batch]), with_edge_head(tree))
        loss, count, reported = loss_of(scores)
        loss.backward()
        found.append((loss.detach(), count, reported["metrics"], gradients(tree)))
    (loss, count, metrics, grads), (wanted_loss, wanted_count, wanted_metrics, wanted_grads) = found
    assert worst(loss, wanted_loss) < 1e-12
    assert count == wanted_count
    assert metrics.keys() == wanted_metrics.keys()
    assert all(worst(metrics[key], wanted) < 1e-12 for key, wanted in wanted_metrics.items())
    assert_same_gradients(grads, wanted_grads, 1e-12)


def test_a_loss_of_edges_that_is_not_given_is_refused() -> None:
    _, tree = twins(tiny_config())
    with pytest.raises(ValueError, match="asks for edge_loss; give tree_forward the edge_loss"):
        tree_forward(with_edge_head(tree), batch_of("edge_loss"))


def test_the_log_probabilities_have_the_same_bits_whatever_else_is_asked_for() -> None:
    _, tree = twins(tiny_config(torch.float32))
    with_edge_head(tree)
    found = []
    readers = {
        "weighted_sum": tree_weighted_sum,
        "edge_loss": tree_edge_loss,
        "edge_loss_and_entropy": tree_edge_loss,
    }
    for output in ("logprobs", "logprobs_and_entropy", *readers):
        batch = batch_of(output, WARM)
        scores = tree_forward(tree, batch, edge_loss=lambda logprob, _: logprob.sum())
        found.append(readers[output](scores, batch)[1] if output in readers else tree_logprobs(scores, batch))
    for other in found[1:]:
        assert torch.equal(found[0], other)


def test_bf16_is_no_further_off_than_the_path_with_logits() -> None:
    """Through Float16Module; against the same bf16 weights in float64."""
    _, half = twins(tiny_config(torch.bfloat16, bf16=True))
    _, double = twins(tiny_config())
    double.load_state_dict({k: v.double() if v is not None else v for k, v in half.state_dict().items()})
    wrapped = Float16Module(half.config, with_edge_head(half))
    batch = batch_of("logits")
    tree_sft_loss(tree_forward(double, batch), batch).backward()
    exact = gradients(double)
    errors = {}
    for output in SFT_OUTPUTS:
        batch = batch_of(output)
        output_tensor = tree_forward(wrapped, batch)
        assert output_tensor.dtype == torch.float32
        tree_sft_loss(output_tensor, batch).backward()
        errors[output] = {name: worst(grad, exact[name]) for name, grad in gradients(half).items()}
    for output in SFT_OUTPUTS[1:]:
        for name, error in errors[output].items():
            assert error < 1.5 * errors["logits"][name], (output, name)


def test_the_state_dict_is_the_stock_models_and_parameters_stay_the_same_objects() -> None:
    stock, tree = twins(tiny_config())
    before = dict(tree.named_parameters())
    assert with_edge_head(tree) is tree
    assert with_edge_head(tree) is tree
    assert list(tree.state_dict()) == list(stock.state_dict())
    assert all(parameter is before[name] for name, parameter in tree.named_parameters())
    assert isinstance(tree.output_layer, ColumnParallelLinear)
    stock.load_state_dict(tree.state_dict(), strict=True)
    first_stage = torch.nn.Linear(1, 1)
    assert with_edge_head(first_stage) is first_stage


def test_without_a_request_the_layer_is_the_stock_one_to_the_bit() -> None:
    stock, tree = twins(tiny_config(torch.float32))
    with_edge_head(tree)
    ids, positions = torch.arange(12).unsqueeze(0), torch.arange(12).unsqueeze(0)
    assert torch.equal(stock(ids, positions, None), tree(ids, positions, None))
    labels = ids.roll(-1)
    assert torch.equal(stock(ids, positions, None, labels=labels), tree(ids, positions, None, labels=labels))
    gathered = [model(ids, positions, None, runtime_gather_output=True) for model in (stock, tree)]
    assert torch.equal(*gathered)


def test_hooks_of_the_output_layer_run() -> None:
    """DDP's, which wait for the weight that other ranks updated, among them."""
    _, tree = twins(tiny_config())
    with_edge_head(tree)
    calls = []
    tree.output_layer.register_forward_pre_hook(lambda *_: calls.append(1))
    batch = batch_of("logprobs")
    tree_forward(tree, batch)
    assert len(calls) == 1


@pytest.mark.parametrize("output", SFT_OUTPUTS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_gradient_accumulation_fusion(output: str, tied: bool) -> None:
    """Its protocol, with DDP's own hooks and buffers: two micro-batches add up in main_grad, once each."""
    stock, tree = twins(tiny_config(), share_embeddings_and_output_weights=tied)
    expected = alone(stock, SAMPLES)["grads"]
    with_edge_head(tree)
    wrapped = DistributedDataParallel(tree.config, DistributedDataParallelConfig(), tree)
    wrapped.zero_grad_buffer()
    tree.output_layer.gradient_accumulation_fusion = output != "logits"  # whose kernel is CUDA's
    for half in (SAMPLES[::2], SAMPLES[1::2]):
        batch = batch_of(output, half)
        tree_sft_loss(tree_forward(wrapped, batch), batch).backward()
    actual = {name: parameter.main_grad for name, parameter in tree.named_parameters()}
    assert_same_gradients(actual, expected, 1e-12)


def test_overlapped_gradient_reduction() -> None:
    """Every parameter's hook runs in the last micro-batch, also where a rank has nothing to score."""
    _, tree = twins(tiny_config())
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True)
    wrapped = DistributedDataParallel(tree.config, ddp_config, with_edge_head(tree))
    for output in SFT_OUTPUTS[1:]:
        for samples in (SAMPLES, []):
            wrapped.zero_grad_buffer()
            batch = batch_of(output, samples, only_supervised=True)
            tree_sft_loss(tree_forward(wrapped, batch), batch).backward()
            wrapped.finish_grad_sync()
            assert tree.output_layer.weight.main_grad.any() == bool(samples)


def test_a_frozen_output_layer() -> None:
    stock, tree = twins(tiny_config())
    expected = alone(stock, SAMPLES)["grads"]
    tree.output_layer.weight.requires_grad_(False)
    for output in SFT_OUTPUTS[1:]:
        batch = batch_of(output)
        tree_sft_loss(tree_forward(with_edge_head(tree), batch), batch).backward()
        grads = gradients(tree)
        assert grads.pop("output_layer.weight") is None
        assert_same_gradients(grads, {name: expected[name] for name in grads}, 1e-12)


def test_a_model_without_the_head_says_so() -> None:
    _, tree = twins(tiny_config())
    with pytest.raises(ValueError, match="asks for logprobs, but the model's output layer only has logits; pass the"):
        tree_forward(tree, batch_of("logprobs"))


def test_a_request_never_passes_for_a_flag() -> None:
    _, tree = twins(tiny_config())
    batch = batch_of("logprobs")
    request = HeadRequest(output="logprobs", edges=batch.edges, temperature=None, token_weight=batch.loss_weight)
    with pytest.raises(TypeError, match="HeadRequest reached a layer"):
        tree.output_layer(torch.zeros(3, 1, 32, dtype=torch.float64), runtime_gather_output=request)


@pytest.mark.parametrize(
    ("made", "read", "says"),
    [
        ("weighted_sum", tree_logprobs, "which tree_weighted_sum reads"),
        ("logprobs", tree_logprobs_and_entropy, "asks for logprobs; make it with output='logprobs_and_entropy'"),
        ("logprobs", tree_weighted_sum, "asks for logprobs; make it with output='weighted_sum'"),
        ("logits", tree_weighted_sum, "asks for logits; make it with output='weighted_sum'"),
        ("edge_loss_and_entropy", tree_logprobs, "which tree_edge_loss reads"),
        ("logprobs", tree_edge_loss, "asks for logprobs; make it with output='edge_loss'"),
    ],
)
def test_reading_what_was_not_asked_for(made: str, read: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read(torch.zeros(1, 5, 1), batch_of(made))


def test_output_layers_of_their_own_are_refused() -> None:
    class Capped(ColumnParallelLinear):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            logits, bias = super().forward(*args, **kwargs)
            return 30 * torch.tanh(logits / 30), bias

    _, tree = twins(tiny_config())
    tree.output_layer.__class__ = Capped
    with pytest.raises(NotImplementedError, match="output_layer of class Capped, which computes its logits in its own"):
        with_edge_head(tree)


def test_deferred_weight_gradients_are_refused() -> None:
    _, tree = twins(tiny_config())
    tree.output_layer.config = replace(tree.config)
    tree.output_layer.config.defer_embedding_wgrad_compute = True
    with pytest.raises(NotImplementedError, match=r"defer_embedding_wgrad_compute=True, .* fused_head: false"):
        with_edge_head(tree)


def test_a_model_with_scaled_logits() -> None:
    """muP, where megatron-core has it; before 0.18 the stock model has no such field and scales nothing."""
    config = tiny_config()
    if not hasattr(config, "use_mup"):
        pytest.skip("this megatron-core has no muP")
    stock, tree = twins(tiny_config(use_mup=True, mup_base_hidden_size=8))
    expected = alone(stock, SAMPLES)
    for output in SFT_OUTPUTS:
        batch = batch_of(output)
        loss = tree_sft_loss(tree_forward(with_edge_head(tree), batch), batch)
        loss.backward()
        assert worst(loss.detach(), expected["loss"]) < 1e-12
        assert_same_gradients(gradients(tree), expected["grads"], 1e-12)


def test_the_request_travels_in_one_keyword_or_two() -> None:
    batch = batch_of("logprobs")
    request = HeadRequest(output="logprobs", edges=batch.edges, temperature=None, token_weight=batch.loss_weight)
    assert request in request_arguments(request).values()
    assert len(batch.edges.token) < VOCAB * len(SAMPLES)
