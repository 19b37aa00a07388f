"""A vocabulary that tensor parallelism does not divide: padding has no probability, in any layout and any reader.

The oracle is one process with the vocabulary as it is, unfolded samples through the stock model. Weights depend on the
index of a row, so tokens have the same in every layout.
"""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.folded_jobs import Job as StockJob
from harness.folded_jobs import branching_samples, folded_gradients, stock_spec, unfolded_gradients
from harness.torchrun_jobs import TP2, run, write_job
from harness.weights import Piece, assemble
from harness.worlds import Layout, world
from head_jobs import ScoringJob, scores_and_first_ratios, stock_scores
from inside_jobs import InsideJob, inside_gradients
from objective_jobs import Job, folded_step, make_samples, stock_distributions, teacher_rows, unfolded_step

from mcore_prefix_tree import Sample
from mcore_prefix_tree.sample import Tempered

FP64 = 1e-12
# Four tensor-parallel ranks share four query groups.
GROUPS = (("num_query_groups", 4), ("num_layers", 2))
# Ranks, size of the vocabulary: one row of padding; two, on one rank; three; some on a rank and all of the next.
CUTS = {"127-tp2": (2, 127), "130-tp4": (4, 130), "101-tp4": (4, 101), "5-tp4": (4, 5)}
TAUGHT = (("hidden_size", 48), ("ffn_hidden_size", 64), *GROUPS)
JOBS = {
    "sft": Job(name="sft", options=(("normalise", "group"),)),
    "sft, logits": Job(name="sft", options=(("normalise", "group"),), fused_head=False),
    "grpo": Job(name="grpo", options=(("kl_coef", 0.05), ("entropy_coef", 0.01))),
    "grpo, logits": Job(name="grpo", options=(("kl_coef", 0.05), ("entropy_coef", 0.01)), fused_head=False),
    "dpo": Job(name="dpo"),
    "distill": Job(name="distill", options=(("divergence", "jsd"),)),
    "distill, logits": Job(name="distill", fused_head=False),
    "distill from a model": Job(name="distill", options=(("teacher", "full"),), teacher_config=TAUGHT),
    "distill from a model, jsd": Job(
        name="distill", options=(("teacher", "full"), ("divergence", "jsd")), teacher_config=TAUGHT
    ),
    "distill from a model, reverse": Job(
        name="distill", options=(("teacher", "full"), ("divergence", "reverse_kl")), teacher_config=TAUGHT
    ),
}
# Every objective, both heads and a teacher with a vocabulary of its own.
QUICK = ("sft", "grpo, logits", "dpo", "distill from a model")


def within(samples: Sequence[Sample], vocab_size: int) -> list[Sample]:
    """The same trees in fewer tokens."""

    def signals(one: Any) -> Any:
        if one is None or one.teacher is None:
            return one
        ids = np.minimum(one.teacher.token_ids, vocab_size - 1)
        unlike = np.sort(ids, axis=1)
        clash = (unlike[:, 1:] == unlike[:, :-1]).any(axis=1)
        ids[clash] = np.arange(ids.shape[1])
        return replace(one, teacher=replace(one.teacher, token_ids=ids))

    return [
        replace(one, tokens=np.minimum(one.tokens, vocab_size - 1), signals=signals(one.signals)) for one in samples
    ]


def check_gradients(parts: Sequence[Piece], wanted: Mapping[str, torch.Tensor]) -> None:
    """Gradients of tokens and other parameters equal the oracle's; those of padding are zero."""
    found = assemble(parts)
    assert found.keys() == wanted.keys()
    for name, expected in wanted.items():
        tokens = found[name][: len(expected)]
        assert float((tokens - expected).norm() / expected.norm()) <= FP64, name
        assert not found[name][len(expected) :].any(), name


@functools.cache
def unfolded(job: Job) -> tuple[float, dict[str, torch.Tensor]]:
    samples = within(make_samples(), job.vocab_size)
    ((loss, parts),) = world(1).run(unfolded_step, job, samples, False, layout=Layout())
    return loss, assemble(parts)


