"""The dtype in which this machine multiplies fast and rounds alike in batches of any size."""

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
"""Values of ``ONEDNN_MAX_CPU_ISA`` under which oneDNN reports bfloat16 support but emulates it."""


def choose_dtype(*, exact: bool = False) -> Dtype:
    """bfloat16 on a GPU or a CPU with instructions for it (AVX-512 BF16, AMX, Arm), else float32.

    Other CPUs multiply bfloat16 several times slower than float32. They also round a row of a
    product differently in another batch, so that near ties between tokens of an image are decided
    differently.

    The answer comes from what torch and oneDNN report, not from a timing, so that a busy machine
    and each of its processes decide alike. It respects ``ONEDNN_MAX_CPU_ISA``, which servers
    started from here inherit.

    ``exact`` asks for float32 on every CPU: for answers of small models that must be the same on
    all of them.
    """
    import torch  # here, because it takes seconds and clients of servers need no more of it

    # Not is_available(): after that call an engine could not fork its workers.
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
        # oneDNN reports bfloat16 support from AVX-512 on, even where the CPU has no instructions
        # for it.
        supported = bool(cpu.get("avx512_bf16") or cpu.get("amx_bf16"))
    return "bfloat16" if supported else "float32"
