"""Runs a program that a language model wrote in a sandboxed process, with limits on time and size.

The output is text, parsed like any other reply.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from offline_search.programs import sandbox
from vllm_autoprune.errors import ConfigError, Problem

_TIMEOUT = 60.0
"""Seconds for running a program, which the sandbox counts, beside its limit of processor time.

This process could not tell: while it computes something else, it reads no output.
"""

MAX_CHARACTERS = 20_000
"""Maximum length of a program, and of its output."""


@dataclass(frozen=True, slots=True)
class Output:
    """Return value of a program as JSON, or the reason why it failed."""

    text: str = ""
    failure: str = ""


async def run_program(code: str, budget: int) -> Output:
    """Run ``policy(budget)`` of a program; raises :class:`ConfigError` without a sandbox."""
    return await run_sandboxed(code, {"budget": budget})


async def run_sandboxed(
    code: str, request: Mapping[str, JsonValue], limit: int = MAX_CHARACTERS
) -> Output:
    """Output of a program, at most ``limit`` characters; the request is one of the sandbox's.

    Raises :class:`ConfigError` without a sandbox.
    """
    if len(code) > MAX_CHARACTERS:
        return Output(failure=f"the program has {len(code)} characters, more than {MAX_CHARACTERS}")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", str(Path(sandbox.__file__)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # One thread: a library that starts others could not do so inside the sandbox.
        env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        limit=4 * limit,
    )  # fmt: skip
    try:
        body = json.dumps({"code": code, "seconds": _TIMEOUT, **request}).encode()
        text, errors = await _communicate(process, body, limit + len(sandbox.READY))
    finally:
        await _terminate(process)
    # A program may exit with any status, so that of a missing sandbox counts before it runs only.
    if process.returncode == sandbox.SANDBOX_UNAVAILABLE and not text.startswith(sandbox.READY):
        fix = "use another strategy: the sandbox for programs needs Linux with seccomp"
        raise ConfigError("search", [Problem("--strategy", f"cannot run a sandbox: {errors}", fix)])
    text = text.removeprefix(sandbox.READY)
    if len(text) > limit:  # checked first: its exit status is that of a killed process
        return Output(failure=f"the program returned more than {limit} characters")
    if process.returncode == -signal.SIGALRM:
        return Output(failure=f"the program did not end within {_TIMEOUT:.0f} s")
    if process.returncode:
        return Output(failure=errors or f"the program was ended ({process.returncode})")
    return Output(text)


async def _communicate(
    process: asyncio.subprocess.Process, request: bytes, limit: int
) -> tuple[str, str]:
    """Output and errors of the process, each up to just over the maximum length."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(request)
    process.stdin.close()
    text, errors = await asyncio.gather(
        _read_limited(process.stdout, limit), _read_limited(process.stderr, limit)
    )
    if len(text) > limit:
        await _terminate(process)
    await process.wait()
    return text, errors


async def _terminate(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):  # it may exit between the check and the signal
        if process.returncode is None:
            process.kill()
    await process.wait()


async def _read_limited(stream: asyncio.StreamReader, limit: int) -> str:
    content = b""
    while len(content) <= limit and (part := await stream.read(limit)):
        content += part
    return content.decode(errors="replace")