@pytest.mark.parametrize(
    ("cut", "name"),
    [
        *(("127-tp2", name) for name in QUICK),
        *(pytest.param("127-tp2", name, marks=pytest.mark.ci) for name in JOBS if name not in QUICK),
        ("101-tp4", "grpo"),
        *(pytest.param("130-tp4", name, marks=pytest.mark.ci) for name in ("sft", "grpo")),
        *(pytest.param("130-tp4", name, marks=pytest.mark.slow) for name in list(JOBS)[4:]),
        *(pytest.param("5-tp4", name, marks=pytest.mark.slow) for name in list(JOBS)[:5]),
    ],
)
def test_step_equals_the_unpadded_vocabulary(cut: str, name: str) -> None:
    size, vocab_size = CUTS[cut]
    job = replace(JOBS[name], vocab_size=vocab_size, config=GROUPS)
    samples = within(make_samples(), vocab_size)
    longest = max(map(len, samples))
    results = world(size).run(
        folded_step, Layout(tp=size), replace(job, max_tokens=4 * longest), samples, layout=Layout(tp=size)
    )
    loss, wanted = unfolded(replace(job, fused_head=False))
    for outcome, _ in results:
        assert outcome.loss == pytest.approx(loss, rel=FP64)
    check_gradients(list(itertools.chain.from_iterable(parts for _, parts in results)), wanted)


@functools.cache
def supervised(job: StockJob) -> tuple[float, dict[str, torch.Tensor]]:
    samples = within(branching_samples(), job.vocab_size)
    ((loss, parts),) = world(1).run(unfolded_gradients, Layout(), job, samples, layout=Layout())
    return loss, assemble(parts)


@pytest.mark.parametrize("way", ["weighted sum", "logits", "logprobs"])
@pytest.mark.parametrize(
    ("cut", "share_embeddings"),
    [
        pytest.param("127-tp2", False, id="127-tp2-untied"),
        pytest.param("127-tp2", True, id="127-tp2-tied", marks=pytest.mark.ci),
        pytest.param("101-tp4", False, id="101-tp4-untied", marks=pytest.mark.ci),
    ],
)
def test_supervised_training(cut: str, way: str, share_embeddings: bool) -> None:
    size, vocab_size = CUTS[cut]
    samples = within(branching_samples(), vocab_size)
    job = StockJob(vocab_size=vocab_size, config=GROUPS, share_embeddings=share_embeddings)
    loss, wanted = supervised(job)
    layout = Layout(tp=size)
    results = world(size).run(folded_gradients, layout, replace(job, way=way, max_tokens=60), samples, layout=layout)
    for found, _, _ in results:
        assert found == pytest.approx(loss, rel=FP64)
    check_gradients(list(itertools.chain.from_iterable(parts for _, parts, _ in results)), wanted)


@functools.cache
def scores(job: ScoringJob) -> tuple[list[Sample], list[tuple[np.ndarray, np.ndarray]]]:
    """Samples of two temperatures, and the stock model's scores of each."""
    samples = [
        replace(one, merge_key=Tempered(temperature=0.7 if index % 3 else 1.3, key=None))
        for index, one in enumerate(within(branching_samples(), job.vocab_size))
    ]
    (wanted,) = world(1).run(stock_scores, Layout(), job, samples, layout=Layout())
    return samples, wanted


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "logits"])
@pytest.mark.parametrize("cut", ["127-tp2", pytest.param("5-tp4", marks=pytest.mark.ci)])
def test_scores_and_first_ratios(cut: str, fused: bool) -> None:
    size, vocab_size = CUTS[cut]
    job = ScoringJob(dtype=torch.float64, all_tokens=True, vocab_size=vocab_size, config=GROUPS)
    (samples, wanted), layout = scores(job), Layout(tp=size)
    job = replace(job, fused=fused)
    for found, _ in world(size).run(scores_and_first_ratios, layout, job, samples, layout=layout):
        for row, (logprobs, entropy) in zip(found, wanted, strict=True):
            np.testing.assert_allclose(row.logprobs[1:], logprobs, rtol=FP64)
            np.testing.assert_allclose(row.entropy[1:], entropy, rtol=FP64)


@pytest.mark.parametrize("cut", ["127-tp2", pytest.param("130-tp4", marks=pytest.mark.ci)])
def test_the_likeliest_tokens_are_all_of_the_vocabulary(cut: str) -> None:
    size, k = CUTS[cut]
    samples = within(branching_samples(), k)
    layout = Layout(tp=size)
    (wanted,) = world(1).run(stock_distributions, samples, k, GROUPS, layout=Layout())
    for rows in world(size).run(teacher_rows, layout, samples, 10_000, k, k, GROUPS, layout=layout):
        for (scored, teacher), expected in zip(rows, wanted, strict=True):
            ids, logprobs = teacher.token_ids[scored], teacher.logprobs[scored]
            assert ids.shape[1] == k
            every = expected.numpy()[scored[1:]]
            np.testing.assert_allclose(logprobs, np.take_along_axis(every, ids.astype(np.int64), 1), rtol=FP64)
            np.testing.assert_allclose(np.exp(logprobs).sum(axis=1), 1, rtol=FP64)


