"""Triton backend for the interpreter: reports a CPU and compiles nothing."""


def fix() -> None:
    """Patch what the interpreter computes wrongly or cannot compute; a plugin of vLLM."""
    from . import fixes

    fixes.fix_arithmetic()
    fixes.sample_with_torch()
