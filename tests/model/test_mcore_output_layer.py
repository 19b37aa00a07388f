"""A model whose output layer scores edges, against the untouched stock model on unfolded samples."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
from harness.kept_sets import with_sets
from harness.marks import quick
from harness.oracles import worst
from harness.seam_models import VOCAB, tiny_config, twins
from harness.seam_runs import (
    SAMPLES,
    WARM,
    assert_equal,
    assert_same_gradients,
    batch_of,
    folded,
    supervised,
    take_gradients,
    unfolded,
)
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.module import Float16Module

from mcore_prefix_tree import Sample, Signals
from mcore_prefix_tree.logprob import head_chunks
from mcore_prefix_tree.mcore import with_edge_head
from mcore_prefix_tree.mcore.engine.forward_step import forward_step, tree_forward, with_rows
from mcore_prefix_tree.mcore.outputs import (
    READOUTS,
    ChunkLosses,
    DivergenceLoss,
    EdgeLoss,
    Hidden,
    Logprobs,
    Readout,
    TopLogprobs,
    ValueLoss,
    WeightedSum,
    make_readout,
)
from mcore_prefix_tree.mcore.seam.output_layer import HeadRequest
from mcore_prefix_tree.mcore.teachers.load_teachers import HOOKS
from mcore_prefix_tree.objectives import LossOutput, LossRows, make_objective
from mcore_prefix_tree.objectives.objective import Output
from mcore_prefix_tree.signals import Teacher

pytestmark = [pytest.mark.usefixtures("megatron_on_the_cpu"), pytest.mark.filterwarnings("ignore:::megatron")]


MASKED = with_sets(WARM, VOCAB)
SCORED = [s for s in SAMPLES if s.loss_mask[1:].any()]
SCORED = SCORED[: len(SCORED) // 2 * 2]
LOGITS = WeightedSum(fused=False)
FUSED = [Logprobs(), Logprobs(entropy=True), WeightedSum()]
SFT = [LOGITS, *FUSED]


class SumOfSquares:
    """The part of an objective that a readout uses; keeps its last arguments."""

    terms = "sample"

    def __init__(self, reports_entropy: bool) -> None:
        self.reports_entropy = reports_entropy

    def loss(self, scores: torch.Tensor, entropy: torch.Tensor | None, rows: Any) -> LossOutput:
        self.given = scores.detach(), entropy
        return LossOutput(loss=scores.square().sum())


@pytest.mark.parametrize("samples", [SAMPLES, WARM, MASKED], ids=["plain", "tempered", "masked"])
@pytest.mark.parametrize("tied", quick(False, of=[False, True]), ids=["untied", "tied"])
@pytest.mark.parametrize("only_supervised", [False, True])
@pytest.mark.parametrize("readout", SFT, ids=str)
def test_supervised_training(readout: Readout[Any], only_supervised: bool, tied: bool, samples: list[Sample]) -> None:
    stock, tree = twins(tiny_config(), share_embeddings_and_output_weights=tied)
    expected = unfolded(stock, samples)
    loss = supervised(with_edge_head(tree), batch_of(samples, only_supervised=only_supervised), readout)
    loss.backward()
    assert worst(loss.detach(), expected["loss"]) < 1e-12
    assert_same_gradients(take_gradients(tree), expected["grads"], 1e-12)


@pytest.mark.parametrize("samples", [SAMPLES, WARM], ids=["plain", "tempered"])
@pytest.mark.parametrize("fused", [False, True])
def test_rows_and_the_gradient_of_entropies(fused: bool, samples: list[Sample]) -> None:
    stock, tree = twins(tiny_config())
    expected = unfolded(stock, samples, entropy_weight=0.1)
    assert_equal(folded(with_edge_head(tree), batch_of(samples), fused=fused), expected)


def test_an_entropy_that_the_loss_does_not_read_has_no_gradient() -> None:
    """It has its value all the same; and one that is read and not given is missed."""
    _, tree = twins(tiny_config())
    with_edge_head(tree)
    found = []
    batch = replace(batch_of(), rows=LossRows(count=0))
    for reports_entropy in (False, True):
        objective: Any = SumOfSquares(reports_entropy)
        readout = EdgeLoss(objective=objective)
        readout.read(tree_forward(tree, batch, readout), batch).loss.backward()
        found.append((objective.given[1], take_gradients(tree)))
    wanted = Logprobs(entropy=True).read(tree_forward(tree, batch, Logprobs(entropy=True)), batch)[1]
    (nothing, plain), (watched, grads) = found
    assert nothing is None
    assert torch.equal(watched, wanted)
    assert all(torch.equal(grads[name], grad) for name, grad in plain.items())
    objective = make_objective("grpo", {"entropy_coef": 0.1, "advantage": "given", "on_policy": True})
    samples = informed(SAMPLES)
    batch = with_rows(batch_of(samples), objective, objective.targets(samples), range(len(samples)))
    with pytest.raises(ValueError, match=r"entropy_coef=0\.1 needs the entropy, and none is given"):
        objective.loss(torch.zeros(batch.layout.padded_size), None, batch.rows)


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
    """Samples with the signals that these objectives read."""
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


def test_each_output_that_objectives_name_has_a_readout() -> None:
    assert set(READOUTS) == set(get_args(Output))
    readouts = {
        "sft": WeightedSum,
        "grpo": EdgeLoss,
        "dpo": EdgeLoss,
        "kto": EdgeLoss,
        "critic": ValueLoss,
        "reward_model": ValueLoss,
        "distill": EdgeLoss,
        "xtoken": ChunkLosses,
    }
    assert {name: type(make_readout(make_objective(name), fused_head=True)) for name in readouts} == readouts
    asking = make_objective("distill", {"teacher": "full"})
    assert type(make_readout(asking, fused_head=True)) is DivergenceLoss
    assert type(make_readout(make_objective("sft", {"normalise": "sample"}), fused_head=True)) is EdgeLoss
    assert {asking.output, make_objective("xtoken").output} == set(HOOKS)


@pytest.mark.parametrize(
    ("chunk", "masked"),
    [(2, False), (5, True), *(pytest.param(chunk, False, marks=pytest.mark.ci) for chunk in (5, 1000))],
)
@pytest.mark.parametrize(("name", "options", "terms"), OBJECTIVES)
def test_objectives_form_their_gradients_in_forward(
    name: str, options: dict[str, Any], terms: str, chunk: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss, the metrics, and every gradient of the path that has all logits first."""
    monkeypatch.setattr(head_chunks, "_CPU", (1, chunk))
    objective: Any = make_objective(name, options)
    masked = masked and name != "distill"  # which reads the whole vocabulary
    assert objective.terms == terms
    assert make_readout(objective, fused_head=True) == EdgeLoss(objective=objective)
    samples = informed(SCORED if terms == "pair" or name == "kto" else SAMPLES)
    if masked:
        samples = with_sets(samples, VOCAB)
    targets = objective.targets(samples)
    found = []
    for fused_head in (True, False):
        _, tree = twins(tiny_config())
        batch = with_rows(batch_of(samples), objective, targets, range(len(samples)))
        step = partial(forward_step, readout=make_readout(objective, fused_head=fused_head))
        scores, loss_of = step(iter([batch]), with_edge_head(tree))
        loss, count, reported = loss_of(scores)
        loss.backward()
        found.append((loss.detach(), count, reported["metrics"], take_gradients(tree)))
    (loss, count, metrics, grads), (wanted_loss, wanted_count, wanted_metrics, wanted_grads) = found
    assert worst(loss, wanted_loss) < 1e-12
    assert count == wanted_count
    assert metrics.keys() == wanted_metrics.keys()
    assert all(worst(metrics[key], wanted) < 1e-12 for key, wanted in wanted_metrics.items())
    assert_same_gradients(grads, wanted_grads, 1e-12)


