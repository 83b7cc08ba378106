"""The wheel stands alone: built from the sdist, installed into an environment of its own, and used.

That environment sees the packages of this one, vLLM among them, but neither this checkout nor its
editable installation.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    (archive,) = SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that the sdist builds."""
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = WheelBuilder(str(source)).build(directory=str(folder), versions=["standard"])
    return Path(path)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the commands of an environment with the wheel in it, beside vLLM."""
    folder = tmp_path_factory.mktemp("environment")
    venv.EnvBuilder(symlinks=True).create(folder)
    commands = folder / "bin"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(commands / "python"), "install", "--quiet",
         "--no-deps", "--no-index", "--no-compile", str(wheel)],
        check=True, timeout=120,
    )  # fmt: skip
    packages = Path(sysconfig.get_paths(vars={"base": str(folder)})["purelib"])
    # A path in a .pth file is searched, but its own .pth files (the editable one) are not read.
    shared = Path(sysconfig.get_paths()["purelib"])
    lines = [str(shared)]
    if (shared / "torchvision_without_ops.pth").is_file():
        lines.append("import torchvision_without_ops")
    (packages / "shared.pth").write_text("\n".join(lines) + "\n")
    return commands


CALLS = """
validate cdpruner
list
show cdpruner
diff cdpruner divprune
atoms --group safety_checks
schema
materialize cdpruner --budget 64 -o state.json
cost --backbone qwen3-vl-8b
advise --questions 1 --tokens 576 --budget 64 --tower-ms 50 --prefill-ms-per-token 1
search --help
eval --suite lmms:mme --served-name m --server-url http://h:1 --dry-run
selftest --help
"""
"""The smallest form of every command that needs neither a server, a network nor seconds."""

ALL_IN_ONE = f"""
import importlib.util, sys, vllm_autoprune, offline_search
for module in (vllm_autoprune, offline_search):
    assert module.__file__.startswith(sys.argv[1]), module.__file__
assert importlib.util.find_spec("benchmarks") is None, "the checkout can be seen"
from vllm_autoprune.cli.main import COMMANDS, main
def run(*words):
    try:
        return main(words)
    except SystemExit as ended:
        return ended.code
calls = [line.split() for line in {CALLS!r}.strip().splitlines()]
assert set(COMMANDS) - {{call[0] for call in calls}} == {{"explain", "doctor"}}, "seconds"
calls += [[name, "--help"] for name in COMMANDS]
failed = [call for call in calls if run(*call) != 0]
raise SystemExit(f"failed: {{failed}}" if failed else 0)
"""


def test_every_command_runs_from_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [installed / "python", "-c", ALL_IN_ONE, str(installed.parent)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    output = ran.stdout + ran.stderr
    assert ran.returncode == 0, output[-4000:]
    assert "cdpruner: valid" in output and "clone the repository" not in output
    assert (installed / "vllm-autoprune").is_file()


def test_the_sdist_builds_the_wheel_of_this_checkout(source: Path, wheel: Path) -> None:
    files = WheelBuilder(str(ROOT)).recurse_included_files()
    here = {file.distribution_path for file in files}
    with zipfile.ZipFile(wheel) as opened:
        metadata = f"vllm_autoprune-{version('vllm-autoprune')}.dist-info/"
        inside = {name for name in opened.namelist() if not name.startswith(metadata)}
        text = opened.read(f"{metadata}METADATA").decode()
    assert inside == here
    packages = {"vllm_autoprune", "vllm_autoprune_command.py", "offline_search"}
    assert {name.split("/")[0] for name in inside} == packages
    assert "vllm_autoprune/policies/autoprune.json" in inside
    plugin = "vllm_autoprune/evaluation/lmms_plugin/autoprune_lmms-1.dist-info/entry_points.txt"
    assert plugin in inside
    assert text.count("\nProject-URL: ") >= 2
    for name in ("README.md", "LICENSE", "CITATION.cff", "docs/index.md", "examples", "Dockerfile"):
        assert (source / name).exists(), name
