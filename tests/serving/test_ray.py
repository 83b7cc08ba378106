"""vLLM's Ray executor: two workers in a local cluster, which are given no flags of their own.

Ray is not in the lock, because it is large and nothing else needs it: the test installs it.
``ray_on_cpu/README.md`` says how it runs on a CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.serving.runners import Runner

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.timeout(1500)]

RAY = "ray==2.60.0"
PLATFORM = Path(__file__).with_name("ray_on_cpu")


@pytest.fixture(scope="module")
def environment(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Ray and the platform plugin on ``PYTHONPATH``."""
    folder = tmp_path_factory.mktemp("ray")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*pip, folder, RAY], check=True, timeout=600)
    before = runner.environment.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(filter(None, [before, str(PLATFORM), str(folder)]))
    return {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.mark.scenarios("two_ranks")
def test_workers_in_a_ray_cluster_select_as_processes_do(
    runner: Runner, environment: Mapping[str, str]
) -> None:
    report = runner.run("two_ray_workers", environment, patience=900)
    assert len(set(report["actors"])) == 2 and all(report["actors"])
    expected = runner.run("two_ranks")
    assert expected["actors"] == ["", ""]
    assert report["kept"] == expected["kept"]
    assert report["answers"] == expected["answers"]
    assert report["parts"] == expected["parts"]