def test_logprobs_have_the_same_bits_with_and_without_entropy() -> None:
    _, tree = twins(tiny_config(torch.float32))
    with_edge_head(tree)
    batch = replace(batch_of(WARM), rows=LossRows(count=0))
    found = [readout.read(tree_forward(tree, batch, readout), batch)[0] for readout in FUSED[:2]]
    for reports_entropy in (False, True):
        objective: Any = SumOfSquares(reports_entropy)
        readout = EdgeLoss(objective=objective)
        readout.read(tree_forward(tree, batch, readout), batch)
        found.append(objective.given[0])
    for other in found[1:]:
        assert torch.equal(found[0], other)


def test_bf16_is_no_further_off_than_the_path_with_logits() -> None:
    """Through Float16Module; against the same bf16 weights in float64."""
    _, half = twins(tiny_config(torch.bfloat16, bf16=True))
    _, double = twins(tiny_config())
    double.load_state_dict({k: v.double() if v is not None else v for k, v in half.state_dict().items()})
    wrapped = Float16Module(half.config, with_edge_head(half))
    batch = batch_of()
    supervised(double, batch, LOGITS).backward()
    exact = take_gradients(double)
    errors = {}
    for readout in SFT:
        assert tree_forward(wrapped, batch, readout).dtype == torch.float32
        supervised(wrapped, batch, readout).backward()
        errors[readout] = {name: worst(grad, exact[name]) for name, grad in take_gradients(half).items()}
    for readout in FUSED:
        for name, error in errors[readout].items():
            assert error < 1.5 * errors[LOGITS][name], (readout, name)


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
    tree_forward(tree, batch_of(), Logprobs())
    assert len(calls) == 1


