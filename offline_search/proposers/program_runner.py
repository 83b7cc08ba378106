"""Runs a program that a language model wrote in a sandboxed process, with limits on time and size.

The output is text, parsed like any other reply.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offline_search.proposers import program_sandbox
from vllm_autoprune.errors import ConfigError, Problem

_TIMEOUT = 60.0
"""Seconds for starting Python and running a program; the sandbox also limits processor time."""

_MAX_CHARACTERS = 20_000
"""Maximum length of a program, and of its output."""


@dataclass(frozen=True, slots=True)
class Output:
    """Return value of a program as JSON, or the reason why it failed."""

    text: str = ""
    failure: str = ""


async def run_program(code: str, budget: int) -> Output:
    """Run ``policy(budget)`` of a program; raises :class:`ConfigError` without a sandbox."""
    if len(code) > _MAX_CHARACTERS:
        return Output(
            failure=f"the program has {len(code)} characters, more than {_MAX_CHARACTERS}"
        )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", str(Path(program_sandbox.__file__)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={},
        limit=4 * _MAX_CHARACTERS,
    )  # fmt: skip
    try:
        request = json.dumps({"code": code, "budget": budget}).encode()
        text, errors = await asyncio.wait_for(_communicate(process, request), _TIMEOUT)
    except TimeoutError:
        return Output(failure=f"the program did not end within {_TIMEOUT:.0f} s")
    finally:
        await _terminate(process)
    if len(text) > _MAX_CHARACTERS:  # checked first: its exit status is that of a killed process
        return Output(failure=f"the program returned more than {_MAX_CHARACTERS} characters")
    if process.returncode == program_sandbox.SANDBOX_UNAVAILABLE:
        fix = "use another strategy: the sandbox for programs needs Linux with seccomp"
        raise ConfigError("search", [Problem("--strategy", f"cannot run a sandbox: {errors}", fix)])
    if process.returncode:
        return Output(failure=errors or f"the program was ended ({process.returncode})")
    return Output(text)


async def _communicate(process: asyncio.subprocess.Process, request: bytes) -> tuple[str, str]:
    """Output and errors of the process, each up to just over the maximum length."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(request)
    process.stdin.close()
    text, errors = await asyncio.gather(
        _read_limited(process.stdout), _read_limited(process.stderr)
    )
    if len(text) > _MAX_CHARACTERS:
        await _terminate(process)
    await process.wait()
    return text, errors


async def _terminate(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):  # it may exit between the check and the signal
        if process.returncode is None:
            process.kill()
    await process.wait()


async def _read_limited(stream: asyncio.StreamReader) -> str:
    content = b""
    while len(content) <= _MAX_CHARACTERS and (part := await stream.read(_MAX_CHARACTERS)):
        content += part
    return content.decode(errors="replace")
