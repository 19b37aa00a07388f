"""The bound of the speed-up by folding: the largest gain from sharing on the machine that ran the unfolded step.

A step has parts, and folding shares each to another degree. No part of the folded step runs faster than at the best
rate that the part had in any unfolded way, so the folded step takes at least

    body / r_body + attention / r_attention + head / r_head + rest

seconds, by the least that each part took unfolded. The ratios r are of work:

- the *body*, everything until the last backward ends that is not one of the others, follows tokens, or with a delta
  rule the larger ratio of tokens and of places in chunks, among which is the padding of the unfolded samples;
- *attention* computes visible pairs, and reads and writes tokens. One measurement does not tell the two apart, so it
  shrinks by the larger of both ratios at most;
- the *head* follows the positions that it projects, see :mod:`mcore_prefix_tree.plan.flops`; if it projects all, its
  loss still reads only scored ones, and the larger of both ratios counts;
- the *rest*, which finishes the gradients after the last backward, does not shrink.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mcore_prefix_tree.plan.flops import Counts, ExpectedSpeedup, ModelWork


class Parts(NamedTuple):
    """A number for each part of a step: its seconds, or a ratio."""

    body: float
    attention: float
    head: float
    rest: float


def work_ratios(work: ModelWork, folded: Counts, unfolded: Counts) -> Parts:
    """Return the largest factor by which each part's seconds of a model can shrink."""
    expected = ExpectedSpeedup(folded=work.of(folded), unfolded=work.of(unfolded))
    body, attention, head = (ratio for ratio, _ in expected.parts.values())
    tokens = unfolded.tokens / folded.tokens if folded.tokens else 1.0
    if work.unused and folded.tokens:
        body = max(tokens, (unfolded.tokens + unfolded.unused) / (folded.tokens + folded.unused))
    scored = unfolded.predictors / folded.predictors if folded.predictors else 1.0
    head = head if work.fused_head else max(head, scored)
    return Parts(body=body, attention=max(attention, tokens), head=head, rest=1.0)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Bound of a measured speed-up: the fastest unfolded step, each part's least unfolded seconds and largest ratio."""

    unfolded_seconds: float
    least: Parts
    ratios: Parts

    @classmethod
    def from_ways(cls, unfolded_seconds: float, ways: Sequence[Parts], ratios: Parts) -> Bound:
        """Make a bound from the seconds of the parts in several unfolded ways, of which each part's least counts."""
        return cls(unfolded_seconds=unfolded_seconds, least=Parts(*map(min, zip(*ways, strict=True))), ratios=ratios)

    @property
    def folded_parts(self) -> Parts:
        """Seconds that each part takes folded at least."""
        return Parts(*(seconds / ratio for seconds, ratio in zip(self.least, self.ratios, strict=True)))

    @property
    def ratio(self) -> float:
        """The bound: the unfolded step's seconds over the folded step's least."""
        return self.unfolded_seconds / sum(self.folded_parts)

    @property
    def parts(self) -> dict[str, tuple[float, float]]:
        """Ratio of each part, and its share of the folded step's least seconds."""
        whole = sum(self.folded_parts)
        return {
            name: (ratio, seconds / whole)
            for name, ratio, seconds in zip(Parts._fields, self.ratios, self.folded_parts, strict=True)
        }
