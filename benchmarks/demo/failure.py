"""One clear line for whatever ends the demo early.

Knows nothing about where it is printed.
"""

from __future__ import annotations

from openai import APIConnectionError, APIError

from benchmarks.server import ServerDied


class DemoError(Exception):
    """Something that the caller can mend; the message says what."""


def one_line(error: BaseException) -> str:
    """What went wrong, without a traceback."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ServerDied):
        return f"the server did not start: {_telling(str(error))} (its log lies under --out)"
    if isinstance(error, APIConnectionError):
        return "the server went away in the middle of a question; its log lies under --out"
    if isinstance(error, APIError):
        return f"the server refused a question: {error.message}"
    if isinstance(error, DemoError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _telling(log: str) -> str:
    """The last line of a log that names an error, or its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "vllm-autoprune:" in line]
    return (errors or lines or ["no output"])[-1]
