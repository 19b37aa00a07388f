"""Results of a run over samples, and the relative errors of one run's results against another's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mcore_prefix_tree.mcore.ranks import everyone
from mcore_prefix_tree.sample import Sample

# Rows of one sample by name: log-probabilities and entropies, or values.
Rows = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """Results of one run: rows by sample index (of all ranks), the summed loss, and this rank's gradients by name."""

    rows: dict[int, Rows]
    loss: float
    gradients: dict[str, torch.Tensor]


def compare_outcomes(run: Outcome, reference: Outcome, *, least: float = 0.0) -> tuple[dict[str, float], str, int]:
    """Return the errors by name, the worst parameter over all ranks, and the number of tensors compared.

    A gradient counts as no smaller than ``least`` of the norm of all gradients of its rank.
    """
    smallest = least * math.hypot(*(float(gradient.double().norm()) for gradient in reference.gradients.values()))
    by_parameter = [
        (_relative_error(run.gradients[name].double(), gradient.double(), smallest), name)
        for name, gradient in reference.gradients.items()
    ]
    of_all = everyone((max(by_parameter, default=(0.0, "none"), key=_nan_first), len(by_parameter)))
    worst = max(range(len(of_all)), key=lambda rank: _nan_first(of_all[rank][0]))
    gradient_error, name = of_all[worst][0]
    errors = _worst_rows(run.rows, reference.rows) | {
        "loss_error": _relative_error(_scalar(run.loss), _scalar(reference.loss)),
        "gradient_error": gradient_error,
    }
    return errors, f"{name} (rank {worst})", sum(count for _, count in of_all)


def measure_rounding(
    run: Outcome, reference: Outcome, samples: Sequence[Sample], *, least: float = 0.0
) -> dict[str, float]:
    """Return the errors of an unfolded run in bfloat16 or float32, whose loss is summed in float32, as measures."""
    errors, _, _ = compare_outcomes(run, reference, least=least)
    off = [
        _sample_loss(run.rows[index], sample) - _sample_loss(reference.rows[index], sample)
        for index, sample in enumerate(samples)
    ]
    of_samples = float(np.abs(off).sum()) / (abs(reference.loss) or 1.0)
    return errors | {"loss_error": of_samples + torch.finfo(torch.float32).eps}


def _sample_loss(rows: Rows, sample: Sample) -> float:
    """Return one sample's part of the loss, from its rows."""
    mask = sample.loss_mask[1:].astype(np.float64)
    if "value" in rows:
        return float(np.dot(mask, np.square(rows["value"][:-1]))) / 2
    return -float(np.dot(mask, rows["logprob"]))


def _nan_first(entry: tuple[float, str]) -> float:
    """Sort key under which a NaN is the worst of all."""
    return float("inf") if entry[0] != entry[0] else entry[0]


def _worst_rows(run: dict[int, Rows], reference: dict[int, Rows]) -> dict[str, float]:
    """Return the largest error over samples for every kind of row."""
    assert run.keys() == reference.keys(), "both runs see the same samples"
    errors: dict[str, list[tuple[float, str]]] = {}
    for index, rows in reference.items():
        for name, row in rows.items():
            error = _relative_error(torch.from_numpy(run[index][name]), torch.from_numpy(row))
            errors.setdefault(f"{name}_error", []).append((error, ""))
    return {name: max(of_samples, key=_nan_first)[0] for name, of_samples in errors.items()}


def _relative_error(value: torch.Tensor, reference: torch.Tensor, smallest: float = 0.0) -> float:
    """Return ``|a - b| / |b|`` of tensors of one shape, with ``|b|`` at least ``smallest``; ``|a - b|`` if it is 0."""
    scale = max(float(torch.linalg.vector_norm(reference)), smallest)
    return float(torch.linalg.vector_norm(value - reference)) / (scale if scale > 0 else 1.0)


def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
