"""The parts in order of value: the first minutes on a machine answer the most important questions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpu_check_parts.results import Key


@dataclass(frozen=True, kw_only=True)
class Part:
    """One kind of measurement. It does not run without its ``imports`` and ``programs``."""

    name: str
    title: str
    minutes: float  # expected on an H100 or H200
    function: str  # module:function, called with a Context
    rows: str  # first part of its rows' keys; parts that fill one table share it
    imports: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()  # modules without which some of its rows do not run
    row_seconds: float = 90.0  # a measurement that takes longer is stopped and reported

    @property
    def key(self) -> Key:
        """Key of the row with the reason why the part does not run."""
        return Key(self.rows, "", self.name, "")


_KERNELS = ("torch", "triton", "numpy", "psutil")
_FA4 = "flash_attn.cute"


def _part(
    name: str,
    title: str,
    minutes: float,
    *,
    function: str | None = None,
    rows: str | None = None,
    more_imports: tuple[str, ...] = (),
    **more: Any,
) -> Part:
    """Return a part that needs the kernels; ``function`` defaults to ``run`` of the module with its name."""
    function, imports = f"gpu_check_parts.{function or f'{name}:run'}", (*_KERNELS, *more_imports)
    return Part(name=name, title=title, minutes=minutes, function=function, rows=rows or name, imports=imports, **more)


_PARTS = (
    _part("parity", "kernels against the fp64 reference", 1.2, wanted=(_FA4,)),
    _part(
        "attention",
        "two forests: our kernels, FlashAttention unfolded and dense, FlexAttention",
        2.0,
        function="attention:run_first",
        wanted=(_FA4,),
    ),
    _part(
        "steps",
        "training steps, folded and unfolded",
        2.0,
        more_imports=("megatron.core", "mistral_common", "omegaconf", "pydantic", "typer", "rich"),
        row_seconds=240.0,
    ),
    _part(
        "head",
        "the vocabulary head, fused and unfused",
        1.0,
        more_imports=("rich",),
        wanted=("liger_kernel",),
    ),
    _part(
        "workloads",
        "the other forests, and the other attention methods",
        2.0,
        function="attention:run_rest",
        rows="attention",
        wanted=(_FA4,),
    ),
    _part(
        "tests",
        "tests/gpu and the kernels' tests that run on a GPU",
        6.0,
        more_imports=("pytest", "hypothesis"),
        row_seconds=300.0,
    ),
    _part(
        "sanitizer",
        "compute-sanitizer on a forest of 300 tokens",
        1.2,
        function="tools:run_sanitizer",
        programs=("compute-sanitizer",),
        row_seconds=150.0,
    ),
    _part(
        "profile",
        "ncu on three kernels",
        0.4,
        function="tools:run_profile",
        programs=("ncu",),
        row_seconds=120.0,
    ),
)
PARTS = {part.name: part for part in _PARTS}
