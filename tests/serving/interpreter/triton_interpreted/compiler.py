"""Compiler of the backend, which the interpreter never calls; Triton requires a concrete class."""

from __future__ import annotations

from triton.backends.compiler import BaseBackend


def never(*arguments: object) -> None:
    """In place of whatever only compiled kernels need."""
    raise NotImplementedError("the interpreter compiles nothing")


InterpretedBackend = type(
    "InterpretedBackend",
    (BaseBackend,),
    dict.fromkeys(BaseBackend.__abstractmethods__, never),
)
