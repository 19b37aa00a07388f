"""A folded step of distillation across tokenizers equals both stock models on unfolded samples."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
from harness.folded_runs import FP64
from harness.folded_runs import check as equal
from harness.layouts import LAYOUTS, every_way, in_layouts, shallow
from harness.marks import mostly_in_ci, quick
from harness.weights import assemble
from harness.worlds import Layout, world
from xtoken_jobs import STUDENT_SIZE, TEACHER_SIZE, Job, exported, folded_step, unfolded_step
from xtoken_texts import samples, texts

SAMPLES = samples()
LONGEST = max(map(len, SAMPLES))
MODES = {
    "p_kl": Job(options=(("mode", "p_kl"), ("temperature", 1.5), ("ce_weight", 0.3))),
    "p_kl top-k": Job(options=(("mode", "p_kl"), ("top_k", 9), ("reverse", True))),
    "gold": Job(options=(("mode", "gold"), ("temperature", 2.0), ("kd_weight", 0.7))),
    "h_kl": Job(options=(("mode", "h_kl"), ("tail", 5), ("ce_weight", 0.4))),
    "alm": Job(options=(("mode", "alm"), ("theta", 2.0), ("ce_weight", 1.0))),
    "uld": Job(options=(("mode", "uld"),)),
}
SEVERAL = {"weights": (("teacher_weights", [0.25, 1.5]),), "equal weights": ()}


@functools.cache
def samples_of(name: str):
    if JOBS[name].rows is None:
        return SAMPLES
    (found,) = world(1).run(exported, JOBS[name], SAMPLES, layout=Layout())
    return found


@functools.cache
def expected(name: str, config):
    job = replace(JOBS[name], config=config)
    ((loss, parts),) = world(1).run(unfolded_step, job, samples_of(name), layout=Layout())
    return loss, assemble(parts)


EXPORTED = {
    f"{mode}, rows": Job(options=(("mode", mode), ("teacher", "top_k"), *options), rows=14)
    for mode, options in {"p_kl": (("temperature", 1.5), ("ce_weight", 0.3)), "alm": (("ce_weight", 0.5),)}.items()
}
JOBS = (
    MODES
    | EXPORTED
    | {name: Job(options=(("mode", "p_kl"), ("top_k", 12), *options), teachers=2) for name, options in SEVERAL.items()}
)


def check(size, layout, name, *, max_tokens=LONGEST + 12, **teacher):
    job = replace(JOBS[name], max_tokens=max_tokens, config=shallow(layout), **teacher)
    results = world(size).run(folded_step, layout, job, samples_of(name), layout=layout)
    gradients = assemble(itertools.chain.from_iterable(parts for _, parts in results))
    for outcome, _ in results:
        equal((outcome.loss, gradients), expected(name, job.config), FP64)
    return [outcome for outcome, _ in results]


def test_the_texts_are_hard_ones():
    both = texts()
    pairs = [both.pairing.reencode(sample) for sample in SAMPLES]
    kinds = {
        (min(2, s), min(2, t))
        for pair in pairs
        for s, t in zip(
            (pair.alignment.student[:, 1] - pair.alignment.student[:, 0]).tolist(),
            (pair.alignment.teacher[:, 1] - pair.alignment.teacher[:, 0]).tolist(),
            strict=True,
        )
    }
    assert kinds == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert STUDENT_SIZE / 2 < both.student.vocab_size < STUDENT_SIZE
    assert TEACHER_SIZE / 2 < both.teacher.vocab_size < TEACHER_SIZE


# Each loss by itself is cut over a vocabulary in test_xtoken_vocabularies.py.
QUICK = {"tp2-sp": {"h_kl"}, "dp2": {"p_kl top-k", "uld"}}
IN_CI = {"tp2-sp": {"p_kl top-k", "uld"}, "dp2": set(MODES), "single": set(), "tp2": set(), "tp2-pp2": set()}


@pytest.mark.parametrize(("size", "layout", "name"), every_way({name: name for name in MODES}, quick=QUICK, ci=IN_CI))
def test_every_mode(size, layout, name):
    outcomes = check(size, layout, name)
    assert outcomes[0].micro_batches > 1
    if layout == Layout() and size == 2:
        assert outcomes[0].tokens_here != outcomes[1].tokens_here, "unequal ranks"


@pytest.mark.parametrize("name", ["p_kl top-k", "h_kl"])
@in_layouts("pp2", slow=["pp2-vpp2"])
def test_pipelines(size, layout, name):
    check(size, layout, name)


@pytest.mark.parametrize("name", EXPORTED)
@in_layouts("tp2-sp", ci=["pp2"], slow=["dp2"])
def test_rows_that_the_samples_bring(size, layout, name):
    check(size, layout, name)


@pytest.mark.parametrize("name", ["p_kl top-k"])
@in_layouts("tp2-sp", slow=["tp2-pp2"])
def test_each_rank_may_hold_the_full_teacher(size, layout, name):
    check(size, layout, name, teacher_tp=1)


@pytest.mark.parametrize("name", ["p_kl top-k", "h_kl"])
@in_layouts("dp2", slow=["tp2-dp2", "pp2-dp2", "dp4"])
def test_replicas_may_share_the_parts_of_a_teacher(size, layout, name):
    check(size, layout, name, teacher_tp=2 * layout.tp)


@pytest.mark.parametrize("name", ["p_kl top-k", "gold"])
@in_layouts("pp2", slow=["tp2-pp2", "pp2-vpp2"])
def test_last_stage_may_hold_the_full_teacher(size, layout, name):
    check(size, layout, name, last_stage=True)


@pytest.mark.parametrize("name", quick("weights", of=SEVERAL))
def test_several_teachers(name):
    check(2, Layout(), name)


@pytest.mark.parametrize("name", mostly_in_ci("h_kl", of=["p_kl top-k", "h_kl"]))
def test_the_cut_changes_nothing(name):
    narrow, wide = check(1, Layout(), name, max_tokens=LONGEST), check(1, Layout(), name, max_tokens=10_000)
    assert narrow[0].micro_batches > wide[0].micro_batches == 1
    assert narrow[0].metrics == pytest.approx(wide[0].metrics, rel=1e-12)


CUT = {"max_tokens": 12, "over_budget": "carry"}


@pytest.mark.parametrize("name", mostly_in_ci("p_kl", "p_kl top-k", "gold", "h_kl", of=JOBS))
def test_trees_and_samples_above_the_budget(name):
    wide = check(1, Layout(), name, max_tokens=10_000)
    for most in (1, 5, 12) if name in ("p_kl", "gold") else (12,):  # chunks of one token among them
        cut = check(1, Layout(), name, **CUT | {"max_tokens": most})
        assert cut[0].carried_tokens > 0
        assert cut[0].metrics == pytest.approx(wide[0].metrics, rel=1e-12)


CHUNKED = ("p_kl top-k", "h_kl", "alm, rows")
CUT_QUICK = {"tp2-sp": {"h_kl"}, "pp2": {"alm, rows"}}
CUT_IN_CI = {"tp2-sp": set(CHUNKED), "pp2": {"h_kl"}, "dp2": {"p_kl top-k", "h_kl"}, "pp2-vpp2": {"alm, rows"}}
CUT_IN_CI |= {name: set() for name in ("tp2", "tp2-pp2", "tp2-sp-pp2-vpp2", "pp2-dp2")}


@pytest.mark.parametrize(
    ("size", "layout", "name"), every_way({name: name for name in CHUNKED}, quick=CUT_QUICK, ci=CUT_IN_CI)
)
def test_layouts_train_above_the_budget(size, layout, name):
    outcomes = check(size, layout, name, **CUT)
    assert outcomes[0].carried_tokens > 0
    if layout == Layout() and size == 2:
        assert outcomes[0].tokens_here != outcomes[1].tokens_here, "unequal ranks"


@pytest.mark.parametrize("name", ["weights"])
@pytest.mark.parametrize(("layout", "teacher"), [("dp2", {"teacher_tp": 2}), ("pp2", {"last_stage": True})])
def test_teachers_in_other_layouts_above_the_budget(layout, teacher, name):
    check(*LAYOUTS[layout], name, **CUT, **teacher)
