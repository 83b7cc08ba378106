"""Commands as they are typed: what they print, and their JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_autoprune.cli.main import main

Captured = pytest.CaptureFixture[str]


def run(capsys: Captured, call: str, *words: str, status: int = 0) -> str:
    """What a command prints; ``call`` has its first words, ``words`` are any others."""
    assert main([*call.split(), *words]) == status
    return capsys.readouterr().out


def run_json(capsys: Captured, call: str, *words: str, status: int = 0) -> Any:
    """The record that a command prints under ``--json``."""
    return json.loads(run(capsys, call, *words, "--json", status=status))
