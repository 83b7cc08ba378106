"""One clear line for whatever ends the demo early.

Knows nothing about where it is printed.
"""

from __future__ import annotations

import re
from pathlib import Path

from openai import APIConnectionError, APIError

from vllm_autoprune import AutopruneError


class DemoError(Exception):
    """Something that the caller can fix; the message says what."""


def one_line(error: BaseException) -> str:
    """What went wrong, without a traceback."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, APIConnectionError):
        return "the server went away in the middle of a question; its log lies under --out"
    if isinstance(error, APIError):
        return f"the server refused a question: {error.message}"
    if isinstance(error, DemoError):
        return str(error)
    if isinstance(error, AutopruneError):
        return " ".join(str(error).split())
    return f"{type(error).__name__}: {error}"


def not_started(log: Path) -> DemoError:
    """Why a server did not start, as its log has it."""
    text = log.read_text(errors="replace")
    return DemoError(f"the server did not start: {root_cause(text)} (log: {log})")


def root_cause(log: str) -> str:
    """What the plugin objects to, else the first error that a log names, else its last line.

    Processes pass an error on, so the first one is the cause and the last one the least telling.
    """
    _, found, refusal = log.partition("\nvllm-autoprune: ")
    if found:
        return " ".join(refusal.split())
    first = re.search(r"(?:^|\] )(\w*(?:Error|Exception): .*)$", log, re.MULTILINE)
    lines = log.split("\n")
    return first[1] if first else next((x for x in reversed(lines) if x.strip()), "no output")
