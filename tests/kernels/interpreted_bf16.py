"""bfloat16 in Triton's interpreter, which keeps its bits in 16-bit integers and would compute with those.

Products take the values, conversions round as a GPU does: to nearest, ties to even. That is all that a kernel does
with bfloat16 here; everything else is float32.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest import mock

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_CONVERSIONS = ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc", "int_cast")


def widened(bits):
    """float32 of the bits of bfloat16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values):
    """Return the bits of bfloat16 of float32."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    nearest = ((bits + ((bits >> 16) & 1) + np.uint32(0x7FFF)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), nearest)


@contextmanager
def bfloat16():
    """Let kernels of the interpreter take bfloat16."""
    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def create_dot(self, left, right, *rest):
        def values(one):
            is_bf16 = one.dtype.scalar == tl.bfloat16
            return TensorHandle(widened(one.data), tl.float32) if is_bf16 else one

        return dot(self, values(left), values(right), *rest)

    def cast_impl(self, source, kind):
        types = source.dtype.scalar, kind.scalar
        if types == (tl.float32, tl.bfloat16):
            return TensorHandle(rounded(source.data), kind.scalar)
        if types == (tl.bfloat16, tl.float32):
            return TensorHandle(widened(source.data), kind.scalar)
        assert tl.bfloat16 not in types, types
        return cast(self, source, kind)

    replacements = {"create_dot": create_dot, "cast_impl": cast_impl}
    # Each of these is bound to the function above when the class is made.
    replacements |= {f"create_{name}": lambda self, one, kind, *_: self.cast_impl(one, kind) for name in _CONVERSIONS}
    with ExitStack() as stack:
        for name, replacement in replacements.items():
            stack.enter_context(mock.patch.object(InterpreterBuilder, name, replacement))
        yield
