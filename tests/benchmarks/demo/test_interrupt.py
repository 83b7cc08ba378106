"""Ctrl-C at any time: one line, status 130, and no process of the server is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]

# The demo as it is, but what it starts is the stand-in.
_SCRIPT = """
import sys
from benchmarks import server
from benchmarks.demo.__main__ import main

def command(model, port, *more):
    return [sys.executable, sys.argv[1], str(port), sys.argv[2], sys.argv[3]]

server.command = command
sys.exit(main(["--model", sys.argv[4], "--text-tower", sys.argv[4], "--scenes", "1",
               "--out", sys.argv[4]]))
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The checkpoint files that are read before a server is ready."""
    text = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 1}
    vision = {"model_type": "clip_vision_model", "image_size": 168, "patch_size": 14}
    config = {"model_type": "llava", "text_config": text, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    return tmp_path


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process with these arguments, which is ended with the block."""
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def await_(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("health", "sent", "status"),
    [
        ("starting", signal.SIGINT, 130),
        ("healthy", signal.SIGTERM, 143),
    ],
)
def test_the_whole_group_of_the_server_is_ended(
    checkpoint: Path, health: str, sent: signal.Signals, status: int
) -> None:
    pids, stand_in = checkpoint / "pids", str(HERE / "hanging_server.py")
    with running("-c", _SCRIPT, stand_in, str(pids), health, str(checkpoint)) as process:
        await_(pids.exists)
        if health == "healthy":
            await_((checkpoint / "pids.asked").exists)
        server, child = map(int, pids.read_text().split())
        assert alive(server) and alive(child)

        process.send_signal(sent)
        time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, sent)  # an impatient second one changes nothing
        out, err = process.communicate(timeout=60)

        assert process.returncode == status
        assert not alive(server) and not alive(child)
    assert out == ""
    assert err.splitlines()[-1] == "demo: stopped, no server is left running"
    assert "Traceback" not in err


def test_an_interrupt_before_any_server_ends_at_once() -> None:
    script = (
        "import time; from benchmarks.demo.__main__ import InterruptHandler; InterruptHandler();"
        "print('ready', flush=True); time.sleep(600)"
    )
    with running("-c", script) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
    assert err == "demo: stopped, no server is left running\n"
