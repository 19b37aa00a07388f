"""A step of a distillation across tokenizers, folded in a world of gloo processes; and the oracle on unfolded samples.

The functions here run inside the processes of :mod:`harness.worlds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from harness.folded_jobs import folding_of, stock_spec, tree_spec
from harness.models import Trainer, build_chunks, tiny_gpt_config
from harness.weights import fill, local_parts
from harness.worlds import Layout
from harness.xtoken_problems import Problem, reference_terms
from objective_jobs import OneByOne, Options, Outcome, outcome_of, resolve
from xtoken_texts import chunks_of_pairs, texts

from mcore_prefix_tree import Sample
from mcore_prefix_tree.mcore.engine.step_planner import fold_step
from mcore_prefix_tree.mcore.seam.output_layer import with_edge_head
from mcore_prefix_tree.mcore.teachers.paired_teachers import ExportedTeacher, PairedTeachers
from mcore_prefix_tree.mcore.teachers.teacher_model import TeacherModel, TeacherRanks
from mcore_prefix_tree.objectives import BoundCrossTokenizer, make_objective
from mcore_prefix_tree.signals import Signals, Teacher
from mcore_prefix_tree.utils.choices import OverBudget
from mcore_prefix_tree.xtoken.pairs import Pair

# Both leave padded columns on each rank of two.
STUDENT_SIZE, TEACHER_SIZE = 40, 48
TEACHER_CONFIG = (("hidden_size", 48), ("ffn_hidden_size", 64), ("num_layers", 4), ("num_query_groups", 4))
TEACHER_SEEDS = (5, 6)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Settings of the objective, and how it is computed.

    ``rows`` of so many tokens stand for the teacher. ``teacher_tp`` are its tensor-parallel ranks, if they are not
    the student's; with ``last_stage`` that stage has all of its layers.
    """

    options: Options
    max_tokens: int = 10_000
    teachers: int = 1
    rows: int | None = None
    teacher_tp: int | None = None
    last_stage: bool = False
    over_budget: OverBudget = "repeat"
    config: Options = ()


def folded_step(layout: Layout, job: Job, samples: Sequence[Sample]) -> tuple[Outcome, list[Any]]:
    """Every rank: the outcome of a step, and its part of the gradients."""

    def model(config: Any, vocab_size: int, groups: Any = None) -> list[Any]:
        chunks = build_chunks(config, tree_spec, vocab_size=vocab_size, groups=groups)
        return [with_edge_head(chunk) for chunk in chunks]

    config = tiny_gpt_config(layout=layout, **dict(job.config))
    trainer = Trainer.of(model(config, STUDENT_SIZE))
    multiple = layout.tp if layout.sequence_parallel else 1
    settings: Any = make_objective("xtoken", dict(job.options))
    sides = (texts().side(settings.losses),) * job.teachers
    objective = BoundCrossTokenizer(settings=settings, sides=sides, pad_to_multiple_of=multiple, block_rows=7)
    models = []
    tp = job.teacher_tp or layout.tp
    own = replace(layout, tp=tp, sequence_parallel=layout.sequence_parallel and tp == layout.tp)
    ranks = TeacherRanks.of(tp, on_last_stage=job.last_stage)
    if job.last_stage:
        own = replace(own, pp=1, vpp=None)
    for seed in () if job.rows else TEACHER_SEEDS[: job.teachers]:
        chunks = []
        if ranks is None or ranks.is_here:
            chunks = model(
                tiny_gpt_config(layout=own, **dict(TEACHER_CONFIG)),
                TEACHER_SIZE,
                groups=None if ranks is None else ranks.groups,
            )
            fill(chunks, seed=seed)
        models.append(TeacherModel(chunks=chunks, attention_backend="reference", attention_cases=(), ranks=ranks))
    folding = folding_of(layout, job.max_tokens, only_supervised=True, over_budget=job.over_budget)
    hook = (ExportedTeacher if job.rows else PairedTeachers)(
        objective=objective, models=models, student_columns=STUDENT_SIZE // layout.tp, device=folding.device
    )
    resolved = resolve(objective, folding, config, hook)
    step = fold_step(samples, resolved)
    batches = hook.before_step(step.micro_batches, resolved.forward(trainer.chunks))
    reported = trainer.backward(resolved.forward_step, batches, seq_length=1)
    outcome = outcome_of(reported, step, objective, samples)
    return outcome, local_parts(trainer.chunks, lambda parameter: parameter.main_grad)


def stock_model(seed: int) -> Any:
    """Return a teacher of stock specs, one sample at a time."""
    (model,) = build_chunks(
        tiny_gpt_config(layout=Layout(), **dict(TEACHER_CONFIG)), stock_spec, vocab_size=TEACHER_SIZE
    )
    fill([model], seed=seed)
    return OneByOne(model)


