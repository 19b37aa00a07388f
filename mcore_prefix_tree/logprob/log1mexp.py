"""The logarithm of one minus a probability."""

from __future__ import annotations

import torch


def log1mexp(values: torch.Tensor) -> torch.Tensor:
    """Return ``log(1 - exp(x))``, ``[...]`` (Maechler, "Accurately Computing log(1 - exp(-|a|))", 2012).

    At 0 and above (a certain token, or rounding), the result is that of the last number below 0.
    """
    below = values.clamp(max=-torch.finfo(values.dtype).tiny)
    near = below > -0.6931471805599453
    # Either branch is given numbers that keep the other one's gradient finite.
    return torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, below, -1.0))),
        torch.log1p(-torch.exp(torch.where(near, -1.0, below))),
    )
