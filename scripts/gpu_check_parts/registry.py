"""The parts, in order of value: the first minutes on a machine answer the questions that matter most."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_check_parts.results import Key


@dataclass(frozen=True, kw_only=True)
class Part:
    """One kind of measurement.

    Attributes:
        name: for ``--only``, and of its log lines.
        title: what it measures, for the plan.
        minutes: expected on an H100; an estimate until a run has shown it.
        function: ``module:function``, called with a :class:`~gpu_check_parts.context.Context`.
        rows: first part of its rows' keys; parts that fill one table share it.
        imports: modules without which it does not run.
        programs: executables without which it does not run.
        wanted: modules without which some of its rows do not run.
        row_seconds: longest time of one measurement; one that takes longer is stopped and reported.
    """

    name: str
    title: str
    minutes: float
    function: str
    rows: str
    imports: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    row_seconds: float = 90.0

    @property
    def key(self) -> Key:
        """Key of the row that says why the part as a whole does not run."""
        return Key(self.rows, "", self.name, "")


_KERNELS = ("torch", "triton", "numpy", "psutil")
_STEPS = (*_KERNELS, "megatron.core", "mistral_common", "omegaconf", "pydantic", "typer", "rich")

PARTS = {
    part.name: part
    for part in (
        Part(
            name="parity",
            title="kernels against the fp64 reference",
            minutes=1.0,
            function="gpu_check_parts.parity:run",
            rows="parity",
            imports=_KERNELS,
            wanted=("flash_attn.cute",),
        ),
        Part(
            name="attention",
            title="two forests: our kernels, FlashAttention unfolded and dense, FlexAttention",
            minutes=1.5,
            function="gpu_check_parts.attention:run_first",
            rows="attention",
            imports=_KERNELS,
            wanted=("flash_attn.cute",),
        ),
        Part(
            name="steps",
            title="training steps, folded and unfolded",
            minutes=2.0,
            function="gpu_check_parts.steps:run",
            rows="steps",
            imports=_STEPS,
            row_seconds=240.0,
        ),
        Part(
            name="head",
            title="the vocabulary head, fused and unfused",
            minutes=0.7,
            function="gpu_check_parts.head:run",
            rows="head",
            imports=(*_KERNELS, "rich"),
            wanted=("liger_kernel",),
        ),
        Part(
            name="workloads",
            title="the other forests, and the other ways to attend",
            minutes=2.0,
            function="gpu_check_parts.attention:run_rest",
            rows="attention",
            imports=_KERNELS,
            wanted=("flash_attn.cute", "prefix_grouper", "areal"),
        ),
        Part(
            name="tests",
            title="tests/gpu and the kernels' tests that run on a GPU",
            minutes=4.0,
            function="gpu_check_parts.tests:run",
            rows="tests",
            imports=(*_KERNELS, "pytest", "hypothesis"),
            row_seconds=180.0,
        ),
        Part(
            name="sanitizer",
            title="compute-sanitizer on a forest of 300 tokens",
            minutes=2.0,
            function="gpu_check_parts.tools:run_sanitizer",
            rows="sanitizer",
            imports=_KERNELS,
            programs=("compute-sanitizer",),
            row_seconds=150.0,
        ),
        Part(
            name="profile",
            title="ncu on three kernels",
            minutes=1.0,
            function="gpu_check_parts.tools:run_profile",
            rows="profile",
            imports=_KERNELS,
            programs=("ncu",),
            row_seconds=120.0,
        ),
        Part(
            name="tune",
            title="other launches of the Triton kernels",
            minutes=6.0,
            function="gpu_check_parts.tune:run",
            rows="tune",
            imports=(*_KERNELS, "rich"),
            row_seconds=60.0,
        ),
    )
}
