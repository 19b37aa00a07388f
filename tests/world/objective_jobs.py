"""A step of an objective, folded in a world of gloo processes; and the oracle, one process with each sample by itself.

The functions here run inside the processes of :mod:`harness.worlds`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from harness.added_losses import OFF, AddedLosses, without_losses
from harness.folded_jobs import VOCAB, branching_samples, folding_of, in_precision_of, stock_spec, tree_spec
from harness.kept_sets import with_sets
from harness.losses import divided
from harness.models import Trainer, build_chunks, tiny_gpt_config
from harness.weights import Piece, fill, local_parts, uniform
from harness.worlds import Layout
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.timers import Timers
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from objective_oracles import (
    Alone,
    ValuesAlone,
    critic_loss,
    full_loss,
    kto_loss,
    pair_loss,
    policy_loss,
    reward_model_loss,
    sft_loss,
    top_k_loss,
    with_teachers,
)

from mcore_prefix_tree import Sample
from mcore_prefix_tree.logprob import head_chunks
from mcore_prefix_tree.mcore.engine.job import Job as Resolved
from mcore_prefix_tree.mcore.engine.known_shapes import LateGroups, LoopCommunicator
from mcore_prefix_tree.mcore.engine.scoring import score
from mcore_prefix_tree.mcore.engine.step_planner import fold_step
from mcore_prefix_tree.mcore.engine.tree_losses import make_hook
from mcore_prefix_tree.mcore.megatron_lm.step_batches import DealtStep
from mcore_prefix_tree.mcore.outputs import TopLogprobs, Values
from mcore_prefix_tree.mcore.seam.multi_token import with_multi_token
from mcore_prefix_tree.mcore.seam.output_layer import with_edge_head
from mcore_prefix_tree.mcore.seam.scalar_output_layer import with_scalar_head
from mcore_prefix_tree.mcore.teachers.teacher_model import TeacherModel
from mcore_prefix_tree.objectives import add_means, make_objective
from mcore_prefix_tree.plan import ModelWork
from mcore_prefix_tree.signals import Signals
from mcore_prefix_tree.utils.choices import OverBudget

Options = tuple[tuple[str, Any], ...]
TEACHER_SEED = 5


@dataclass(frozen=True, kw_only=True)
class Job:
    """An objective, and how it is computed."""

    name: str
    options: Options = ()
    max_tokens: int = 10_000
    fused_head: bool = True
    dtype: torch.dtype = torch.float64
    config: Options = ()
    teacher_config: Options = ()
    vocab_size: int = VOCAB
    masked: bool = False
    over_budget: OverBudget = "repeat"
    double: bool = False  # compute in fp64 what upstream takes to fp32
    in_loop: bool = False  # run as in Megatron-LM's own loop

    def on(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """The samples, with the sets that their tokens were drawn from if these are part of the job."""
        return with_sets(samples, self.vocab_size) if self.masked else samples


@dataclass(frozen=True, kw_only=True)
class Outcome:
    loss: float
    metrics: dict[str, float]
    micro_batches: int
    carried_tokens: int
    tokens_here: int
    groups_here: frozenset[Any]


def make_samples() -> list[Sample]:
    """Branching trees of completions, in groups of four and pairs of two neighbours; old scores around the model's."""
    rng = np.random.default_rng(3)
    grown = branching_samples()
    samples = []
    for index, sample in enumerate(grown[: len(grown) // 4 * 4]):
        length = len(sample) + 1

        def scores(scale: float, length: int = length) -> Any:
            return -np.log(VOCAB) + scale * rng.standard_normal(length)

        signals = Signals(
            reward=float(rng.choice([0.0, 0.3, 1.0])),
            group=index // 4,
            old_logprobs=scores(0.1),
            ref_logprobs=scores(0.3),
            rollout_logprobs=scores(0.1),
            values=0.3 * rng.standard_normal(length),
            pair=index // 2,
            chosen=bool(index % 2),
            label=bool(index % 3),
            mismatched=index % 7 == 0,
        )
        samples.append(
            Sample(
                tokens=np.concatenate([sample.tokens, [1 + index % 5]]),
                loss_mask=[*sample.loss_mask, 0.5],
                merge_key=sample.merge_key,
                source=sample.source,
                signals=signals,
            )
        )
    return with_teachers(samples, 5, 0)


def folded_step(layout: Layout, job: Job, samples: Sequence[Sample]) -> tuple[Outcome, list[Any]]:
    """Every rank: the trainer's own planning and forward step, and its part of the gradients."""
    config = tiny_gpt_config(layout=layout, dtype=job.dtype, **dict(job.config))
    chunks = build_chunks(config, tree_spec, vocab_size=job.vocab_size)
    objective: Any = make_objective(job.name, dict(job.options))
    if objective.has_scalar_head:
        chunks = [with_scalar_head(chunk) for chunk in chunks]
        fill(chunks)
    elif job.fused_head:
        chunks = [with_multi_token(with_edge_head(chunk)) for chunk in chunks]
    trainer, samples = Trainer.of(chunks, overlap_grad_reduce=job.in_loop), job.on(samples)
    folding = folding_of(
        layout,
        job.max_tokens,
        only_supervised=job.fused_head,
        over_budget=job.over_budget,
        scores_first=not objective.sums_edges,
        depths=config.mtp_num_layers or 0,
    )
    hook = teacher_of(job, layout) if job.teacher_config else make_hook(objective, folding)
    resolved = resolve(objective, folding, config, hook, fused_head=job.fused_head)
    step = fold_step(samples, resolved)
    several = (1, 3)  # rows of the head: several chunks even here
    with mock.patch.object(head_chunks, "_CPU", several), in_precision_of(job):
        if job.in_loop:
            reported = step_in_loop(resolved, step.micro_batches, chunks, trainer)
        else:
            batches = resolved.hook.before_step(step.micro_batches, resolved.forward(trainer.chunks))
            reported = trainer.backward(resolved.forward_step, batches, seq_length=1)
    outcome = outcome_of(reported, step, objective, samples)
    return outcome, local_parts(trainer.chunks, lambda parameter: parameter.main_grad)


def resolve(objective: Any, folding: Any, config: Any, hook: Any, **more: Any) -> Resolved:
    """A job of this rank; its work is only reported."""
    return Resolved(
        objective=objective,
        folding=folding,
        dp_rank=parallel_state.get_data_parallel_rank(),
        config=config,
        work=ModelWork.from_dimensions(
            num_layers=1, hidden_size=8, ffn_hidden_size=8, num_attention_heads=1, vocab_size=VOCAB
        ),
        hook=hook,
        **more,
    )


def outcome_of(reported: Sequence[Any], step: Any, objective: Any, samples: Sequence[Sample]) -> Outcome:
    """Add up what the ranks report of a step."""
    parts: list[Any] = [None] * dist.get_world_size()
    speaks = bool(reported) and parallel_state.get_tensor_model_parallel_rank() == 0
    own = (
        sum(float(entry["loss_sum"]) for entry in reported),
        sum(int(entry["num_tokens"]) for entry in reported),
        add_means(entry.get("metrics", {}) for entry in reported),  # a weighted sum reports none
    )
    dist.all_gather_object(parts, own if speaks else (0.0, 0, {}))
    divisor = objective.targets(samples).divisor
    assert sum(count for _, count, _ in parts) == divisor
    here = [samples[index] for indices in step.sample_index for index in indices]
    return Outcome(
        loss=sum(loss for loss, _, _ in parts) / divisor,
        metrics=divided(add_means(metrics for _, _, metrics in parts)),
        micro_batches=len(step.micro_batches),
        carried_tokens=step.carried_tokens,
        tokens_here=sum(map(len, here)),
        groups_here=frozenset(sample.signals.group for sample in here),
    )


def step_in_loop(job: Any, batches: Sequence[Any], bare: Sequence[Any], trainer: Any) -> list[Any]:
    """Run a step as Megatron-LM's loop does, whose schedule begins without knowing of work before it."""
    step, chunks, config = DealtStep(batches, job, chunks=len(bare)), trainer.chunks, trainer.config
    communicator = LoopCommunicator(SimpleNamespace(begin_step=step.begin, list_sizes=step.list_sizes))
    for chunk in bare:
        communicator.join(chunk)
    config.timers = Timers(log_level=2, log_option="minmax")
    several = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = several if len(several) > 1 else several[0]

    def forward_step(places: Any, model: Any) -> Any:
        place = next(places)
        batch = step.take(place, model)
        if place == 0:
            groups = [group for chunk in chunks for group in chunk.bucket_groups]
            assert not any(group.is_last_microbatch for group in groups), "gradients would be summed too early"
        return job.forward_step(iter([batch]), model)

    reported: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(range(len(batches))) for _ in chunks],
        model=chunks,
        num_microbatches=len(batches),
        seq_length=1,
        micro_batch_size=1,
        p2p_communicator=communicator,
        pg_collection=LateGroups(),
    )
    return reported


