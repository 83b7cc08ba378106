"""The dtype in which this machine multiplies fast, and alike in batches of any size."""

from __future__ import annotations

import os
import platform
from typing import Literal

Dtype = Literal["bfloat16", "float32"]

SLOW_BFLOAT16 = (
    "this CPU has no instructions for bfloat16: it multiplies float32 several times faster, and "
    "in bfloat16 an image's tokens may depend on the batch"
)
SERVE_FLOAT32 = (
    "serve with --dtype float32, which takes twice the memory; vLLM runs Qwen3.5 on a CPU in "
    "bfloat16 only"
)

_EMULATED = ("AVX512_CORE", "AVX512_CORE_VNNI")
"""Limits in ``ONEDNN_MAX_CPU_ISA`` with which oneDNN claims bfloat16 and emulates it."""


def choose_dtype(*, exact: bool = False) -> Dtype:
    """bfloat16 on a GPU or a CPU with instructions for it (AVX-512 BF16, AMX, Arm's BF16).

    Other CPUs multiply bfloat16 several times slower than float32, and round a row of a product
    otherwise in another batch, so that near ties among an image's tokens are decided otherwise.

    Read from what torch and oneDNN report, not timed: a busy machine and each of its processes
    decide alike. ``ONEDNN_MAX_CPU_ISA`` counts, which the servers started from here inherit.

    ``exact``: float32 on every CPU, for answers of small models that are to be the same on all.
    """
    import torch  # here, because it takes seconds and clients of servers need no more of it

    # Not is_available(), after which an engine could not fork its workers.
    if torch.cuda.device_count():
        return "bfloat16"
    if exact:
        return "float32"
    supported = torch.backends.mkldnn.is_available() and (
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() not in _EMULATED
    )
    if supported and platform.machine() in ("x86_64", "AMD64"):
        cpu = torch.cpu.get_capabilities()
        # oneDNN reports support from AVX-512 on, without instructions for bfloat16 too.
        supported = bool(cpu.get("avx512_bf16") or cpu.get("amx_bf16"))
    return "bfloat16" if supported else "float32"
