"""Triton backend for the interpreter: reports a CPU and compiles nothing."""


def fix() -> None:
    """Patch what the interpreter computes wrongly or cannot compute; a plugin of vLLM."""
    from . import arithmetic, sampling

    arithmetic.fix()
    sampling.sample_with_torch()
