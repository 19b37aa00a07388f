"""Choice of a back-end for a run that names none: the fastest measured on a similar tree, chosen once.

``auto`` is a setting of a job, never of a call: it becomes the name of a back-end before the first micro-batch is
folded, and micro-batches carry that name. So a run cannot change its back-end.

The measurements are in ``costs.json``, written by ``scripts/render_results.py`` from the attention benchmarks under
``benchmarks/results``. Without a measurement, :data:`PREFERENCE` decides. A back-end whose kernels are wrong on this
machine, or do not run, is skipped. The printed reason names both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from mcore_prefix_tree.attention.api import load_backend
from mcore_prefix_tree.attention.backend_options import Case
from mcore_prefix_tree.attention.spans import cut_into_spans
from mcore_prefix_tree.attention.tile_blocks import visible_pairs
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.utils.triton_here import ParityError

# By kind of device, for cases without a measurement: the order measured on an H200. FlashAttention-4 is a package that
# a user has to install.
PREFERENCE = {"cuda": ("fa4", "triton", "flex", "path"), "cpu": ("path", "cascade")}


@dataclass(frozen=True, kw_only=True)
class TreeShape:
    """Figures of a forest that determine the speed of a back-end."""

    tokens: int
    segments: int  # number of non-empty runs of tokens without branching
    pairs: int
    # Largest number of nested branches with tokens outside their first child; 0 without branches: nothing is shared, or
    # each sample continues the one before.
    depth: int

    @classmethod
    def of(cls, forests: Sequence[TreeMetadata]) -> TreeShape:
        """Return the shape of all micro-batches of a step together; raises ValueError if they have no token."""
        spans = [cut_into_spans(forest) for forest in forests]
        tokens = sum(forest.num_tokens for forest in forests)
        if not tokens:
            raise ValueError("cannot compute the shape of an empty forest")
        return cls(
            tokens=tokens,
            segments=sum(len(one.runs) - 1 for one in spans) + sum(len(one.keys) for one in spans),
            pairs=sum(visible_pairs(forest) for forest in forests),
            depth=max(int(one.depth.max(initial=-1)) + 1 for one in spans),
        )

    def distance(self, other: TreeShape) -> float:
        """Return the distance between two shapes in tokens per segment, keys per token and depth, in powers of two."""
        ratios = (
            self.tokens / self.segments / (other.tokens / other.segments),
            self.pairs / self.tokens / (other.pairs / other.tokens),
            (1 + self.depth) / (1 + other.depth),
        )
        return sum(abs(math.log2(ratio)) for ratio in ratios)


class Choice(NamedTuple):
    """Name of a back-end and the reason for choosing it, for a log."""

    backend: str
    reason: str


def choose(case: Case, shape: TreeShape, *, device_name: str | None = None) -> Choice:
    """Choose the back-end for a run, among those that train it, so that validation runs the same one.

    ``shape`` is that of the first step, the same on every rank; measurements of GPUs with another name do not count.

    Raises:
        ValueError: no back-end supports the case; the message gives each one's reason.
    """
    trains = replace(case, needs_grad=True)
    refusals = {name: load_backend(name).refusal(trains) for name in PREFERENCE[case.device.type]}
    reasons = _in_order(case, shape, [name for name, refusal in refusals.items() if refusal is None], device_name)
    wrong: dict[str, str] = {}
    for name, reason in reasons.items():
        try:
            load_backend(name).check(trains)
        except ParityError as error:
            wrong[name] = str(error)
            continue
        return Choice(backend=name, reason="; skipped: ".join([reason, *wrong.values()]))
    found = "; ".join(f"{name}: {why}" for name, why in (refusals | wrong).items())
    raise ValueError(
        f"attention backend 'auto' finds none that supports this run ({found}); name 'reference', which does, in "
        "memory that grows with the square of the tokens"
    )


def _in_order(case: Case, shape: TreeShape, able: Sequence[str], device_name: str | None) -> dict[str, str]:
    """Back-ends from the best to the last, each with the reason to take it before those behind it."""
    what = case.device.type if device_name is None else device_name
    reasons: dict[str, str] = {}
    wanted = (what, str(case.dtype).removeprefix("torch."), case.options.deterministic)
    same = [row for row in cost_table() if (row["device"], row["dtype"], row["deterministic"]) == wanted]
    measured = [row for row in same if any(name in row["seconds"] for name in able)]
    if measured:
        row = min(measured, key=lambda row: _distance(row, case, shape))
        seconds = sorted((row["seconds"][name], name) for name in able if name in row["seconds"])
        times = ", ".join(f"{name} {value * 1e3:.3g} ms" for value, name in seconds)
        reason = f"fastest on the measured shape nearest to this one ({row['name']}: {times})"
        reasons |= {name: reason for _, name in seconds if name not in reasons}
    unmeasured = f"first in order of preference; {what}, {case.dtype}: not yet measured"
    return reasons | {name: unmeasured for name in able if name not in reasons}


def _distance(row: dict[str, Any], case: Case, shape: TreeShape) -> float:
    return TreeShape(**row["shape"]).distance(shape) + abs(math.log2(row["head_dim"] / case.head_dim))


@cache
def cost_table() -> list[dict[str, Any]]:
    """The measured rows: device, machine, dtype, head_dim, mode, name and shape of the forest, seconds by back-end."""
    rows: list[dict[str, Any]] = json.loads(files(__package__).joinpath("costs.json").read_text())["rows"]
    return rows
