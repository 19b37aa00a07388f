"""The rule of Gated DeltaNet on each segment's whole path, to compare what runs level by level with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule

from harness.carried_trees import carried
from harness.in_double import error_of
from harness.seam_models import deep_samples
from mcore_prefix_tree import TreeMetadata, fold
from mcore_prefix_tree.mcore.seam.delta_levels import follow_levels
from mcore_prefix_tree.mcore.seam.levels import Levels

NAMES = ("q", "k", "v", "g", "beta", "given")
# Of levels, given states, queries, keys, values, decays and betas: the output, and the states that the levels keep.
Rule = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def deep_forest() -> TreeMetadata:
    """Two trees that branch at five levels, with segments of one token, ends around chunks of 64, and duplicates."""
    return TreeMetadata.from_layout(fold(deep_samples(13), padded_size=600))


def parts_of_a_tree(*cuts: int) -> list[TreeMetadata]:
    """A deep tree cut at some places: most parts read states of others, and leave some to others."""
    samples = [one for one in deep_samples(13) if one.tokens[0] == deep_samples(13)[0].tokens[0]]
    cuts = (*cuts, fold(samples).physical_tokens - 5)
    batches = carried(samples, cuts, multiple=16)
    return [found for batch in batches if (found := batch.packed_seq_params.tree_metadata) is not None]


def make_inputs(levels: Levels, dtype: torch.dtype, heads: int = 2) -> list[torch.Tensor]:
    """Queries, keys, values, decays and betas ``[1, P, H, ...]`` and given states, which all need gradients."""
    generator = torch.Generator().manual_seed(levels.given)
    size, key, value = len(levels.order), 8, 12

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, keys = (F.normalize(draw(1, size, heads, key), dim=-1) for _ in range(2))
    inputs = [
        query,
        keys,
        draw(1, size, heads, value),
        -draw(1, size, heads).square() / 9,
        draw(1, size, heads).sigmoid(),
    ]
    return [one.to(dtype).requires_grad_() for one in [*inputs, draw(levels.given, heads, key, value)]]


def on_each_path(levels: Levels, given: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run upstream's rule in torch on every segment's path, from its given state or from zeros."""
    out, states, segment = [], [], 0
    borders = levels.cu_lens.tolist()
    for level in levels.levels:
        for at in range(len(level.lens)):
            start, end = borders[segment], borders[segment + 1]
            path, token = [], end - 1
            while token < len(levels.above):
                path.append(token)
                token = int(levels.above[token])
            state = token - len(levels.above) - 1
            query, key, value, decay, beta = (one[:, path[::-1]] for one in inputs)
            mixed, last = torch_chunk_gated_delta_rule(
                query,
                key,
                value,
                g=decay,
                beta=beta,
                initial_state=None if state < 0 else given[state : state + 1],
                output_final_state=True,
            )
            out.append(mixed[:, start - end :])
            states += [last] * (at < level.kept)
            segment += 1
    return torch.cat(out, dim=1), torch.cat([inputs[2].new_empty(0, *given.shape[1:]), *states])


def level_by_level(levels: Levels, given: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the package's rule with FLA's functions."""
    read = [F.pad(given, (0, 0) * 3 + (0, 1))] if levels.given else []
    out, states = follow_levels(levels, read, *inputs)
    return out, torch.cat(states)[levels.given + 1 if levels.given else 0 :]


def run(
    rule: Rule, levels: Levels, inputs: Sequence[torch.Tensor], *, reads_out: bool = True
) -> dict[str, torch.Tensor]:
    """The output, the states, and every gradient of a sum of both, or of the states only."""
    *of_tokens, given = inputs
    out, kept = rule(levels, given, *of_tokens)
    generator = torch.Generator().manual_seed(1)
    read = [one for one, is_read in ((out, reads_out), (kept, len(kept) > 0)) if is_read]
    weights = [torch.randn(one.shape, generator=generator, dtype=torch.float64).to(one.dtype) for one in read]
    gradients = torch.autograd.grad(read, inputs, weights, allow_unused=True, materialize_grads=True)
    return {"out": out.detach(), "states": kept.detach(), **dict(zip(NAMES, gradients, strict=True))}


def worst_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference, as a share of the tensor's largest entry."""
    assert found.keys() == expected.keys()
    return max(error_of(found[name], one) for name, one in expected.items() if one.numel())
