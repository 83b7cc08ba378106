"""Programs that a language model wrote, run in a sandboxed process with limits on time and size.

A program returns a state, as text that is parsed like any other reply, or selects tokens.
"""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import sys
from contextlib import suppress
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


async def run_program(code: str, budget: int) -> tuple[str, str]:
    """What ``policy(budget)`` of a program returns, as JSON, or why it failed.

    Raises :class:`ConfigError` without a sandbox.
    """
    output, failure = await _run_sandboxed(code, "policy", [[budget]], _MAX_CHARACTERS)
    return output[1:-1], failure  # of the list of all calls


async def _run_sandboxed(
    code: str, function: str, calls: JsonValue, limit: int, numpy: str = ""
) -> tuple[str, str]:
    """Results of the calls, at most ``limit`` characters of JSON, or why there are none."""
    if len(code) > _MAX_CHARACTERS:
        return "", f"the program has {len(code)} characters, more than {_MAX_CHARACTERS}"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", str(Path(sandbox.__file__)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # One thread: a library that starts others could not do so inside the sandbox.
        env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        limit=4 * limit,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    request = {
        "code": code, "function": function, "calls": json.dumps(calls), "seconds": _TIMEOUT,
        "numpy": numpy,
    }  # fmt: skip
    limit += len(sandbox.READY)
    try:
        process.stdin.write(json.dumps(request).encode())
        process.stdin.close()
        text, errors = await asyncio.gather(
            _read_limited(process.stdout, limit), _read_limited(process.stderr, limit)
        )
        if len(text) <= limit:
            await process.wait()
    finally:
        with suppress(ProcessLookupError):  # it may exit between the check and the signal
            if process.returncode is None:
                process.kill()
        await process.wait()
    # A program may exit with any status, so that of a missing sandbox counts before it runs only.
    if process.returncode == sandbox.SANDBOX_UNAVAILABLE and not text.startswith(sandbox.READY):
        fix = "use another strategy: the sandbox for programs needs Linux with seccomp"
        raise ConfigError("search", [Problem("--strategy", f"cannot run a sandbox: {errors}", fix)])
    if len(text) > limit:  # checked first: its exit status is that of a killed process
        return "", f"the program returned more than {limit - len(sandbox.READY)} characters"
    if process.returncode == -signal.SIGALRM:
        return "", f"the program did not end within {_TIMEOUT:.0f} s"
    if process.returncode:
        return "", errors or f"the program was ended ({process.returncode})"
    return text.removeprefix(sandbox.READY), ""


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
    signals = _read_signals(tokens, base_policy, budget)
    calls: list[JsonValue] = [
        [
            _encode(tokens.features[image]),
            {name: _encode(values[image]) for name, values in signals.items()},
            budget,
        ]
        for image in range(tokens.batch)
    ]
    limit = 1000 + _CHARACTERS_PER_INDEX * budget * tokens.batch
    numpy = str(Path(np.__file__).parents[1])
    output, failure = await _run_sandboxed(program.code, "select", calls, limit, numpy)
    if failure:
        raise SelectionError(failure)
    try:
        selections = _SELECTIONS.validate_json(output)
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


@torch.no_grad()
def _read_signals(tokens: VisualTokens, base_policy: str, budget: int) -> dict[str, Tensor]:
    """The signals of a batch by name, ``(B, K)`` and ``(B, N)``."""
    policy = BASE_POLICIES[base_policy]
    signals = {"reference": policy.select_picks(policy.default_params, tokens, budget)}
    if tokens.instruction is not None:
        instruction = tokens.instruction
        present = instruction.segments[:, None].float()
        mean = (instruction.cosines * present).sum(2) / present.sum(2)
        signals["relevance"] = instruction.sign * mean
    if tokens.cls_attention is not None:
        signals["attention"] = tokens.cls_attention
    places = torch.arange(tokens.count).expand(tokens.batch, -1)
    return signals | {"row": places // tokens.grid.width, "column": places % tokens.grid.width}


def _encode(values: Tensor) -> JsonValue:
    kind = torch.float32 if values.is_floating_point() else torch.int64
    array = values.detach().cpu().to(kind).contiguous().numpy()
    data = base64.b64encode(array.tobytes()).decode()
    return {"type": str(array.dtype), "shape": list(array.shape), "array": data}
