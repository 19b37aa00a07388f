"""The bound by parts, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_prefix_tree.layout import fold
from mcore_prefix_tree.plan import Bound, Counts, ModelWork, Parts, work_ratios
from mcore_prefix_tree.plan.model_shape import most_unused
from mcore_prefix_tree.sample import Sample

SECONDS = Parts(body=6.0, attention=4.0, head=3.0, rest=0.5)
RATIOS = Parts(body=6.0, attention=2.0, head=1.5, rest=1.0)


def test_the_bound_by_hand() -> None:
    bound = Bound.from_ways(13.5, [SECONDS], RATIOS)
    assert bound.folded_parts == (1.0, 2.0, 2.0, 0.5)
    assert bound.ratio == 13.5 / 5.5
    assert bound.parts == {
        "body": (6.0, 1 / 5.5),
        "attention": (2.0, 2 / 5.5),
        "head": (1.5, 2 / 5.5),
        "rest": (1.0, 0.5 / 5.5),
    }


def test_each_part_counts_at_its_least_unfolded() -> None:
    """A part that is slower in one way does not lower the bound; neither does a way that is slower in total."""
    other = Parts(body=7.0, attention=3.0, head=9.0, rest=0.1)
    bound = Bound.from_ways(13.5, [SECONDS, other], RATIOS)
    assert bound.least == (6.0, 3.0, 3.0, 0.1)
    assert bound.ratio == 13.5 / (1.0 + 1.5 + 2.0 + 0.1) > Bound.from_ways(13.5, [SECONDS], RATIOS).ratio


def test_unfoldable_work_bounds_the_ratio() -> None:
    bound = Bound.from_ways(13.5, [SECONDS], Parts(body=1e9, attention=1e9, head=1e9, rest=1.0))
    assert bound.ratio == pytest.approx(13.5 / SECONDS.rest)
    assert Bound.from_ways(13.5, [SECONDS], Parts(1.0, 1.0, 1.0, 1.0)).ratio == 1


@pytest.mark.parametrize("fused_head", [True, False])
def test_the_ratios_are_those_of_work(fused_head: bool) -> None:
    """Two turns of one conversation: 6 + 9 tokens in 9, 21 + 45 pairs in 45; they score a token in common, and more."""
    first, second = [0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1, 1]
    samples = [Sample(tokens=list(range(len(mask))), loss_mask=mask) for mask in (first, second)]
    layouts = [fold(samples)]
    work = ModelWork.from_dimensions(
        num_layers=1, hidden_size=8, ffn_hidden_size=8, num_attention_heads=2, vocab_size=64, fused_head=fused_head
    )
    ratios = work_ratios(work, Counts.folded(layouts), Counts.unfolded(layouts))
    # A delta rule: 2 chunks of 64 in 1. Were it the whole body, it would shrink by as much.
    rule = ModelWork.from_dimensions(
        num_layers=1, hidden_size=8, ffn_hidden_size=8, num_attention_heads=2, vocab_size=64, pattern="G"
    )
    assert 15 / 9 < rule.expected_speedup(layouts).parts["body"][0] < 2
    assert work_ratios(rule, Counts.folded(layouts), Counts.unfolded(layouts)).body == 2
    # In torch, samples of 3 and 4 chunks run as two of 4, next to those of 2 and of 5.
    assert most_unused(np.array([129, 250, 128, 257])) == 64 * (4 + 4 + 2 + 5) - (129 + 250 + 128 + 257)
    # Attention reads and writes tokens too, so it shrinks by the tokens' ratio if that is larger.
    assert 66 / 45 < 15 / 9
    assert ratios == Parts(body=15 / 9, attention=15 / 9, head=9 / 6 if fused_head else 15 / 9, rest=1.0)
    longer = [Sample(tokens=[*range(20), 30 + n], loss_mask=[0] * 20 + [1]) for n in range(3)]
    layouts = [fold([*longer, Sample(tokens=[40, 41])])]
    counts = Counts.folded(layouts), Counts.unfolded(layouts)
    ratios = work_ratios(work, *counts)
    assert ratios.attention == max(counts[1].pairs / counts[0].pairs, counts[1].tokens / counts[0].tokens)
