from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from harness.losses import divided, vocabulary_divergence
from harness.oracles import sample_lists, worst
from hypothesis import given
from hypothesis import strategies as st
from objective_oracles import VOCAB, World, changed, check_cuts, full_loss, run, top_k_loss, with_signals, with_teachers

from mcore_prefix_tree import Sample, SampleError, fold
from mcore_prefix_tree.objectives import Distillation, divergence
from mcore_prefix_tree.objectives.metrics import NO_SAMPLE, add_means
from mcore_prefix_tree.signals import Teacher

KINDS = ["forward_kl", "reverse_kl", "jsd"]


def distillation(kind: str, beta: float = 0.3, **options: object) -> Distillation:
    return Distillation(divergence=kind, **({"jsd_beta": beta} if kind == "jsd" else {}), **options)


def run_top_k(objective, world, cut):
    targets = objective.targets(world.samples)

    def of_part(layout, table_row, indices):
        rows = objective.rows(targets, layout, indices)
        logprobs = torch.log_softmax(world.logits[table_row], dim=1)[rows.predictor].gather(
            1, rows.edges.token_id.view(rows.logprobs.shape)
        )
        return objective.loss(logprobs, None, rows)

    return run(world, targets, cut, of_part)


@pytest.mark.parametrize("kind", KINDS)
@given(samples=sample_lists(max_samples=7), seed=st.integers(0, 99), by=st.sampled_from(["token", "sample", "group"]))
def test_top_k_equals_unfolded_samples_for_any_cut(kind, samples, seed, by):
    world = World.of(with_teachers(with_signals(samples, seed, table_seed=seed), 5, seed), seed)
    objective = distillation(kind, normalise=by)
    alone = [[index] for index in range(len(samples))]
    loss_of = lambda cut: run_top_k(objective, world, cut)[0]  # noqa: E731
    check_cuts(top_k_loss(objective, world), world.logits, alone, seed, loss_of)


@given(samples=sample_lists(max_samples=7), seed=st.integers(0, 99))
def test_inconsistent_teacher_rows_are_used_as_given(samples, seed):
    """On unfolded samples its rows of the same path may differ."""
    rng = np.random.default_rng(seed)
    told = []
    for sample in with_teachers(with_signals(samples, seed, table_seed=seed), 5, seed):
        teacher = sample.signals.teacher
        lower = teacher.logprobs - rng.choice([0.0, 0.25], size=(len(sample), 1)).astype(np.float32)
        ids = np.where(rng.random((len(sample), 1)) < 0.2, teacher.token_ids[:, ::-1], teacher.token_ids)
        told.append(changed(sample, teacher=Teacher(token_ids=ids, logprobs=lower)))
    world = World.of(told, seed)
    objective = Distillation(divergence="jsd", jsd_beta=0.3, normalise="sample")
    layout = fold(told)
    rows = objective.rows(objective.targets(told), layout, range(len(told)))
    assert rows.predictor.tolist() == sorted(rows.predictor.tolist())
    assert rows.multiplicity.sum() == objective.targets(told).scored.lens.sum()
    alone = [[index] for index in range(len(told))]
    loss_of = lambda cut: run_top_k(objective, world, cut)[0]  # noqa: E731
    check_cuts(top_k_loss(objective, world), world.logits, alone, seed, loss_of)


@pytest.mark.parametrize("kind", KINDS)
@given(samples=sample_lists(max_samples=6), seed=st.integers(0, 99), block=st.sampled_from([1, 3, 256]))
def test_full_vocabulary_equals_unfolded_samples_for_any_cut(kind, samples, seed, block):
    world = World.of(with_signals(samples, seed, table_seed=seed), seed)
    teacher = World.of(world.samples, seed + 1000)
    objective = distillation(kind, teacher="full", normalise="sample")
    targets = objective.targets(world.samples)

    def of_part(layout, table_row, indices):
        rows = objective.rows(targets, layout, indices)
        of_row = vocabulary_divergence(
            world.logits[table_row], teacher.logits[table_row], rows.predictor, kind, jsd_beta=0.3
        )
        return objective.weighed(of_row, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(divergence, "ROWS", block)
        alone = [[index] for index in range(len(samples))]
        loss_of = lambda cut: run(world, targets, cut, of_part)[0]  # noqa: E731
        check_cuts(full_loss(objective, world, teacher), world.logits, alone, seed, loss_of)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [1, 2, 3, 256])
def test_logits_turn_into_the_gradients_of_their_divergences(kind, block):
    generator = torch.Generator().manual_seed(0)
    student, teacher = 3 * torch.randn(2, 7, VOCAB, generator=generator, dtype=torch.float64)
    weight = torch.linspace(0.1, 3, 7, dtype=torch.float64)
    leaf = student.clone().requires_grad_()
    expected = divergence.divergence(teacher.log_softmax(1), leaf.log_softmax(1), kind, 0.3)
    (wanted,) = torch.autograd.grad(torch.dot(expected, weight), leaf)
    asked = []

    def of_teacher(rows):
        asked.append(rows)
        return teacher[rows].clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(divergence, "ROWS", block)
        objective = distillation(kind, teacher="full")
        found = objective.of_logits_(student, of_teacher, weight)
    assert worst(found, expected) < 1e-13
    assert (student - wanted).norm() <= 1e-13 * wanted.norm()
    assert [rows.stop - rows.start for rows in asked] == [min(block, 7 - start) for start in range(0, 7, block)]


