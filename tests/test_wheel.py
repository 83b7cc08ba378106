"""The wheel stands alone: built from the sdist, and used where this checkout cannot be seen."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from scripts.release import Wheel
from vllm_autoprune.serving.compat import BELOW, LOWEST

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    (archive,) = SdistBuilder(str(ROOT)).build(
        directory=str(folder), versions=["standard"]
    )
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the sdist's wheel installs."""
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = WheelBuilder(str(source)).build(
        directory=str(folder), versions=["standard"]
    )
    with zipfile.ZipFile(path) as opened:
        opened.extractall(folder / "installed")
    return folder / "installed"


CALLS = """
validate cdpruner
list
show cdpruner
diff cdpruner divprune
atoms --group safety_checks
atoms --schema
materialize cdpruner --budget 64 -o state.json
cost --backbone qwen3-vl-8b
advise --questions 1 --tokens 576 --budget 64 --tower-ms 50 --prefill-ms-per-token 1
search --help
eval --suite lmms:mme --served-name m --server-url http://h:1 --dry-run
selftest --help
"""
"""The smallest form of every command that needs neither a server, a network nor seconds."""

ALL_IN_ONE = f"""
import contextlib, importlib.util, sys, vllm_autoprune, offline_search
with contextlib.suppress(ImportError):
    import torchvision_without_ops  # a .pth file loads it elsewhere
for module in (vllm_autoprune, offline_search):
    assert module.__file__.startswith(sys.argv[1]), module.__file__
assert importlib.util.find_spec("benchmarks") is None, "the checkout can be seen"
from vllm_autoprune.cli.commands import SUMMARIES
from vllm_autoprune.cli.main import main
def run(*words):
    try:
        return main(words)
    except SystemExit as ended:
        return ended.code
calls = [line.split() for line in {CALLS!r}.strip().splitlines()]
assert set(SUMMARIES) - {{call[0] for call in calls}} == {{"explain", "doctor"}}, "seconds"
calls += [[name, "--help"] for name in SUMMARIES]
failed = [call for call in calls if run(*call) != 0]
raise SystemExit(f"failed: {{failed}}" if failed else 0)
"""


def test_every_command_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """-S reads no .pth file, and so not that of the editable installation."""
    paths = f"{wheel}:{sysconfig.get_paths()['purelib']}"
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": paths,
    }
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    ran = subprocess.run(
        [sys.executable, "-S", "-c", ALL_IN_ONE, str(wheel)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    output = ran.stdout + ran.stderr
    assert ran.returncode == 0, output[-4000:]
    assert "cdpruner: valid" in output and "clone the repository" not in output


def test_the_sdist_builds_the_wheel_of_this_checkout(source: Path, wheel: Path) -> None:
    here = {
        f.distribution_path for f in WheelBuilder(str(ROOT)).recurse_included_files()
    }
    information = f"vllm_autoprune-{version('vllm-autoprune')}.dist-info"
    inside = {
        path.relative_to(wheel).as_posix()
        for path in wheel.rglob("*")
        if path.is_file()
    }
    assert {name for name in inside if not name.startswith(information)} == here
    packages = {"vllm_autoprune", "vllm_autoprune_command.py", "offline_search"}
    assert {name.split("/")[0] for name in here} == packages
    plugin = "vllm_autoprune/evaluation/lmms_plugin/autoprune_lmms-1.dist-info/entry_points.txt"
    assert here >= {"vllm_autoprune/policies/autoprune.json", plugin}
    assert (wheel / information / "METADATA").read_text().count("\nProject-URL: ") >= 2
    entries = (wheel / information / "entry_points.txt").read_text()
    assert "vllm-autoprune = vllm_autoprune_command:main" in entries
    for name in (
        "README.md",
        "LICENSE",
        "CITATION.cff",
        "docs/index.md",
        "examples",
        "Dockerfile",
    ):
        assert (source / name).exists(), name


def test_a_release_is_checked_beside_every_vllm_that_the_plugin_accepts(
    wheel: Path,
) -> None:
    minors = [f"{LOWEST.major}.{minor}" for minor in range(LOWEST.minor, BELOW.minor)]
    assert Wheel(wheel).supported_vllm() == minors
