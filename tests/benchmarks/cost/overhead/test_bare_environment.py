from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.cost.overhead.bare_environment import build_bare_environment


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_the_environment_has_vllm_and_no_plugin(tmp_path: Path) -> None:
    vllm = build_bare_environment(tmp_path)
    shown = subprocess.run(
        [vllm, "serve", "--help=all"],
        env={"VLLM_LOGGING_LEVEL": "ERROR", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "--max-model-len" in shown
    assert "--autoprune" not in shown
