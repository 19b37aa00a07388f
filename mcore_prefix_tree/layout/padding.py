"""How far a micro-batch is padded: to what its parallel layout and precision need, and to few sizes if wanted."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

# Tokens that an FP8 matrix product comes in multiples of: megatron.core.fp8_utils.get_fp8_align_size.
_FP8_TOKENS = 16
_MXFP8_TOKENS = 32


def sequence_multiple(
    *,
    tensor_model_parallel_size: int = 1,
    sequence_parallel: bool = False,
    fp8: str | None = None,
    fp8_recipe: str | None = None,
) -> int:
    """What the tokens of a micro-batch have to be a multiple of.

    Sequence parallelism cuts them over the tensor-parallel ranks; FP8 wants a multiple on each rank that holds some.

    Args:
        tensor_model_parallel_size: ranks.
        sequence_parallel: whether they share the sequence.
        fp8: Megatron's setting; None or empty computes nothing in FP8.
        fp8_recipe: Megatron's setting.
    """
    tokens = 1
    if fp8:
        tokens = _MXFP8_TOKENS if fp8_recipe == "mxfp8" else _FP8_TOKENS
    return tokens * (tensor_model_parallel_size if sequence_parallel else 1)


@dataclass(frozen=True, kw_only=True)
class Padding:
    """What the sizes of micro-batches are rounded up to.

    Attributes:
        multiple: of the size; see :func:`sequence_multiple`.
        buckets: the only sizes there are, increasing, where something downstream is compiled or captured once a size.
            Empty rounds up to ``multiple`` and no further.

    Raises:
        ValueError: on construction, if a bucket is not a positive multiple or they do not increase.
    """

    multiple: int = 1
    buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise ValueError(f"the multiple of a padded size, {self.multiple}, must be at least 1")
        for bucket in self.buckets:
            if bucket < 1 or bucket % self.multiple:
                raise ValueError(
                    f"length_buckets: {bucket} is not a multiple of {self.multiple}, which the parallel layout or FP8 "
                    "needs"
                )
        if list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"length_buckets: {list(self.buckets)} must increase")

    def check_holds(self, max_tokens: int) -> None:
        """See that every micro-batch under a budget finds a size.

        Raises:
            ValueError: the largest bucket is below ``max_tokens``.
        """
        if self.buckets and self.buckets[-1] < max_tokens:
            raise ValueError(
                f"length_buckets: the largest, {self.buckets[-1]}, cannot hold a micro-batch of "
                f"max_tokens={max_tokens}; add one that can"
            )

    def size(self, tokens: int) -> int:
        """Tokens with padding; at least one, because a micro-batch of nothing is one of padding.

        Raises:
            ValueError: ``tokens`` are more than the largest bucket.
        """
        if not self.buckets:
            return max(1, -(-tokens // self.multiple)) * self.multiple
        self.check_holds(tokens)
        return self.buckets[bisect_left(self.buckets, tokens)]


NO_PADDING = Padding()
