"""Programs that a language model wrote, run in a sandboxed process with limits on time and size.

A program returns a state, as text that is parsed like any other reply, or selects tokens.
"""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import JsonValue, StrictInt, TypeAdapter, ValidationError
from torch import Tensor

from offline_search import sandbox
from offline_search.components import SelectionProgram
from vllm_autoprune.errors import ConfigError, Problem, SelectionError
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.tokens import VisualTokens

_TIMEOUT = 60.0
"""Seconds for running a program, which the sandbox counts, beside its limit of processor time.

This process could not tell: while it computes something else, it reads no output.
"""

_MAX_CHARACTERS = 20_000
"""Maximum length of a program, and of its output."""


@dataclass(frozen=True, slots=True)
class Output:
    """Return value of a program as JSON, or the reason why it failed."""

    text: str = ""
    failure: str = ""


async def run_program(code: str, budget: int) -> Output:
    """Run ``policy(budget)`` of a program; raises :class:`ConfigError` without a sandbox."""
    return await _run_sandboxed(code, {"budget": budget})


async def _run_sandboxed(
    code: str, request: Mapping[str, JsonValue], limit: int = _MAX_CHARACTERS
) -> Output:
    """Output of a program, at most ``limit`` characters; the request is one of the sandbox's.

    Raises :class:`ConfigError` without a sandbox.
    """
    if len(code) > _MAX_CHARACTERS:
        return Output(
            failure=f"the program has {len(code)} characters, more than {_MAX_CHARACTERS}"
        )
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


SIGNALS = {
    "reference": "(K,) the base policy's picks, in its order",
    "relevance": "(N,) similarity of each token to the question",
    "attention": "(N,) attention that the vision tower pays to each token",
    "row": "(N,) row of each token in the image",
    "column": "(N,) column of each token in the image",
}
"""What a program is given beside the features, by name."""

_CHARACTERS_PER_INDEX = 8

_SELECTIONS = TypeAdapter(list[list[StrictInt]])


async def select_with_program(
    program: SelectionProgram, tokens: VisualTokens, base_policy: str, budget: int
) -> Tensor:
    """Indices ``(B, K)`` in ascending order, of a batch of B images, each with its question.

    Raises :class:`SelectionError` where the program fails or returns anything but K different
    indices of each image.
    """
    if budget >= tokens.count:
        return torch.arange(tokens.count).expand(tokens.batch, -1)
    request: dict[str, JsonValue] = {
        "budget": budget,
        "images": list(_describe_images(tokens, base_policy, budget)),
        "numpy": str(Path(np.__file__).parents[1]),
    }
    limit = 1000 + _CHARACTERS_PER_INDEX * budget * tokens.batch
    output = await _run_sandboxed(program.code, request, limit)
    if output.failure:
        raise SelectionError(output.failure)
    try:
        selections = _SELECTIONS.validate_json(output.text)
    except ValidationError:  # a program that writes to the output itself may leave any text
        raise SelectionError("the output is no list of indices for each image") from None
    if len(selections) != tokens.batch:
        raise SelectionError(
            f"the output has {len(selections)} selections for {tokens.batch} images"
        )
    for indices in selections:
        if len(indices) != budget or len(set(indices)) != budget:
            raise SelectionError(
                f"select returned {len(set(indices))} different indices instead of {budget}"
            )
        if not 0 <= min(indices) <= max(indices) < tokens.count:
            raise SelectionError(f"select returned an index outside 0 to {tokens.count - 1}")
    return torch.tensor(selections).sort(1).values


def _describe_images(tokens: VisualTokens, base_policy: str, budget: int) -> list[JsonValue]:
    """Features and signals of each image, encoded for the sandbox."""
    policy = BASE_POLICIES[base_policy]
    with torch.no_grad():
        signals = {"reference": policy.select_picks(policy.default_params, tokens, budget)}
        if tokens.instruction is not None:
            instruction = tokens.instruction
            present = instruction.segments[:, None].float()
            mean = (instruction.cosines * present).sum(2) / present.sum(2)
            signals["relevance"] = instruction.sign * mean
    if tokens.cls_attention is not None:
        signals["attention"] = tokens.cls_attention
    places = torch.arange(tokens.count).expand(tokens.batch, -1)
    signals["row"] = places // tokens.grid.width
    signals["column"] = places % tokens.grid.width
    return [
        {
            "features": _encode_array(tokens.features[image]),
            "signals": {name: _encode_array(values[image]) for name, values in signals.items()},
        }
        for image in range(tokens.batch)
    ]


def _encode_array(values: Tensor) -> JsonValue:
    kind = torch.float32 if values.is_floating_point() else torch.int64
    array = values.detach().cpu().to(kind).contiguous().numpy()
    data = base64.b64encode(array.tobytes()).decode()
    return {"type": str(array.dtype), "shape": list(array.shape), "data": data}
