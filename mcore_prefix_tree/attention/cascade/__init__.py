"""Back-end ``cascade``: an ordinary varlen attention, called once for the runs and once per nesting depth."""

from mcore_prefix_tree.attention.cascade.cascade import (
    CPU_KERNELS,
    CUDA_KERNELS,
    attention,
    attention_through,
    check,
    choose_kernel,
    plan,
    refusal,
    refusal_through,
)

__all__ = [
    "CPU_KERNELS",
    "CUDA_KERNELS",
    "attention",
    "attention_through",
    "check",
    "choose_kernel",
    "plan",
    "refusal",
    "refusal_through",
]
