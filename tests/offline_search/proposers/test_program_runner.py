from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path

import pytest

from offline_search.proposers import program_runner
from offline_search.proposers.program_runner import Output, run_program


def ran(code: str, budget: int = 8) -> Output:
    return asyncio.run(run_program(code, budget))


def test_what_a_program_returns_comes_back_as_json() -> None:
    code = (
        "import math\nprint('noise')\ndef policy(k):\n    return {'k': k, 'root': math.sqrt(k)}\n"
    )
    assert json.loads(ran(code, 16).text) == {"k": 16, "root": 4.0}


def test_json_s_own_words_are_known() -> None:
    found = ran("def policy(k):\n    return [true, false, null]\n")
    assert json.loads(found.text) == [True, False, None]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return 1 / 0", "ZeroDivisionError: division by zero (line 2)"),
        ("return float('nan')", "Out of range float"),
        ("return {1, 2}", "not JSON serializable"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("return 'x' * 100_000", "more than 20000 characters"),
        ("return 'x' * 10**10", "MemoryError"),
    ],
)
def test_whatever_goes_wrong_is_told(body: str, told: str) -> None:
    found = ran(f"def policy(k):\n    {body}\n")
    assert told in found.failure and not found.text


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("def policy(k) return 1", "SyntaxError"),
        ("x = 1", "defines no function policy"),
        ("", "defines no function policy"),
        ("#" * 30_000, "30000 characters"),
    ],
)
def test_what_is_no_program_is_told(code: str, told: str) -> None:
    assert told in ran(code).failure


def test_a_program_reads_and_writes_no_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("42")
    for mode in ("r", "w"):
        code = f"def policy(k):\n    return open({str(tmp_path / 'secret')!r}, {mode!r}).read()\n"
        assert "PermissionError" in ran(code).failure
    assert (tmp_path / "secret").read_text() == "42"
    removes = f"import os\ndef policy(k):\n    os.remove({str(tmp_path / 'secret')!r})\n"
    assert "PermissionError" in ran(removes).failure and (tmp_path / "secret").exists()


def test_a_program_reaches_no_network_starts_nothing_and_signals_nobody(tmp_path: Path) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.settimeout(0.2)
        port = listening.getsockname()[1]
        # By the C library itself: what Python refuses is no lock.
        code = f"""
import ctypes, os, struct
libc = ctypes.CDLL(None, use_errno=True)
def policy(k):
    opened = libc.socket(2, 1, 0)
    address = struct.pack('<H', 2) + struct.pack('>H', {port}) + bytes([127, 0, 0, 1]) + bytes(8)
    connected = libc.connect(opened, address, 16)
    return [opened, connected, libc.fork(), libc.kill(os.getppid() or {os.getpid()}, 0)]
"""
        found = ran(code)
        # ctypes cannot even open a library: nothing can be opened any more.
        assert "PermissionError" in found.failure or json.loads(found.text) == [-1, -1, -1, -1]
        with pytest.raises(TimeoutError):
            listening.accept()
    forks = "import os\ndef policy(k):\n    return os.fork()\n"
    assert "PermissionError" in ran(forks).failure
    starts = f"import os\ndef policy(k):\n    os.system('touch {tmp_path}/here')\n"
    ran(starts)
    assert not (tmp_path / "here").exists()
    signals = f"import os\ndef policy(k):\n    os.kill({os.getpid()}, 0)\n"
    assert "PermissionError" in ran(signals).failure


def test_a_program_sees_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert "secret" not in ran("import os\ndef policy(k):\n    return dict(os.environ)\n").text


def test_a_program_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_runner, "_TIMEOUT", 1.5)
    found = ran("def policy(k):\n    while True: pass\n")
    assert "did not end" in found.failure or "was ended" in found.failure
