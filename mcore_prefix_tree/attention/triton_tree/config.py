"""Block sizes, warps and pipeline stages of each kernel, by chip and head dimension.

Every row compiles to tensor-core instructions (fp32 aside), fits the chip's shared memory and spills no register:
tests/kernels/test_compile.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mcore_prefix_tree.attention.backend_options import Case


class Launch(NamedTuple):
    """Launch of a kernel; block sizes divide ``schedule.ROUND``, and tiles have at most ``widest`` (2^n) columns."""

    query_block: int
    key_block: int
    warps: int
    stages: int
    widest: int = 256


@dataclass(frozen=True, kw_only=True)
class Configs:
    """The launches of one call."""

    forward: Launch
    key_value: Launch  # launch of the kernel of dK and dV
    query: Launch  # launch of the kernel of dQ
    apart: bool  # whether dK and dV take a launch each, since the sums of both would not fit the registers
    engine: bool  # whether tiles move by tensor descriptors, through the copy engine
    # Whether the query heads of a key head are divided among programs if they are too few for the device.
    divides: bool = True

    @property
    def packed(self) -> list[int]:
        """Integers in the order that operators take them."""
        flags = (self.apart, self.engine, self.divides)
        return [*map(int, flags), *self.forward, *self.key_value, *self.query]

    @classmethod
    def unpack(cls, packed: Sequence[int]) -> Configs:
        apart, engine, divides, *numbers = packed
        size = len(Launch._fields)
        forward, key_value, query = (Launch(*numbers[start : start + size]) for start in range(0, 3 * size, size))
        return cls(
            forward=forward,
            key_value=key_value,
            query=query,
            apart=bool(apart),
            engine=bool(engine),
            divides=bool(divides),
        )


def part(width: int, widest: int = 256) -> int:
    """Return the width of the parts, each a tile, in which a kernel takes a head dimension: 2^n, 16 to ``widest``.

    Three parts of 64 hold widths up to 192, for example multi-head latent attention's; one of 256 is a third more work.
    """
    return min(widest, 64 if 128 < width <= 192 else max(16, 1 << (width - 1).bit_length()))


def rounded(width: int, widest: int = 256) -> int:
    """Return a head dimension rounded up to full parts of a launch."""
    return -(-width // part(width, widest)) * part(width, widest)


class _Row(NamedTuple):
    forward: Launch
    key_value: Launch
    query: Launch
    apart: bool = False


# Head dimensions of queries and of values up to which each row of a chip is for; the first that holds both is taken.
UP_TO = ((64, 64), (128, 128), (192, 128), (192, 192), (256, 128), (256, 256))
_HOPPER = (
    _Row(Launch(128, 128, 8, 3), Launch(64, 128, 8, 2), Launch(128, 64, 8, 3)),
    _Row(Launch(128, 64, 8, 3), Launch(64, 128, 8, 2, 64), Launch(128, 64, 8, 2)),
    _Row(Launch(128, 128, 8, 2), Launch(32, 128, 8, 2, 64), Launch(128, 64, 8, 2)),
    _Row(Launch(128, 64, 8, 2), Launch(32, 128, 8, 2), Launch(128, 32, 8, 2), apart=True),
    _Row(Launch(128, 64, 8, 2), Launch(32, 128, 8, 2), Launch(128, 32, 8, 2), apart=True),
    _Row(Launch(128, 64, 8, 2), Launch(32, 128, 8, 2, 128), Launch(128, 32, 8, 2, 64), apart=True),
)
_BLACKWELL = (
    _Row(Launch(128, 64, 8, 3), Launch(64, 128, 8, 2), Launch(128, 64, 8, 3)),
    _Row(Launch(128, 64, 8, 3), Launch(64, 128, 8, 2), Launch(128, 64, 8, 2, 64)),
    _Row(Launch(128, 64, 8, 3, 64), Launch(64, 64, 8, 2), Launch(128, 64, 8, 2)),
    _Row(Launch(128, 64, 8, 2), Launch(32, 64, 8, 2), Launch(128, 32, 8, 2)),
    _Row(Launch(128, 64, 8, 2), Launch(64, 64, 8, 2), Launch(128, 32, 8, 2)),
    _Row(Launch(128, 32, 8, 2), Launch(32, 64, 8, 2), Launch(128, 32, 8, 2)),
)
# mma.sync: Ampere, Ada and the small Blackwells, of which all but the A100 have 99 KiB of shared memory. A warp has 16
# rows of a product, and warps that find none left multiply the same rows again.
_OTHERS = (
    _Row(Launch(128, 64, 8, 3), Launch(64, 128, 8, 2), Launch(128, 64, 8, 2)),
    _Row(Launch(128, 32, 8, 3), Launch(32, 64, 4, 2), Launch(64, 64, 8, 2)),
    _Row(Launch(128, 64, 8, 2), Launch(16, 128, 8, 2), Launch(128, 16, 8, 2), apart=True),
    _Row(Launch(128, 16, 8, 2), Launch(16, 64, 4, 2), Launch(64, 16, 4, 2), apart=True),
    _Row(Launch(128, 32, 8, 2), Launch(32, 64, 4, 2), Launch(64, 32, 4, 2), apart=True),
    _Row(Launch(64, 16, 4, 2, 64), Launch(16, 64, 4, 2, 64), Launch(64, 16, 4, 2, 64), apart=True),
)
# Where some of these would spill.
_SMALL_BLACKWELL = (
    _OTHERS[0]._replace(forward=Launch(128, 64, 8, 2)),
    _OTHERS[1]._replace(key_value=Launch(32, 32, 4, 2)),
    *_OTHERS[2:4],
    _OTHERS[4]._replace(key_value=Launch(16, 64, 4, 2, 64), query=Launch(64, 16, 4, 2, 64)),
    _OTHERS[5],
)
# Without tensor cores, for tests: small enough for every chip.
_FLOAT32 = (
    _Row(Launch(64, 32, 8, 2), Launch(32, 32, 8, 2), Launch(32, 32, 8, 2)),
    _Row(Launch(32, 32, 8, 2), Launch(16, 32, 8, 2), Launch(32, 16, 8, 2)),
    *[_Row(Launch(16, 16, 8, 1), Launch(16, 16, 8, 1), Launch(16, 16, 8, 1), apart=True)] * 4,
)


def configs_for(case: Case) -> Configs:
    """Return the launches of a case that is not refused. On the CPU, in Triton's interpreter, those of Hopper."""
    chip = 9 if case.capability is None else case.capability[0]
    rows: tuple[_Row, ...] = {9: _HOPPER, 10: _BLACKWELL, 12: _SMALL_BLACKWELL}.get(chip, _OTHERS)
    if case.dtype == torch.float32 and case.capability is not None:
        rows = _FLOAT32
    row = next(
        row
        for (head_dim, value_dim), row in zip(UP_TO, rows, strict=True)
        if case.head_dim <= head_dim and case.value_dim <= value_dim
    )
    return Configs(
        forward=row.forward,
        key_value=row.key_value,
        query=row.query,
        apart=row.apart,
        # Where tiles of scores are made in registers, by mma.sync, plain loads leave the kernels more of them.
        engine=case.capability is not None and chip in (9, 10),
    )
