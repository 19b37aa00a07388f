"""A folded step of an objective equals the same formulas on each sample alone through the stock model, in every layout.

The oracles of the formulas are those of the objectives' own unit tests, over the stock model's log-probabilities.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folded_jobs import VOCAB, branching_samples, stock_spec, tree_spec

from mcore_prefix_tree import Sample
from mcore_prefix_tree.layout import Padding
from mcore_prefix_tree.signals import Signals
from mcore_prefix_tree.testing.launcher import Layout, world
from mcore_prefix_tree.testing.weights import assemble

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from objective_oracles import Alone, policy_loss
from test_objectives_preference import pair_loss

FP64 = 1e-12
GRPO = ("grpo", (("kl_coef", 0.05), ("entropy_coef", 0.01), ("clip_eps_low", 0.05), ("clip_eps_high", 0.05)))
DPO = ("dpo", ())
GSPO = ("gspo", ())
OBJECTIVES = [pytest.param(GRPO, id="grpo"), pytest.param(DPO, id="dpo")]

Named = tuple[str, tuple[tuple[str, Any], ...]]


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
            pair=index // 2,
            chosen=bool(index % 2),
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
    return samples


SAMPLES = make_samples()
LONGEST = max(map(len, SAMPLES))
PAIR = max(
    len({sample.tokens[: t + 1].tobytes() for sample in SAMPLES[i : i + 2] for t in range(len(sample))})
    for i in range(0, len(SAMPLES), 2)
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    loss: float
    metrics: dict[str, float]
    micro_batches: int
    samples_here: int


def folded_step(
    layout: Layout, named: Named, samples: Sequence[Sample], max_tokens: int, fused_head: bool
) -> tuple[Outcome, list[Any]]:
    """Every rank: the trainer's own planning and forward step, and its part of the gradients."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from mcore_prefix_tree.mcore.folding import Folding
    from mcore_prefix_tree.mcore.forward_step import objective_forward_step
    from mcore_prefix_tree.mcore.output_layer import with_edge_head
    from mcore_prefix_tree.mcore.train.objective import grouped_by, output_of, watches_entropy
    from mcore_prefix_tree.objectives import add_means, divided, make_objective, together
    from mcore_prefix_tree.testing.models import Trainer, build_chunks, tiny_gpt_config
    from mcore_prefix_tree.testing.weights import local_parts

    config = tiny_gpt_config(layout=layout, dtype=torch.float64)
    chunks = build_chunks(config, tree_spec, vocab_size=VOCAB)
    if fused_head:
        chunks = [with_edge_head(chunk) for chunk in chunks]
    trainer = Trainer.of(chunks)
    objective = make_objective(named[0], dict(named[1]))
    folding = Folding(
        max_tokens=max_tokens,
        dp_size=parallel_state.get_data_parallel_world_size(),
        cost_model=None,
        device=torch.device("cpu"),
        padding=Padding(multiple=layout.tp if layout.sequence_parallel else 1),
        output=output_of(objective, fused_head=fused_head),
        only_supervised=fused_head,
    )
    kept = together(samples) if grouped_by(objective) == "pair" else None
    mine = folding.plan(samples, together=kept).micro_batches[parallel_state.get_data_parallel_rank()]
    targets = objective.targets(samples)
    batches = []
    for indices in mine:
        batch = folding.micro_batch([samples[index] for index in indices])
        batches.append(replace(batch, rows=targets.rows(batch.layout, indices)))
    step = functools.partial(objective_forward_step, objective=objective, with_entropy=watches_entropy(objective))
    reported = trainer.backward(step, batches, seq_length=1)
    parts: list[Any] = [None] * dist.get_world_size()
    speaks = bool(reported) and parallel_state.get_tensor_model_parallel_rank() == 0
    own = (
        sum(float(entry["loss_sum"]) for entry in reported),
        sum(int(entry["num_tokens"]) for entry in reported),
        add_means(entry["metrics"] for entry in reported),
    )
    dist.all_gather_object(parts, own if speaks else (0.0, 0, {}))
    assert sum(count for _, count, _ in parts) == targets.divisor
    outcome = Outcome(
        loss=sum(loss for loss, _, _ in parts) / targets.divisor,
        metrics=divided(add_means(metrics for _, _, metrics in parts)),
        micro_batches=len(batches),
        samples_here=sum(map(len, mine)),
    )
    return outcome, local_parts(trainer.chunks, lambda parameter: parameter.main_grad)


