"""Running a written program in a confined process, within a time and a size.

Knows nothing about what programs return: it is text, to be read as a reply is.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offline_search.programs import confined
from vllm_autoprune.errors import ConfigError, Problem

_PATIENCE = 60.0
"""Seconds for starting Python and running a program; its own processor time is bounded below."""

_LONGEST = 20_000
"""Characters of what a program returns, and of the program itself."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a program returned, as JSON, or why it returned nothing."""

    text: str = ""
    failure: str = ""


async def run_program(code: str, budget: int) -> Output:
    """``policy(budget)`` of a program; raises :class:`ConfigError` where it cannot be confined."""
    if len(code) > _LONGEST:
        return Output(failure=f"the program has {len(code)} characters, more than {_LONGEST}")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", str(Path(confined.__file__)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={},
        limit=4 * _LONGEST,
    )  # fmt: skip
    try:
        asked = json.dumps({"code": code, "budget": budget}).encode()
        text, told = await asyncio.wait_for(_answered(process, asked), _PATIENCE)
    except TimeoutError:
        return Output(failure=f"the program did not end within {_PATIENCE:.0f} s")
    finally:
        await _ended(process)
    if len(text) > _LONGEST:  # said first: ending it may have lost its exit status
        return Output(failure=f"the program returned more than {_LONGEST} characters")
    if process.returncode == confined.UNCONFINED:
        fix = "use another strategy: programs run on Linux only, where the kernel locks them up"
        raise ConfigError("search", [Problem("--strategy", f"cannot confine: {told}", fix)])
    if process.returncode:
        return Output(failure=told or f"the program was ended ({process.returncode})")
    return Output(text)


async def _answered(process: asyncio.subprocess.Process, asked: bytes) -> tuple[str, str]:
    """What the process wrote, of each stream no more than is looked at; then it has ended."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(asked)
    process.stdin.close()
    text, told = await asyncio.gather(_first(process.stdout), _first(process.stderr))
    if len(text) > _LONGEST:
        await _ended(process)
    await process.wait()
    return text, told


async def _ended(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):  # it may end by itself between the look and the signal
        if process.returncode is None:
            process.kill()
    await process.wait()


async def _first(stream: asyncio.StreamReader) -> str:
    found = b""
    while len(found) <= _LONGEST and (part := await stream.read(_LONGEST)):
        found += part
    return found.decode(errors="replace")