@pytest.mark.parametrize(
    ("cut", "reads"),
    [
        ("127-tp2", "labels"),
        pytest.param("127-tp2", "logits", marks=pytest.mark.ci),
        pytest.param("101-tp4", "logprobs", marks=pytest.mark.ci),
    ],
)
def test_folding_inside_the_model(cut: str, reads: str) -> None:
    size, vocab_size = CUTS[cut]
    samples = within(branching_samples(), vocab_size)
    loss, wanted = supervised(StockJob(vocab_size=vocab_size, config=GROUPS))
    job = InsideJob(reads=reads, vocab_size=vocab_size, check_first=True, config=GROUPS)
    results = world(size).run(inside_gradients, Layout(tp=size), job, samples, layout=Layout(tp=size))
    for found, _, _ in results:
        assert found == pytest.approx(loss, rel=FP64)
    check_gradients(list(itertools.chain.from_iterable(parts for _, parts, _ in results)), wanted)


def stock_losses(layout: Layout, samples: Sequence[Sample], vocab_size: int) -> list[float]:
    """Megatron's own cross-entropy of each separate sample, as the unfolded side of a comparison computes it."""
    from harness.models import build_chunks, tiny_gpt_config

    from mcore_prefix_tree.mcore.engine.unfolded import StockBatch, stock_forward, stock_logprobs

    config = tiny_gpt_config(layout=layout, **dict(GROUPS))
    (model,) = build_chunks(config, stock_spec, vocab_size=vocab_size)
    batches = [StockBatch.from_sample(one, multiple=1, device=torch.device("cpu")) for one in samples]
    with torch.no_grad():
        losses = [float(stock_forward(model, batch, batch.labels).sum()) for batch in batches]
        found = [stock_logprobs(stock_forward(model, batch), batch) for batch in batches]
    return losses + [float(-logprob.sum()) for logprob, _ in found] + [float(entropy.sum()) for _, entropy in found]


def test_the_unfolded_reference_is_the_same_in_every_layout() -> None:
    size, vocab_size = CUTS["101-tp4"]
    samples = within(branching_samples(), vocab_size)[:6]
    (wanted,) = world(1).run(stock_losses, Layout(), samples, vocab_size, layout=Layout())
    layout = Layout(tp=size)
    for found in world(size).run(stock_losses, layout, samples, vocab_size, layout=layout):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)  # Megatron's is in fp32
        np.testing.assert_allclose(found[len(samples) :], wanted[len(samples) :], rtol=FP64)


RECIPE = """
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2, vocab_size: 67, {model}}}
batch: {{global_batch_size: 4, max_tokens: 40}}
optimizer: {{lr: 1e-2, lr_warmup_steps: 1}}
train_iters: 2
compare: false
verify: {{enabled: false}}
checkpoint: {{save: {save}}}
"""


def columns(path: Path) -> dict[str, list[np.ndarray]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {name: [np.array(line[name], dtype=float) for line in lines] for name in ("old_logprobs", "entropy")}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.ci), 2], ids=["saved whole", "saved by two ranks"])
def test_checkpoints_move_between_layouts(tmp_path: Path, ranks: int) -> None:
    """Scores of one checkpoint in both layouts, by both heads; then both resume from it, with equal steps."""
    own = [TP2] if ranks == 2 else []
    job = write_job(tmp_path, RECIPE.format(model="untie_embeddings_and_output_weights: true", save=tmp_path / "runs"))
    done = run(ranks, "train", job, *own, code=0)
    found = {}
    for name, here, words in [("one", 1, []), ("two", 2, [TP2]), ("logits", 2, [TP2, "fused_head=false"])]:
        output = tmp_path / f"{name}.jsonl"
        done = run(here, "score", job, *words, "--output", output, code=0)
        found[name] = columns(output)
    for name in ("two", "logits"):
        for column, wanted in found["one"].items():
            for row, expected in zip(found[name][column], wanted, strict=True):
                np.testing.assert_allclose(row, expected, rtol=0, atol=1e-6)
    losses = {}
    for name, here, words in [("one", 1, []), ("two", 2, [TP2])]:
        shutil.copytree(tmp_path / "runs", tmp_path / name)
        done = run(
            here, "train", job, "--resume", *words, f"checkpoint.save={tmp_path / name}", "train_iters=5", code=0
        )
        losses[name] = [float(loss) for loss in done.losses.values()]
    assert len(losses["one"]) == 3
    assert losses["two"] == pytest.approx(losses["one"], abs=2e-6)


def test_verify_compares_without_padding(tmp_path: Path) -> None:
    job = write_job(tmp_path, RECIPE.format(model="dtype: float32", save="null"))
    run(2, "verify", job, TP2, code=0)
