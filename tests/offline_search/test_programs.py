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
from offline_search.programs import SIGNALS, Output, run_program, select_with_program
from offline_search.prompt import INITIAL_PROGRAM
from vllm_autoprune.errors import SelectionError
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.safety import synthetic_probes


def run(code: str, budget: int = 8) -> Output:
    return asyncio.run(run_program(code, budget))


def test_the_return_value_is_json() -> None:
    code = (
        "import math\nprint('noise')\ndef policy(k):\n    return {'k': k, 'root': math.sqrt(k)}\n"
    )
    assert json.loads(run(code, 16).text) == {"k": 16, "root": 4.0}


def test_json_constants_are_defined() -> None:
    output = run("def policy(k):\n    return [true, false, null]\n")
    assert json.loads(output.text) == [True, False, None]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", "ZeroDivisionError: division by zero (line 2)"),
        ("return float('nan')", "Out of range float"),
        ("return {1, 2}", "not JSON serializable"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("return 'x' * 100_000", "more than 20000 characters"),
        ("return 'x' * 10**10", "MemoryError"),
    ],
)
def test_runtime_errors_are_reported(body: str, message: str) -> None:
    output = run(f"def policy(k):\n    {body}\n")
    assert message in output.failure and not output.text


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def policy(k) return 1", "SyntaxError"),
        ("x = 1", "defines no function policy"),
        ("", "defines no function policy"),
        ("#" * 30_000, "30000 characters"),
    ],
)
def test_invalid_programs_are_reported(code: str, message: str) -> None:
    assert message in run(code).failure


def test_a_program_cannot_pass_for_a_missing_sandbox() -> None:
    output = run("import os\ndef policy(k):\n    os._exit(3)\n")
    assert "was ended (3)" in output.failure


def test_a_program_cannot_access_files(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("42")
    for mode in ("r", "w"):
        code = f"def policy(k):\n    return open({str(tmp_path / 'secret')!r}, {mode!r}).read()\n"
        assert "PermissionError" in run(code).failure
    assert (tmp_path / "secret").read_text() == "42"
    removes = f"import os\ndef policy(k):\n    os.remove({str(tmp_path / 'secret')!r})\n"
    assert "PermissionError" in run(removes).failure and (tmp_path / "secret").exists()


def test_a_program_has_no_network_processes_or_signals(tmp_path: Path) -> None:
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
        output = run(code)
        # ctypes cannot even open a library: nothing can be opened any more.
        assert "PermissionError" in output.failure or json.loads(output.text) == [-1, -1, -1, -1]
        with pytest.raises(TimeoutError):
            listening.accept()
    forks = "import os\ndef policy(k):\n    return os.fork()\n"
    assert "PermissionError" in run(forks).failure
    starts = f"import os\ndef policy(k):\n    os.system('touch {tmp_path}/here')\n"
    run(starts)
    assert not (tmp_path / "here").exists()
    signals = f"import os\ndef policy(k):\n    os.kill({os.getpid()}, 0)\n"
    assert "PermissionError" in run(signals).failure


def test_a_program_sees_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert "secret" not in run("import os\ndef policy(k):\n    return dict(os.environ)\n").text


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import _thread; lock = _thread.allocate_lock(); lock.acquire(); lock.acquire()",
    ],
)
def test_an_endless_program_is_terminated(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_TIMEOUT", 1)
    output = run(f"def policy(k):\n    {program}\n")
    assert output.failure == "the program did not end within 1 s"


@pytest.mark.parametrize(
    "call", ["signal(signal.SIGALRM, signal.SIG_IGN)", "setitimer(signal.ITIMER_REAL, 0)"]
)
def test_a_program_cannot_stop_its_timer(call: str) -> None:
    assert "not permitted" in run(f"import signal\ndef policy(k):\n    signal.{call}\n").failure


async def test_a_program_has_its_time_while_this_process_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "_TIMEOUT", 1)
    running = asyncio.create_task(run_program("def policy(k):\n    return k\n", 8))
    while not running.done():
        time.sleep(0.2)  # as forward passes do, between which little else is done
        await asyncio.sleep(0)
    assert await running == Output("8")


TOKENS = synthetic_probes(8)[0]
HEAD = "import numpy as np\ndef select(features, signals, K):\n    "


async def select(body: str, budget: int = 8) -> list[list[int]]:
    kept = await select_with_program(SelectionProgram(HEAD + body), TOKENS, "cdpruner", budget)
    rows: list[list[int]] = kept.tolist()
    return rows


async def test_a_program_is_given_features_and_every_signal() -> None:
    for name in SIGNALS:
        shape = (8,) if name == "reference" else (TOKENS.count,)
        check = f"assert signals[{name!r}].shape == {shape}"
        assert await select(f"{check}\n    return range(K)") == [list(range(8))] * TOKENS.batch
    norms = TOKENS.features.float().norm(dim=2)
    best = norms.topk(8).indices.sort(1).values.tolist()
    assert await select("return np.argsort(-np.linalg.norm(features, axis=1))[:K]") == best
    policy = BASE_POLICIES["cdpruner"]
    picks = policy.select_picks(policy.default_params, TOKENS, 8).sort(1).values.tolist()
    assert await select("return signals['reference']") == picks
    initial = SelectionProgram(INITIAL_PROGRAM)
    kept = await select_with_program(initial, TOKENS, "cdpruner", 8)
    for own, reference in zip(kept.tolist(), picks, strict=True):
        assert len(set(own) & set(reference)) == 7


async def test_images_do_not_influence_one_another() -> None:
    body = "return np.random.permutation(len(features))[:K]"
    rows = await select(body)
    assert rows == await select(body) and all(row == rows[0] for row in rows)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [0] * K", "1 different indices instead of 8"),
        ("return range(K - 1)", "7 different indices instead of 8"),
        ("return range(-1, K - 1)", "an index outside 0 to"),
        ("return range(len(features) - K + 1, len(features) + 1)", "an index outside 0 to"),
        ("return [0.5] * K", "cannot be interpreted as an integer"),
        ("return None", "TypeError"),
        ("return features['x']", "IndexError"),
        ("import sys; print('7', file=sys.__stdout__); return range(K)", "no list of indices"),
        ("import os; os._exit(0)", "no list of indices"),
        ("import os, sys; os.write(1, b'[]'); os._exit(0)", "0 selections for"),
    ],
)
async def test_other_results_are_errors(body: str, message: str) -> None:
    with pytest.raises(SelectionError, match=message):
        await select(body)


async def test_it_is_confined_as_programs_that_return_states(tmp_path: Path) -> None:
    for body in (
        f"return open({str(tmp_path / 'x')!r}, 'w')",
        f"np.save({str(tmp_path / 'x.npy')!r}, features)",
        "import os; os.fork()",
        "import socket; socket.socket()",
    ):
        with pytest.raises(SelectionError, match=r"Permission|not permitted|No module|import"):
            await select(body)
    assert not list(tmp_path.iterdir())
    with pytest.raises(SelectionError, match=r"MemoryError|Unable to allocate"):
        await select("return np.ones(10**9)")


async def test_all_tokens_are_kept_without_running_it() -> None:
    kept = await select("raise ValueError", TOKENS.count)
    assert torch.equal(torch.tensor(kept[0]), torch.arange(TOKENS.count))
