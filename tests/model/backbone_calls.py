"""Calls of Transformers models that fold in their backbone, against each row by itself; rows may have pictures."""

from __future__ import annotations

import torch
from harness.oracles import worst
from harness.transformers_models import InDouble, gradients

PAD, PICTURE = 0, 90
PIXELS = torch.randn(2, 24, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
# Pictures as grid and pixels: two of one grid, the pixels of the first in another grid, or with another second half.
PICTURES = {
    "a": ([1, 4, 4], PIXELS[0, :16]),
    "b": ([1, 4, 4], PIXELS[1, :16]),
    "c": ([1, 2, 8], PIXELS[0, :16]),
    "d": ([1, 4, 4], torch.cat([PIXELS[0, :8], PIXELS[1, :8]])),
    "e": ([1, 4, 6], PIXELS[0]),
}


def places_of(row):
    """Its tokens, as pairs of an id or the name of a picture, and the place in it."""
    sizes = [len(PICTURES[part][1]) // 4 if isinstance(part, str) else 1 for part in row]
    return [(part, place) for part, size in zip(row, sizes, strict=True) for place in range(size)]


def tokens_of(row):
    return [PICTURE if isinstance(part, str) else part for part, _ in places_of(row)]


def names_of(rows):
    return [part for row in rows for part in row if isinstance(part, str)]


def unique_tokens(rows):
    """Number of different paths."""
    return len({tuple(row[: end + 1]) for row in map(places_of, rows) for end in range(len(row))})


def pictures_of(rows, ids):
    """The arguments of a call that hold the pictures of rows, in their order."""
    if not names_of(rows):
        return {}
    grids, pixels = zip(*(PICTURES[name] for name in names_of(rows)), strict=True)
    call = {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}
    return call | {"mm_token_type_ids": (ids == PICTURE).int()}


def padded(rows, side="right", extra=0):
    """Padded rows as a call, and the columns of each row's tokens."""
    tokens = [torch.tensor(tokens_of(row), dtype=torch.long) for row in rows]
    width = max([1, *map(len, tokens)]) + extra
    columns = [slice(width - len(row), width) if side == "left" else slice(0, len(row)) for row in tokens]
    ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.long)
    for at, (row, places) in enumerate(zip(tokens, columns, strict=True)):
        ids[at, places], mask[at, places] = row, 1
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False} | pictures_of(rows, ids), columns


def rows_of_padded(model, rows, **layout):
    call, columns = padded(rows, **layout)
    logits = model(**call).logits
    return [logits[at, places] for at, places in enumerate(columns) if rows[at]]


def left_padded(model, rows):
    return rows_of_padded(model, rows, side="left", extra=2)


def loss_of(logits):
    """A loss that weighs every token of every row differently."""
    rng = torch.Generator().manual_seed(0)
    return sum(
        (row.log_softmax(-1) * torch.randn(row.shape, generator=rng, dtype=torch.float64)).sum() for row in logits
    )


def assert_exact(stock, folds, rows, call=rows_of_padded, *, folded=True):
    """Compare logits, all gradients, and what was computed: different pictures and paths, once each."""
    folds.folding.report(with_grad=True)
    towers, visual = [], getattr(folds.base_model, "visual", torch.nn.Identity())
    hook = visual.register_forward_hook(
        lambda tower, args, kwargs, output: towers.append(len(kwargs["grid_thw"])), with_kwargs=True
    )
    with InDouble():
        expected = [rows_of_padded(stock, [row])[0] for row in rows if row]
        actual = call(folds, rows)
        assert max(worst(one, other) for one, other in zip(actual, expected, strict=True)) < 1e-12
        wanted, found = gradients(stock, loss_of(expected)), gradients(folds, loss_of(actual))
    hook.remove()
    assert wanted.keys() == found.keys()
    # In rows of one token, queries and keys have a gradient of rounding only: compare with that of the layer's values.
    floor = 1e-3 * max(grad.norm() for grad in wanted.values())
    for name, grad in wanted.items():
        assert (found[name] - grad).norm() < 1e-12 * max(grad.norm(), floor), name
    names = names_of(rows)
    assert towers == ([len(set(names)) if folded else len(names)] if names else [])
    report = folds.folding.report(with_grad=True)
    assert (report.calls, report.left_alone) == (1, not folded)
    assert report.logical_tokens == sum(len(tokens_of(row)) for row in rows)
    assert report.unique_tokens == unique_tokens(rows)


def assert_recomputation_changes_nothing(folds, *batches, reentrant):
    def all_of_them():  # calls go forward before any goes back
        return gradients(folds, sum(loss_of(rows_of_padded(folds, rows)) for rows in batches))

    kept = all_of_them()
    folds.gradient_checkpointing_enable({"use_reentrant": reentrant})
    recomputed = all_of_them()
    assert kept.keys() == recomputed.keys()
    assert max(worst(recomputed[name], kept[name]) for name in kept) < 1e-12