def unfolded_step(named: Named, samples: Sequence[Sample]) -> tuple[float, list[Any]]:
    """One process, stock specs, each sample alone, the formulas token by token."""
    from mcore_prefix_tree.objectives import make_objective
    from mcore_prefix_tree.testing.models import build_chunks, tiny_gpt_config
    from mcore_prefix_tree.testing.weights import local_parts

    config = tiny_gpt_config(layout=Layout(), dtype=torch.float64)
    (model,) = build_chunks(config, stock_spec, vocab_size=VOCAB)
    objective = make_objective(named[0], dict(named[1]))
    oracle: Any = pair_loss if named[0] == "dpo" else policy_loss

    def logits_of(tokens: Sequence[int]) -> torch.Tensor:
        return model(torch.tensor([tokens]), torch.arange(len(tokens))[None], None)[0]

    loss = oracle(objective, Alone(logits_of, samples))
    divisor = torch.tensor(objective.targets(samples).divisor)
    (loss * divisor).backward()
    # Megatron's own division is by a reciprocal in fp32, which is no more than a scale that all gradients have.
    return float(loss.detach()), local_parts([model], lambda parameter: parameter.grad * (1.0 / divisor))


@functools.cache
def expected(named: Named, count: int) -> tuple[float, Mapping[str, torch.Tensor]]:
    ((loss, parts),) = world(1).run(unfolded_step, named, SAMPLES[:count], layout=Layout())
    return loss, assemble(parts)


def check(
    size: int,
    layout: Layout,
    named: Named,
    *,
    max_tokens: int,
    fused_head: bool = True,
    order: Sequence[int] = range(len(SAMPLES)),
) -> list[Outcome]:
    samples = [SAMPLES[index] for index in order]
    results = world(size).run(folded_step, layout, named, samples, max_tokens, fused_head, layout=layout)
    outcomes = [outcome for outcome, _ in results]
    loss, gradients = expected(named, len(samples))
    for outcome in outcomes:
        assert outcome.loss == pytest.approx(loss, rel=FP64)
    folded = assemble(itertools.chain.from_iterable(parts for _, parts in results))
    assert folded.keys() == gradients.keys()
    for name, tensor in gradients.items():
        error = torch.linalg.vector_norm(folded[name] - tensor) / torch.linalg.vector_norm(tensor)
        assert error <= FP64, f"{name}: {error:.2e}"
    return outcomes


def test_the_batch_is_a_hard_one() -> None:
    assert PAIR < 2 * LONGEST
    assert sum(len(sample) for sample in SAMPLES) > 3 * LONGEST
    assert len({sample.signals.group for sample in SAMPLES}) >= 3


@pytest.mark.parametrize("named", [*OBJECTIVES, pytest.param(GSPO, id="gspo")])
@pytest.mark.parametrize(
    ("size", "layout"),
    [
        pytest.param(1, Layout(), id="single"),
        pytest.param(2, Layout(tp=2), id="tp2"),
        pytest.param(2, Layout(tp=2, sequence_parallel=True), id="tp2-sp"),
        pytest.param(2, Layout(pp=2), id="pp2"),
        pytest.param(2, Layout(), id="dp2"),
    ],
)
def test_every_layout(size: int, layout: Layout, named: Named) -> None:
    outcomes = check(size, layout, named, max_tokens=max(LONGEST, PAIR) + 10)
    assert outcomes[0].micro_batches > 1
    if size == 2 and layout == Layout():
        assert outcomes[0].samples_here != outcomes[1].samples_here, "unequal ranks"


@pytest.mark.parametrize("named", OBJECTIVES)
def test_the_cut_and_the_order_change_neither_gradient_nor_metrics(named: Named) -> None:
    order = torch.randperm(len(SAMPLES), generator=torch.Generator().manual_seed(0)).tolist()
    narrow, wide, shuffled, unfused = (
        check(size, Layout(), named, max_tokens=max_tokens, fused_head=fused, order=own)[0]
        for size, max_tokens, fused, own in (
            (1, max(LONGEST, PAIR), True, range(len(SAMPLES))),
            (1, 10_000, True, range(len(SAMPLES))),
            (2, 2 * LONGEST, True, order),
            (1, 2 * LONGEST, False, range(len(SAMPLES))),
        )
    )
    assert narrow.micro_batches > wide.micro_batches == 1
    for other in (wide, shuffled, unfused):
        assert other.metrics == pytest.approx(narrow.metrics, rel=1e-10)
    watched = {"ratio", "clip_fraction", "kl", "kl_old", "entropy"} if named is GRPO else {"accuracy", "margin"}
    assert watched <= narrow.metrics.keys()
    if named is GRPO:
        assert 0 < narrow.metrics["clip_fraction"] < 1, "or this test is too easy"


@pytest.mark.parametrize("named", [DPO, ("grpo", (("advantage", "reward"),))], ids=["dpo", "policy"])
def test_a_rank_without_samples(named: Named) -> None:
    """Two replicas, and one pair or one sample: the other computes padding."""
    outcomes = check(2, Layout(), named, max_tokens=10_000, order=range(2 if named == DPO else 1))
    assert min(outcome.samples_here for outcome in outcomes) == 0