def forked():
    return [Sample(tokens=[1, 2, branch, *range(branch)], source=f"file:{branch}") for branch in range(3)]


def test_a_shared_row_is_computed_once_with_its_multiplicity():
    samples = with_teachers(with_signals(forked(), 0, table_seed=0), 4, 0)
    objective = Distillation()
    targets = objective.targets(samples)
    rows = objective.rows(targets, fold(samples), [0, 1, 2])
    layout = fold(samples)
    assert len(rows.predictor) == len(set(layout.predictor[layout.predictor >= 0].tolist()))
    # 1 predicts 2 in all three, 2 predicts the three branches.
    assert rows.multiplicity.tolist()[:2] == [3, 3]
    assert rows.multiplicity.sum() == rows.weight.sum() == rows.count == targets.divisor


@pytest.mark.parametrize("kind", KINDS)
def test_top_k_divergence_is_a_lower_bound_and_exact_with_all_tokens(kind):
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 9, VOCAB, generator=generator, dtype=torch.float64)
    whole = vocabulary_divergence(student, teacher, torch.arange(9), kind, jsd_beta=0.4)
    log_p, log_q = torch.log_softmax(teacher, dim=1), torch.log_softmax(student, dim=1)
    objective = distillation(kind, beta=0.4)
    before = torch.zeros(9, dtype=torch.float64)
    for k in (1, 3, 10, 30, VOCAB):
        top, ids = log_p.topk(k, dim=1)
        of_row = objective.of_rows(top, log_q.gather(1, ids), VOCAB)
        assert (of_row >= before - 1e-12).all()
        assert (of_row <= whole + 1e-9).all()
        before = of_row
    torch.testing.assert_close(before, whole, rtol=1e-14, atol=1e-14)


def test_the_same_distribution_has_no_divergence_and_no_gradient():
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(5, VOCAB, generator=generator, dtype=torch.float64).requires_grad_()
    for kind in KINDS:
        result = vocabulary_divergence(student, student.detach().clone(), torch.arange(5), kind)
        (grad,) = torch.autograd.grad(result.sum(), student)
        assert result.abs().max() < 1e-14
        assert grad.abs().max() < 1e-15


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lower_precision_logits_are_reduced_in_fp32(dtype):
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, 7, VOCAB, generator=generator) * 3).to(dtype)
    student.requires_grad_()
    exact = student.detach().double().requires_grad_()
    for kind in KINDS:
        got = vocabulary_divergence(student, teacher, torch.arange(7), kind)
        wanted = vocabulary_divergence(exact, teacher.double(), torch.arange(7), kind)
        assert got.dtype == torch.float32
        assert worst(got, wanted) < 1e-5
        grads = [torch.autograd.grad(x.sum(), y)[0] for x, y in ((got, student), (wanted, exact))]
        assert grads[0].dtype == dtype
        assert worst(*grads) < (1e-2 if dtype is torch.bfloat16 else 1e-5)


def test_metrics_do_not_depend_on_the_cut():
    world = World.of(with_teachers(with_signals(forked(), 0, table_seed=0), 4, 0), 0)
    results = []
    for cut in ([[0, 1, 2]], [[2], [], [1, 0]]):
        _, outputs = run_top_k(Distillation(divergence="jsd"), world, cut)
        results.append(divided(add_means(output.metrics for output in outputs)))
    assert results[0] == pytest.approx(results[1], rel=1e-12)
    assert set(results[0]) == {"jsd"}


def test_mismatched_teachers_are_named():
    samples = with_teachers(with_signals(forked(), 0, table_seed=0), 4, 0)
    objective = Distillation()
    with pytest.raises(SampleError, match=r"^file:1: field 'teacher' is missing, and teacher=top_k needs it"):
        objective.targets([samples[0], changed(samples[1], teacher=None)])
    fewer = with_teachers(samples, 3, 0)
    with pytest.raises(SampleError, match=r"^file:1: field 'teacher' has rows of 3, but those of file:0 have 4"):
        objective.targets([samples[0], fewer[1]])


def test_an_output_that_is_not_finite_names_its_sample():
    samples = with_teachers(with_signals(forked(), 0, table_seed=0), 4, 0)
    objective = Distillation()
    rows = objective.rows(objective.targets(samples), fold(samples), [0, 1, 2])
    logprobs = torch.full(rows.logprobs.shape, -3.0)
    assert objective.loss(logprobs, None, rows).bad_sample == NO_SAMPLE
    logprobs[-1, 0] = float("nan")
    assert objective.loss(logprobs, None, rows).bad_sample == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_student_that_leaves_nothing_to_other_tokens(dtype):
    """A probability that rounds to 1 is known up to rounding: the divergence stays at that size."""
    teacher, student = (torch.tensor([[math.log(p)]], dtype=dtype, requires_grad=p == 1) for p in (0.6, 1))
    found = Distillation().of_rows(teacher, student)
    rest = torch.finfo(dtype).eps
    assert found.item() == pytest.approx(0.6 * math.log(0.6) + 0.4 * (math.log(0.4) - math.log(rest)), rel=1e-5)
    found.sum().backward()
    assert torch.isfinite(student.grad).all()
