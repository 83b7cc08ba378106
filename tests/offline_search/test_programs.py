"""Programs that a language model wrote: what they return, and what the sandbox refuses."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from pathlib import Path

import pytest
import torch

from offline_search import programs as runner
from offline_search.components import SelectionProgram
from offline_search.programs import SIGNALS, run_program, select_with_program
from offline_search.prompt import INITIAL_PROGRAM
from vllm_autoprune.errors import SelectionError
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.safety import synthetic_probes


def run(body: str, imports: str = "os") -> tuple[str, str]:
    """Output and failure of ``policy(k)`` with this body."""
    code = f"import {imports}\ndef policy(k):\n    {body}\n"
    return asyncio.run(run_program(code, 8))


def test_the_return_value_is_json() -> None:
    text, failure = run("print('noise'); return {'k': k, 'root': math.sqrt(k + 8)}", "math")
    assert json.loads(text) == {"k": 8, "root": 4.0} and not failure
    assert json.loads(run("return [true, false, null]")[0]) == [True, False, None]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", "ZeroDivisionError: division by zero (line 3)"),
        ("return float('nan')", "Out of range float"),
        ("return print", "TypeError"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("return 'x' * 100_000", "more than 20000 characters"),
        ("return 'x' * 10**10", "MemoryError"),
        ("os._exit(3)", "was ended (3)"),  # it cannot pass for a missing sandbox
        ("return 1 1", "SyntaxError"),
        ("return 1\ndel policy", "defines no function policy"),
        ("#" * 30_000, "characters, more than 20000"),
        # The timer cannot be stopped.
        ("import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN)", "not permitted"),
        ("import signal; signal.setitimer(signal.ITIMER_REAL, 0)", "not permitted"),
        # No files, no processes, no signals.
        ("return open('/etc/passwd').read()", "PermissionError"),
        ("return open('/tmp/written', 'w')", "PermissionError"),
        ("os.remove('/etc/passwd')", "PermissionError"),
        ("return os.fork()", "PermissionError"),
        pytest.param(f"os.kill({os.getpid()}, 0)", "PermissionError", id="kill"),
    ],
    ids=lambda value: value[:40],
)
def test_failures_and_what_is_forbidden_are_reported(body: str, message: str) -> None:
    text, failure = run(body)
    assert message in failure and not text


def test_a_program_has_no_network_no_environment_and_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.settimeout(0.2)
        port = listening.getsockname()[1]
        # Through the C library, because a refusal by Python would prove nothing.
        code = f"""
import ctypes, os, struct
libc = ctypes.CDLL(None, use_errno=True)
def policy(k):
    opened = libc.socket(2, 1, 0)
    address = struct.pack('<H', 2) + struct.pack('>H', {port}) + bytes([127, 0, 0, 1]) + bytes(8)
    connected = libc.connect(opened, address, 16)
    return [opened, connected, libc.fork(), libc.kill(os.getppid() or {os.getpid()}, 0)]
"""
        text, failure = asyncio.run(run_program(code, 8))
        # ctypes cannot even open a library: nothing can be opened any more.
        assert "PermissionError" in failure or json.loads(text) == [-1, -1, -1, -1]
        with pytest.raises(TimeoutError):
            listening.accept()
    run(f"os.system('touch {tmp_path}/here')")
    assert not (tmp_path / "here").exists()
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert "secret" not in run("return dict(os.environ)")[0]


@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "import _thread; lock = _thread.allocate_lock(); lock.acquire(); lock.acquire()",
    ],
)
def test_an_endless_program_is_terminated(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_TIMEOUT", 1)
    assert run(body) == ("", "the program did not end within 1 s")


async def test_a_program_has_its_time_while_this_process_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "_TIMEOUT", 1)
    running = asyncio.create_task(run_program("def policy(k):\n    return k\n", 8))
    while not running.done():
        time.sleep(0.2)  # as forward passes do, between which little else is done
        await asyncio.sleep(0)
    assert await running == ("8", "")


TOKENS = synthetic_probes(8)[0]
HEAD = "import numpy as np\ndef select(features, signals, K):\n    "


async def select(body: str, budget: int = 8) -> list[list[int]]:
    code = body if "def select" in body else HEAD + body
    indices = await select_with_program(SelectionProgram(code), TOKENS, "cdpruner", budget)
    rows: list[list[int]] = indices.tolist()
    return rows


async def test_a_program_has_features_and_every_signal() -> None:
    shapes = {name: [8 if name == "reference" else TOKENS.count] for name in SIGNALS}
    check = f"assert {{n: list(s.shape) for n, s in signals.items()}} == {shapes}"
    assert await select(f"{check}\n    return range(K)") == [list(range(8))] * TOKENS.batch
    best = TOKENS.features.float().norm(dim=2).topk(8).indices.sort(1).values.tolist()
    assert await select("return np.argsort(-np.linalg.norm(features, axis=1))[:K]") == best
    policy = BASE_POLICIES["cdpruner"]
    picks = policy.select_picks(policy.default_params, TOKENS, 8).sort(1).values.tolist()
    assert await select("return signals['reference']") == picks
    for selected, reference in zip(await select(INITIAL_PROGRAM), picks, strict=True):
        assert len({*selected} & {*reference}) == 7


async def test_images_do_not_influence_one_another_and_n_tokens_run_nothing() -> None:
    for draw in (
        "np.random.permutation(len(features))[:K]",
        "random.sample(range(len(features)), K)",
    ):
        rows = await select(f"import random; return {draw}")
        assert all(row == rows[0] for row in rows)
    rows = await select("raise ValueError", TOKENS.count)
    assert torch.equal(torch.tensor(rows[0]), torch.arange(TOKENS.count))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [0] * K", "1 different indices instead of 8"),
        ("return range(K - 1)", "7 different indices instead of 8"),
        ("return range(-1, K - 1)", "an index outside 0 to"),
        ("return range(len(features) - K + 1, len(features) + 1)", "an index outside 0 to"),
        ("return [0.5] * K", "no list of indices"),
        ("return None", "no list of indices"),
        ("return features['x']", "IndexError"),
        ("import sys; print('7', file=sys.__stdout__); return range(K)", "no list of indices"),
        ("import os; os._exit(0)", "no list of indices"),
        ("import os, sys; os.write(1, b'[]'); os._exit(0)", "0 selections for"),
        # Confined as programs that return states are.
        ("return open('/tmp/written', 'w')", "Permission"),
        ("np.save('/tmp/written.npy', features)", "Permission"),
        ("import os; os.fork()", "Permission"),
        ("import socket; socket.socket()", "Permission|not permitted|No module|import"),
        ("return np.ones(10**9)", "MemoryError|Unable to allocate"),
    ],
    ids=lambda value: value[:40],
)
async def test_other_results_are_errors(body: str, message: str) -> None:
    with pytest.raises(SelectionError, match=message):
        await select(body)
