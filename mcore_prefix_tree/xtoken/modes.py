"""Names of the losses of chunks, their inputs and their settings; nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["p_kl", "gold", "h_kl", "alm", "uld"]


@dataclass(frozen=True, kw_only=True)
class Reads:
    """Inputs and settings of a loss."""

    projection: bool = False
    tokens: bool = False  # whether chunks are different if only their tokens differ, and not their predictors
    temperature: bool = False  # whether logits are divided by a temperature, and terms multiplied by its square
    reverse: bool = False
    # Whether the loss reads every log-probability of the teacher, and not only those of its likeliest tokens.
    whole: bool = False


MODES: dict[Mode, Reads] = {
    "p_kl": Reads(projection=True, temperature=True, reverse=True),
    "gold": Reads(projection=True, temperature=True, reverse=True, whole=True),
    "h_kl": Reads(projection=True, temperature=True, reverse=True, whole=True),
    "alm": Reads(tokens=True),
    "uld": Reads(whole=True),
}


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """A loss and its numbers, as in ``CrossTokenizer``; ``exported`` if the teacher's logits are exported rows."""

    mode: Mode = "p_kl"
    temperature: float = 1.0
    top_k: int | None = None
    reverse: bool = False
    tail: int = 8192
    theta: float = 1.0
    exported: bool = False

    @property
    def reads(self) -> Reads:
        return MODES[self.mode]

    @property
    def scale(self) -> float:
        """Factor on every term: the square of the temperature keeps the size of the gradients."""
        return self.temperature**2