def teacher_of(job: Job, layout: Layout) -> Any:
    """A model of another size and other weights."""
    config = tiny_gpt_config(layout=layout, dtype=job.dtype, **dict(job.teacher_config))
    chunks = [with_edge_head(chunk) for chunk in build_chunks(config, tree_spec, vocab_size=job.vocab_size)]
    fill(chunks, seed=TEACHER_SEED)
    return TeacherModel(chunks=chunks, attention_backend="reference", attention_cases=())


ORACLES: dict[str, Any] = {"dpo": pair_loss, "ipo": pair_loss, "kto": kto_loss, "sft": sft_loss, "distill": top_k_loss}


def teacher_rows(
    layout: Layout, samples: Sequence[Sample], max_tokens: int, k: int, vocab_size: int = VOCAB, changes: Options = ()
) -> list[Any]:
    """Every rank: the likeliest tokens of every prediction of all samples."""
    config = tiny_gpt_config(layout=layout, dtype=torch.float64, **dict(changes))
    chunks = [with_edge_head(chunk) for chunk in build_chunks(config, tree_spec, vocab_size=vocab_size)]
    folding = folding_of(layout, max_tokens)
    return [(top.scored, top.teacher) for top in score(chunks, samples, folding, TopLogprobs(k=k))]


def value_rows(layout: Layout, samples: Sequence[Sample], max_tokens: int) -> list[Any]:
    """Every rank: the scalar head's values of all samples."""
    config = tiny_gpt_config(layout=layout, dtype=torch.float64)
    chunks = [with_scalar_head(chunk) for chunk in build_chunks(config, tree_spec, vocab_size=VOCAB)]
    fill(chunks)
    folding = folding_of(layout, max_tokens)
    return [(one.scored, one.values, one.last) for one in score(chunks, samples, folding, Values())]


