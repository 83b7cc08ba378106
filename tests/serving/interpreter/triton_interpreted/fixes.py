"""What Triton's interpreter computes wrongly (bfloat16, comparisons) or not at all (sampling).

It keeps bfloat16 as bit patterns in ``uint16``. A comparison keeps the type of its operands there,
so that a broadcast scalar becomes an integer, which Triton 3.9 refuses as a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy

_MARK = "_fixed"


def fix_arithmetic() -> None:
    """Patch the interpreter: round bfloat16 results from float32, compare to ``int1``; idempotent.

    vLLM calls it with its plugins: Triton is half imported when it asks for backends.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    stock: Callable[..., Any] = InterpreterBuilder.binary_op
    if hasattr(stock, _MARK):
        return

    @wraps(stock)
    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        dtype = lhs.dtype.scalar
        if dtype == tl.bfloat16:
            result = op(widened(lhs.data), widened(rhs.data))
            handle = TensorHandle(
                result if result.dtype == numpy.bool_ else rounded(result), dtype
            )
        else:
            handle = stock(self, lhs, rhs, op)
        return (
            TensorHandle(handle.data, tl.int1)
            if handle.data.dtype == numpy.bool_
            else handle
        )

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


def sample_with_torch() -> None:
    """Let vLLM mask logits by torch, not by its Triton kernel (``_topk_topp_kernel``).

    The kernel converts the index of a loop; in the interpreter this index is a plain integer.
    """
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False