@pytest.mark.parametrize("readout", SFT, ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_gradient_accumulation_fusion(readout: Any, tied: bool) -> None:
    """Its protocol, with DDP's own hooks and buffers: two micro-batches add up in main_grad, once each."""
    stock, tree = twins(tiny_config(), share_embeddings_and_output_weights=tied)
    expected = unfolded(stock, SAMPLES)["grads"]
    with_edge_head(tree)
    wrapped = DistributedDataParallel(tree.config, DistributedDataParallelConfig(), tree)
    wrapped.zero_grad_buffer()
    tree.output_layer.gradient_accumulation_fusion = readout.fused  # that of logits is a CUDA kernel's
    for half in (SAMPLES[::2], SAMPLES[1::2]):
        supervised(wrapped, batch_of(half), readout).backward()
    actual = {name: parameter.main_grad for name, parameter in tree.named_parameters()}
    assert_same_gradients(actual, expected, 1e-12)


def test_overlapped_gradient_reduction() -> None:
    """Every parameter's hook runs in the last micro-batch, also on a rank without scored tokens."""
    _, tree = twins(tiny_config())
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True)
    wrapped = DistributedDataParallel(tree.config, ddp_config, with_edge_head(tree))
    for readout in FUSED:
        for samples in (SAMPLES, []):
            wrapped.zero_grad_buffer()
            supervised(wrapped, batch_of(samples, only_supervised=True), readout).backward()
            wrapped.finish_grad_sync()
            assert tree.output_layer.weight.main_grad.any() == bool(samples)


def test_a_frozen_output_layer() -> None:
    stock, tree = twins(tiny_config())
    expected = unfolded(stock, SAMPLES)["grads"]
    tree.output_layer.weight.requires_grad_(False)
    for readout in FUSED:
        supervised(with_edge_head(tree), batch_of(), readout).backward()
        grads = take_gradients(tree)
        assert grads.pop("output_layer.weight") is None
        assert_same_gradients(grads, {name: expected[name] for name in grads}, 1e-12)


def test_model_without_an_edge_head_is_rejected() -> None:
    _, tree = twins(tiny_config())
    with pytest.raises(
        ValueError, match=r"^Logprobs asks the fused head, but the model's .* only has logits; pass the"
    ):
        tree_forward(tree, batch_of(), Logprobs())


def test_a_request_never_passes_for_a_flag() -> None:
    _, tree = twins(tiny_config())
    request = HeadRequest(edges=batch_of().edges, temperature=None, head_chunk_rows=None, answer=lambda rows, *_: rows)
    with pytest.raises(TypeError, match="HeadRequest reached a layer"):
        tree.output_layer(torch.zeros(3, 1, 32, dtype=torch.float64), runtime_gather_output=request)


@pytest.mark.parametrize("readout", [TopLogprobs(k=2, fused=True), Hidden(fused=False)])
def test_readout_rejects_unsupported_heads(readout: Any) -> None:
    _, tree = twins(tiny_config())
    batch = batch_of()
    with pytest.raises(NotImplementedError, match=f"{type(readout).__name__} .*; set fused={not readout.fused}"):
        readout.read(tree_forward(with_edge_head(tree), batch, readout), batch)


def test_custom_output_layers_are_rejected() -> None:
    class Capped(ColumnParallelLinear):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            logits, bias = super().forward(*args, **kwargs)
            return 30 * torch.tanh(logits / 30), bias

    _, tree = twins(tiny_config())
    tree.output_layer.__class__ = Capped
    with pytest.raises(NotImplementedError, match="output_layer of class Capped, which computes its logits in its own"):
        with_edge_head(tree)
    tree.output_layer.config = replace(tree.config)
    tree.output_layer.config.final_logit_softcapping = 30.0
    with pytest.raises(NotImplementedError, match=r"final_logit_softcapping=30.0, .* fused_head=false"):
        with_edge_head(tree)


def test_deferred_weight_gradients_are_refused() -> None:
    _, tree = twins(tiny_config())
    tree.output_layer.config = replace(tree.config)
    tree.output_layer.config.defer_embedding_wgrad_compute = True
    with pytest.raises(NotImplementedError, match=r"defer_embedding_wgrad_compute=True, .* fused_head=false"):
        with_edge_head(tree)


def test_a_model_with_scaled_logits() -> None:
    """muP, if megatron-core has it: the model multiplies any head's output, and the output layer allows for it."""
    config = tiny_config()
    if not hasattr(config, "use_mup"):
        pytest.skip("this megatron-core has no muP")
    stock, tree = twins(tiny_config(use_mup=True, mup_base_hidden_size=8))
    expected = unfolded(stock, SAMPLES)
    for readout in SFT:
        loss = supervised(with_edge_head(tree), batch_of(), readout)
        loss.backward()
        assert worst(loss.detach(), expected["loss"]) < 1e-12
        assert_same_gradients(take_gradients(tree), expected["grads"], 1e-12)


def test_hidden_states_are_not_scaled_like_logits() -> None:
    """muP again: the model multiplies its output layer's result."""
    if not hasattr(tiny_config(), "use_mup"):
        pytest.skip("this megatron-core has no muP")
    stock, tree = twins(tiny_config(use_mup=True, mup_base_hidden_size=8))
    batch = batch_of()
    found = Hidden().read(tree_forward(with_edge_head(tree), batch, Hidden()), batch)
    logits = found @ tree.output_layer.weight.T * tree.config.mup_output_mult
    ids = torch.tensor(SAMPLES[0].tokens.tolist()).unsqueeze(0)
    expected = stock(ids, torch.arange(len(SAMPLES[0])).unsqueeze(0), None)[0, 0]
    row = int((batch.edges.row == batch.layout.sample_tokens(0)[0]).nonzero())
    assert worst(logits[row], expected) < 1e-12