def stock_values(samples: Sequence[Sample]) -> list[np.ndarray]:
    """One process, stock specs, each sample by itself: ``[n]``, after each token."""
    config = tiny_gpt_config(layout=Layout(), dtype=torch.float64)
    (model,) = build_chunks(config, stock_spec, vocab_size=VOCAB)
    alone = OneByOne(model)
    head = 0.05 * 3**0.5 * uniform("scalar_head.weight", (1, config.hidden_size), (0, 0), seed=0)
    return [(alone.hidden(sample.tokens.tolist()).detach() @ head[0]).numpy() for sample in samples]


def stock_distributions(
    samples: Sequence[Sample], vocab_size: int = VOCAB, changes: Options = ()
) -> list[torch.Tensor]:
    """One process, stock specs, each sample by itself: ``[n - 1, V]``."""
    config = tiny_gpt_config(layout=Layout(), dtype=torch.float64, **dict(changes))
    (model,) = build_chunks(config, stock_spec, vocab_size=vocab_size)
    alone = OneByOne(model)
    return [torch.log_softmax(alone.logits(sample.tokens.tolist())[:-1].detach(), dim=-1) for sample in samples]


def unfolded_step(job: Job, samples: Sequence[Sample], rounded: bool) -> tuple[float, list[Any]]:
    """One process, stock specs, each sample by itself, token by token; ``rounded`` to the weights of bfloat16."""
    samples = job.on(samples)
    settings = dict(job.config)
    config = tiny_gpt_config(layout=Layout(), dtype=job.dtype, **without_losses(settings))
    (model,) = build_chunks(config, stock_spec, vocab_size=job.vocab_size)
    objective: Any = make_objective(job.name, dict(job.options))
    if rounded:
        fill_rounded([model], fill)
    alone = OneByOne(model)
    head = None
    if objective.has_scalar_head:
        head = 0.05 * 3**0.5 * uniform("scalar_head.weight", (1, config.hidden_size), (0, 0), seed=0)
        head = (head.bfloat16() if rounded else head).double().requires_grad_()
        oracle: Any = {"critic": critic_loss, "reward_model": reward_model_loss}[job.name]
        world: Any = ValuesAlone(lambda tokens: alone.hidden(tokens) @ head[0], samples)
    else:
        oracle = ORACLES.get(job.name, policy_loss)
        world = Alone(alone.logits, samples)
        if job.teacher_config:
            of_teacher = tiny_gpt_config(layout=Layout(), dtype=job.dtype, **dict(job.teacher_config))
            (teacher,) = build_chunks(of_teacher, stock_spec, vocab_size=job.vocab_size)
            fill([teacher], seed=TEACHER_SEED)
            oracle = functools.partial(full_loss, teacher=Alone(OneByOne(teacher).logits, samples))
    with in_precision_of(job):
        loss = oracle(objective, world)
    # Megatron's own division is by a reciprocal in fp32, which is no more than a scale that all gradients have.
    added = any(settings.get(name) for name in OFF)
    divisor = torch.tensor(sum(map(len, samples)) if added else objective.targets(samples).divisor)
    (loss * divisor).backward()
    with in_precision_of(job):
        if added:
            alone.add_losses(samples, AddedLosses(model, settings))
        if config.mtp_num_layers:
            alone.add_depths(samples, divisor)
        sums = alone.backward()
    parts = local_parts([model], lambda parameter: sums[parameter] * (1.0 / divisor))
    if head is not None:
        parts = [part for part in parts if part.name != "output_layer.weight"]
        grad = head.grad * (1.0 / divisor)
        parts.append(Piece(name="scalar_head.weight", shape=tuple(grad.shape), offset=(0, 0), data=grad))
    return float(loss.detach()), parts


