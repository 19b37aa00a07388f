"""Part ``parity``: the worst row of each kernel's results against the fp64 reference, on the forest of the check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from attention_bench.contestants import ALWAYS_DETERMINISTIC

from gpu_check_parts.context import Context
from gpu_check_parts.results import FAILED
from gpu_check_parts.using import gpu_case, packages_of, sources_of, unchecked
from mcore_prefix_tree.attention import Case, fa4, parity, triton_tree
from mcore_prefix_tree.attention.api import load_backend
from mcore_prefix_tree.attention.chosen_keys import choose_keys, path_mask, score_by_kernel
from mcore_prefix_tree.attention.parity import Attention, error_limit, worst_rows
from mcore_prefix_tree.utils.triton_here import worst_row

# heads, key heads, head_dim, value_dim
PLAIN, SMALL, LATENT = (16, 2, 128, 128), (8, 2, 64, 64), (4, 4, 192, 128)
TINY = (2, 2, 16, 16)
WINDOW = 100
# dims, window, whether there are sinks
KINDS = (
    (PLAIN, None, False),
    (SMALL, None, False),
    (LATENT, None, False),
    (PLAIN, None, True),
    (PLAIN, WINDOW, False),
)
# Heads of an indexer, their size, whether products below 0 count as 0, and the dtype: DeepSeek-V3.2's and GLM-5's.
INDEXERS = ((64, 128, True, torch.bfloat16), (32, 128, False, torch.bfloat16))
TINY_INDEXERS = ((2, 16, False, torch.float16),)
TOPK = 100
INDEX_LIMIT = 1e-5
# Queries with two scores that differ by rounding where the choice ends.
ROWS_NEAR_TIES = 0.01
CHOSEN_KEYS = "mcore_prefix_tree/attention/chosen_keys"


@dataclass(frozen=True, kw_only=True)
class Question:
    """One kind of call."""

    dims: tuple[int, int, int, int]
    deterministic: bool
    window: int | None = None
    has_sinks: bool = False

    @property
    def workload(self) -> str:
        heads, kv_heads, head_dim, value_dim = self.dims
        more = f"{', window' if self.window else ''}{', sinks' if self.has_sinks else ''}"
        return f"{head_dim}/{value_dim}, {heads} heads on {kv_heads}{more}"

    @property
    def case(self) -> Case:
        sinks = torch.zeros(self.dims[0], device="cuda") if self.has_sinks else None
        return gpu_case(self.dims, torch.bfloat16, window=self.window, sinks=sinks, deterministic=self.deterministic)


def questions(*, smoke: bool) -> Iterator[Question]:
    """Yield the kinds of calls; the most common first, both modes of one kind before the next kind."""
    kinds = ((TINY, None, False), (TINY, WINDOW, True)) if smoke else KINDS
    for dims, window, has_sinks in kinds:
        for deterministic in (True, False):
            yield Question(dims=dims, deterministic=deterministic, window=window, has_sinks=has_sinks)


def methods(case: Case) -> Iterator[tuple[str, Attention, str | None]]:
    """Yield name, unchecked attention and refusal of each method."""
    for name in ("triton", "fa4"):
        yield name, unchecked(name), load_backend(name).refusal(case)
        module = {"triton": triton_tree, "fa4": fa4}[name]
        if case.heads > case.kv_heads and (name == "triton" or fa4._borrows_backward(case)):
            # The forest is so small that groups of heads are split; a longer forest does not split them.
            yield f"{name}, whole groups", module._attend_whole_groups, module.refusal(case)


def run(context: Context) -> None:
    """Compare every method with the reference, one kind of call after another."""
    refused: set[tuple[str, str]] = set()
    for question in questions(smoke=context.options.smoke):
        case, mode = question.case, "deterministic" if question.deterministic else "any order"
        for name, attention, refusal in methods(case):
            key = context.key(question.workload, name, mode)
            used = context.used(*packages_of(name), sources=sources_of(name))
            only_once = not question.deterministic and name.startswith(ALWAYS_DETERMINISTIC)
            if only_once or context.is_done(key, used):
                continue
            if refusal is not None:
                # One row for all methods that need a missing package.
                if (name, refusal) not in refused:
                    context.leave_out(key, used, refusal)
                refused.add((name, refusal))
                continue
            context.measure(key, used, partial(_compared, attention, case))
    for heads, dim, relu, dtype in TINY_INDEXERS if context.options.smoke else INDEXERS:
        key = context.key(f"indexer, {heads} heads of {dim}{', ReLU' if relu else ''}", "triton")
        used = context.used("torch", "triton", sources=(CHOSEN_KEYS,))
        if not context.is_done(key, used):
            context.measure(key, used, partial(_chosen, heads, dim, dtype, relu=relu))


def _chosen(heads: int, dim: int, dtype: torch.dtype, *, relu: bool) -> dict[str, Any] | str:
    """Compare an indexer's scores, and the keys that they choose, with those of torch in fp64."""
    device = torch.device("cuda", torch.cuda.current_device())
    metadata = parity._forest(device)
    size, generator = metadata.padded_size, torch.Generator().manual_seed(0)
    query, key, weight = (
        torch.randn(*shape, generator=generator).to(device, dtype)
        for shape in ((size, heads, dim), (size, dim), (size, heads))
    )
    score = score_by_kernel(query, key, weight, metadata, relu=relu)
    if score is None:
        return "the kernel does not run on this GPU"
    products = torch.einsum("bhe,ne->bhn", query.double(), key.double())
    every = torch.arange(size, device=device)
    exact = ((products.relu() if relu else products) * weight.double().unsqueeze(-1)).sum(1)
    exact.masked_fill_(~path_mask(metadata, slice(0, size), every), -torch.inf)
    found, seen = score(slice(0, size), every), exact > -torch.inf
    wrong = [] if torch.equal(found > -torch.inf, seen) else ["other keys are seen than the tree's"]
    # The first tokens of a path have one score, which may be next to nothing.
    worst = worst_row(found.masked_fill(~seen, 0), exact.masked_fill(~seen, 0), may_vanish=True)
    chosen, best = (
        choose_keys(one, metadata, TOPK, 1).sort().values for one in (score, lambda rows, keys: exact[rows, keys])
    )
    others = float((chosen != best).any(dim=-1).double().mean())
    if not worst <= INDEX_LIMIT:  # NaN is not
        wrong.append(f"scores are off by {worst:.1e} of a row, and {INDEX_LIMIT:.0e} is rounding of fp32")
    if others > ROWS_NEAR_TIES:
        wrong.append(f"{others:.1%} of the queries have other keys")
    shown = f"scores {worst:.0e}, {others:.1%} of the queries have other keys"
    result: dict[str, Any] = {"errors": {"scores": f"{worst:.3e}", "rows": f"{others:.3e}"}, "shown": shown}
    return result | ({FAILED: "; ".join(wrong)} if wrong else {})


def _compared(attention: Attention, case: Case) -> dict[str, Any]:
    errors = worst_rows(attention, parity.Question.of(case))
    wrong = [
        f"{what} is off by {error:.1e} of a row, and {error_limit(what, case.dtype):.1e} is rounding"
        for what, error in errors.items()
        if not error <= error_limit(what, case.dtype)  # NaN is not
    ]
    shown = ", ".join(f"{what} {error:.0e}" for what, error in errors.items())
    # JSON has no NaN.
    found: dict[str, Any] = {"errors": {what: f"{error:.3e}" for what, error in errors.items()}, "shown": shown}
    return found | ({FAILED: "; ".join(wrong)} if wrong else {})