def answers(teacher: Any, number: int, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits that rows are exported from: those of every third sample differ on the paths it shares."""
    z: torch.Tensor = teacher.logits(tokens).detach()
    return z + 0.1 * torch.sin(torch.arange(z.numel(), dtype=z.dtype)).view_as(z) if number % 3 == 1 else z


def exported(job: Job, samples: Sequence[Sample]) -> list[Sample]:
    """One process: the samples with the rows of the teacher, computed for each by itself."""
    assert job.rows is not None
    teacher, both, found = stock_model(TEACHER_SEEDS[0]), texts(), []
    for number, sample in enumerate(samples):
        tokens = both.pairing.reencode(sample).teacher.tokens
        z = answers(teacher, number, tokens.tolist())[:-1, : both.teacher.vocab_size]
        first = z.new_full((1, z.shape[1]), torch.nan)  # nothing predicts the first token
        logprobs = torch.cat([first, torch.log_softmax(z, dim=1)])
        top = logprobs.nan_to_num().topk(job.rows, dim=1)
        realised = logprobs.gather(1, torch.from_numpy(tokens.copy()).long()[:, None])[:, 0]
        rows = Teacher(
            token_ids=top.indices.int().numpy(),
            logprobs=top.values.numpy(),
            tokens=tokens,
            realised=realised.numpy(),
            tokenizer=both.pairing.teacher.hash,
        )
        found.append(replace(sample, signals=Signals(teacher=rows)))
    return found


def unfolded_step(job: Job, samples: Sequence[Sample]) -> tuple[float, list[Any]]:
    """One process, stock specs, each sample by itself through both models, the formulas chunk by chunk."""
    settings: Any = make_objective("xtoken", dict(job.options))
    config = tiny_gpt_config(layout=Layout(), **dict(job.config))
    (model,) = build_chunks(config, stock_spec, vocab_size=STUDENT_SIZE)
    student = OneByOne(model)
    teachers = [stock_model(seed) for seed in TEACHER_SEEDS[: job.teachers]]
    both = texts()
    pairs = [both.pairing.reencode(sample) for sample in samples]
    logits = [student.logits(sample.tokens.tolist()) for sample in samples]
    taught = []
    for teacher in teachers:
        z = [teacher.logits(pair.teacher.tokens.tolist()).detach() for pair in pairs]
        if job.rows:
            z = [answers(teacher, number, pair.teacher.tokens.tolist()) for number, pair in enumerate(pairs)]
        if job.rows and settings.mode == "p_kl":
            z = [likeliest(own[:, : both.teacher.vocab_size], job.rows) for own in z]
        taught.append(z)
    tokens = sum(int((sample.loss_mask[1:] != 0).sum()) for sample in samples)
    loss = unfolded_loss(settings, pairs, logits, taught, w=both.w, token_bytes=both.token_bytes)
    # Megatron's own division is by a reciprocal in fp32, which is no more than a scale that all gradients have.
    divisor = torch.tensor(tokens)
    (loss * divisor).backward()
    sums = student.backward()
    return float(loss.detach()), local_parts([model], lambda parameter: sums[parameter] * (1.0 / divisor))


def unfolded_loss(
    settings: Any,
    pairs: Sequence[Pair],
    logits: Sequence[torch.Tensor],
    taught: Sequence[Sequence[torch.Tensor]],
    *,
    w: torch.Tensor,
    token_bytes: tuple[list[bytes | None], list[bytes | None]],
) -> torch.Tensor:
    """Return the loss of a step by the formulas, chunk by chunk; ``taught`` are the logits of each teacher."""
    samples = [pair.student for pair in pairs]
    tokens = sum(int((sample.loss_mask[1:] != 0).sum()) for sample in samples)
    ce: Any = 0.0
    for sample, own in zip(samples, logits, strict=True):
        logprob = torch.log_softmax(own[:-1], dim=1)
        chosen = logprob[range(len(sample) - 1), sample.tokens[1:].tolist()]
        ce = ce - (chosen * torch.tensor(sample.loss_mask[1:].tolist(), dtype=torch.float64)).sum() / tokens

    # Of all samples one after another: the rows of the oracle.
    weights = [weight for pair in pairs for weight in pair.weight.tolist()]
    nothing = torch.empty(0)
    task = Problem(
        student=(nothing, nothing),
        teacher=(nothing, nothing),
        w=w,
        student_bytes=token_bytes[0],
        teacher_bytes=token_bytes[1],
        chunks=chunks_of_pairs(pairs),
        weight=torch.tensor(weights, dtype=torch.float64),
    )
    x = torch.cat(list(logits))[:, : len(w)]
    rows = [torch.cat(list(z))[:, : w.shape[1]] for z in taught]

    def kd(z: torch.Tensor) -> torch.Tensor:
        return torch.dot(task.weight, reference_terms(task, settings.losses, x, z)) / len(task.chunks)

    shares = settings.teacher_weights or [1.0] * len(rows)
    of_all = sum(share * kd(z) for share, z in zip(shares, rows, strict=True))
    loss: torch.Tensor = settings.kd_weight * of_all + settings.ce_weight * ce
    return loss


def likeliest(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return logits that are -inf but for the k largest of each row."""
    top = logits.topk(k, dim=1)
    return torch.full_like(logits, -torch.inf).scatter(1, top.indices, top.values)