def fill_rounded(chunks: Sequence[Any], fill: Any) -> None:
    """The weights that a model in bfloat16 has."""
    fill(chunks)
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.copy_(parameter.bfloat16())


@dataclass(eq=False)
class OneByOne:
    """The stock model on one sample after another; formulas are in fp64 for any dtype."""

    model: Any
    runs: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """``[n, V]``."""
        return self._leaf(self._forward(tokens)[0])

    def hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        """``[n, h]``, the output layer's input."""
        seen: list[torch.Tensor] = []
        layer = self.model.output_layer
        hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        self._forward(tokens)
        hook.remove()
        return self._leaf(seen[0][:, 0])

    def _forward(self, tokens: Sequence[int]) -> torch.Tensor:
        return self._run(tokens, torch.zeros(1, len(tokens)))

    def _run(self, tokens: Sequence[int], mask: torch.Tensor) -> torch.Tensor:
        """Return ``[1, n, V]``; ``mask`` ``[1, n]`` is of the depths of multi-token prediction."""
        masks = {"loss_mask": mask} if self.model.config.mtp_num_layers else {}
        output: torch.Tensor = self.model(torch.tensor([tokens]), torch.arange(len(tokens))[None], None, **masks)
        return output

    def add_depths(self, samples: Sequence[Sample], divisor: torch.Tensor) -> None:
        """Add runs with the depths' losses alone: a mean over the scored tokens, which the divisor divides again."""

        scored = sum(np.count_nonzero(sample.loss_mask[1:]) for sample in samples)
        MTPLossAutoScaler.set_loss_scale(divisor.double() / scored)
        for sample in samples:
            output = self._run(sample.tokens.tolist(), torch.tensor(sample.loss_mask[None].astype(np.float64)))
            self._leaf(output).grad = torch.zeros_like(output)

    def add_losses(self, samples: Sequence[Sample], added: AddedLosses) -> None:
        """Add runs with the layers' own losses alone: means over a sample, which count as often as it has tokens."""
        for sample in samples:
            self._forward(sample.tokens.tolist())
            loss = len(sample) * added.take()
            self._leaf(loss).grad = torch.ones_like(loss)

    def _leaf(self, output: torch.Tensor) -> torch.Tensor:
        leaf = output.detach().double().requires_grad_()
        self.runs.append((output, leaf))
        return leaf

    def backward(self) -> dict[torch.Tensor, torch.Tensor]:
        """The model's gradients after the formulas' backward: the sums over the samples, in fp32 or better."""
        wide = functools.partial(torch.promote_types, torch.float32)
        sums = {p: torch.zeros_like(p, dtype=wide(p.dtype)) for p in self.model.parameters()}
        for output, leaf in self.runs:
            if leaf.grad is None:  # it has no loss, for example a mismatched sample of kto
                continue
            output.backward(leaf.grad.to(output.dtype))
            for parameter, total in sums.items():
                if parameter.grad is not None:
                    total += parameter.grad
                    parameter.grad = None
        return sums
