"""The installed wheel imports nothing outside itself, and its commands run from its files alone."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY_PACKAGES = {"vllm_autoprune", "offline_search", "benchmarks", "tests", "scripts"}


@pytest.fixture(scope="module")
def wheel_files() -> dict[str, Path]:
    """Path in the wheel -> file, as the build backend lists them."""
    files = WheelBuilder(str(ROOT)).recurse_included_files()
    return {file.distribution_path: Path(file.path) for file in files}


def importable(names: set[str]) -> set[str]:
    """Modules and packages that a list of files provides."""
    modules = {name.removesuffix(".py").removesuffix("/__init__") for name in names}
    return {module.replace("/", ".") for module in modules}


def repository_imports(path: Path) -> set[str]:
    """Modules of the repository that a file imports, wherever in the file."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
    return {module for module in modules if module.split(".")[0] in REPOSITORY_PACKAGES}


def test_the_wheel_has_packages_states_and_data(wheel_files: dict[str, Path]) -> None:
    assert {name.split("/")[0] for name in wheel_files} == {
        "vllm_autoprune",
        "vllm_autoprune_command.py",
        "offline_search",
    }
    assert "vllm_autoprune/policies/autoprune.json" in wheel_files
    assert "vllm_autoprune/evaluation/published.json" in wheel_files


def test_no_file_of_the_wheel_imports_what_is_not_in_it(wheel_files: dict[str, Path]) -> None:
    provided = importable({name for name in wheel_files if name.endswith(".py")})
    missing = {
        f"{name} imports {module}"
        for name, path in wheel_files.items()
        if name.endswith(".py")
        for module in repository_imports(path)
        if module not in provided
    }
    assert missing == set()


def test_every_command_runs_from_the_files_of_the_wheel(
    wheel_files: dict[str, Path], tmp_path: Path
) -> None:
    for name, path in wheel_files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, tmp_path / name)
    modules = sorted(
        module
        for module in importable({name for name in wheel_files if name.endswith(".py")})
        if module.startswith(("vllm_autoprune.cli", "vllm_autoprune.evaluation"))
        # Runs in the process of lmms-eval, which is not installed here.
        and ".plugin." not in module
    )
    assert "vllm_autoprune.cli.commands.eval" in modules
    code = f"""
import importlib, pathlib, sys
# An editable installation would find the rest of the repository.
sys.path = [p for p in sys.path if p == {str(tmp_path)!r}
            or not (pathlib.Path(p) / "vllm_autoprune").is_dir()]
for name in {modules!r}:
    assert importlib.import_module(name).__file__.startswith({str(tmp_path)!r}), name
from vllm_autoprune.cli.main import COMMANDS, main
for command in COMMANDS:
    try:
        main([command, "--help"])
    except SystemExit as ended:
        assert ended.code == 0, command
lmms = ["eval", "--suite", "lmms:mme", "--served-name", "m", "--arm", "full=http://h:1"]
assert main([*lmms, "--dry-run"]) == 0
assert main(["validate", "autoprune"]) == 0
"""
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "autoprune: valid" in ran.stdout and "clone the repository" not in ran.stdout
