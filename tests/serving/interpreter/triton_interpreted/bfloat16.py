"""Arithmetic of bfloat16 in Triton's interpreter, which keeps it as bit patterns in ``uint16``."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy

_MARK = "_of_bfloat16"


def fix() -> None:
    """Patch the interpreter to compute bfloat16 in float32 and round; idempotent.

    vLLM calls it with its plugins: Triton is half imported when it asks for backends.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    stock: Callable[..., Any] = InterpreterBuilder.binary_op
    if hasattr(stock, _MARK):
        return

    @wraps(stock)
    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        if lhs.dtype.scalar != tl.bfloat16:
            return stock(self, lhs, rhs, op)
        result = op(widened(lhs.data), widened(rhs.data))
        compared = result.dtype == numpy.bool_
        return TensorHandle(result if compared else rounded(result), lhs.dtype.scalar)

    setattr(binary_op, _MARK, True)
    InterpreterBuilder.binary_op = binary_op


def widened(bits: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """The float32 of each bfloat16."""
    return (bits.astype(numpy.uint32) << 16).view(numpy.float32)


def rounded(values: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """The bfloat16 nearest to each float32, ties to even; NaN stays NaN."""
    bits = values.astype(numpy.float32).view(numpy.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return numpy.where(numpy.isnan(values), 0x7FC0, nearest).astype(numpy.uint16)
