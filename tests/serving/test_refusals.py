"""Invalid settings stop a server before it loads weights, with all problems in one message."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.server import CPU_ENVIRONMENT, command, free_port
from tests.serving.paths import LLAVA

pytestmark = pytest.mark.engine


def refused(*flags: str) -> str:
    done = subprocess.run(
        command(LLAVA, free_port(), ("--enforce-eager", *flags)),
        env={**os.environ, **CPU_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1
    output = done.stdout + done.stderr
    assert "Traceback" not in output
    assert "Loading safetensors" not in output
    return output


def test_all_problems_are_reported_with_pointers(tmp_path: Path) -> None:
    state = json.loads((Path(__file__).parents[2] / "policies" / "autoprune.json").read_text())
    state["scoring"]["signals"][3]["m"] = 0
    state["constraints"]["selector"]["atom"] = "reference_residual_exchange_selecto"
    file = tmp_path / "state.json"
    file.write_text(json.dumps(state))
    output = refused(
        "--autoprune-state", str(file), "--autoprune-budget", "0",
        "--autoprune-text-tower", str(tmp_path), "--autoprune-feature-cache-gb", "much",
    )  # fmt: skip
    assert f"{file}#/scoring/signals/3/m" in output
    assert f"{file}#/constraints/selector/atom" in output
    assert "did you mean 'reference_residual_exchange_selector'" in output
    for flag in ("budget", "text-tower", "feature-cache-gb"):
        assert f"- --autoprune-{flag}" in output


def test_a_budget_without_a_state() -> None:
    output = refused("--autoprune-budget", "16")
    assert "--autoprune-state: no state is given" in output
