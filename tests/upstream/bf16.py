"""How far training in bf16 departs from training in fp32, folded and unfolded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from megatron_lm import ENTRY, FIRST, ITERATIONS, STOCK, TRAIN, UNFOLDED, WEIGHTS_ONLY, Run, saved_tensors, trained

# Two draws of one size, each the mean of many roundings.
FACTOR = 1.5
_MASTER = "optimizer.state.fp32_param."
_GRADIENT = "optimizer.state.exp_avg."


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Errors of a run in bf16, against the run in fp32 with the same initial weights.

    ``loss`` is the mean of the iterations' absolute errors; ``gradient`` the relative one of Adam's mean of gradients
    at the end, all parameters as one vector, and ``weights`` likewise.
    """

    loss: float
    gradient: float
    weights: float


def bf16_errors(data: str, folded: str, common: str, folder: Path) -> dict[str, Errors]:
    """Train ``folded`` and ``unfolded`` in bf16, and unfolded in fp32, all from weights that bf16 holds exactly."""
    start = folder / "start"
    trained(STOCK, common, TRAIN, UNFOLDED, data, f"--bf16 --save {start} --exit-interval {FIRST}")

    def run(name: str, program: tuple[str, ...], *arguments: str) -> tuple[Run, dict[str, torch.Tensor]]:
        saved = folder / name
        done = trained(program, common, TRAIN, *arguments, data, f"--load {start} {WEIGHTS_ONLY} --save {saved}")
        assert sorted(done.losses) == list(range(1, ITERATIONS + 1))
        return done, saved_tensors(saved, ITERATIONS)

    exact = run("exact", STOCK, UNFOLDED)
    return {
        "unfolded": _errors(*run("unfolded", STOCK, UNFOLDED, "--bf16"), *exact),
        "folded": _errors(*run("folded", ENTRY, folded, "--bf16"), *exact),
    }


def _errors(run: Run, tensors: dict[str, torch.Tensor], exact: Run, exact_tensors: dict[str, torch.Tensor]) -> Errors:
    weights = [name for name in exact_tensors if not name.startswith("optimizer.")]
    assert len(weights) > 5
    return Errors(
        loss=sum(abs(run.losses[iteration] - loss) for iteration, loss in exact.losses.items()) / len(exact.losses),
        gradient=_relative([(tensors[_GRADIENT + name], exact_tensors[_GRADIENT + name]) for name in weights]),
        weights=_relative([(tensors[_MASTER + name], exact_tensors[name]) for name in weights]),
    )


def _relative(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    error = sum(torch.linalg.vector_norm(actual.double() - wanted.double()) ** 2 for actual, wanted in pairs)
    size = sum(torch.linalg.vector_norm(wanted.double()) ** 2 for _, wanted in pairs)
    return float((error / size) ** 0.5)


def assert_no_further(errors: dict[str, Errors]) -> None:
    """Folding adds no error to the existing error of bf16."""
    for what, limit in vars(errors["unfolded"]).items():
        assert 0 < limit < 0.05, what
        assert getattr(errors["folded"], what) <= FACTOR * limit, (what, errors)
