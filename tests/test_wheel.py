"""The wheel stands alone: built from the sdist, installed into an environment of its own, and used.

That environment sees the packages of this one, vLLM among them, but neither this checkout nor its
editable installation.
"""

from __future__ import annotations

import ast
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

from vllm_autoprune.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY_PACKAGES = {"vllm_autoprune", "offline_search", "benchmarks", "tests", "scripts"}
CHECKPOINT = ROOT / "benchmarks/yardsticks/weights/minillava"


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


def forms(out: Path) -> dict[str, list[str]]:
    """The smallest form of every command that needs neither a server nor a network."""
    return {
        "validate": ["cdpruner"],
        "list": [],
        "show": ["cdpruner"],
        "diff": ["cdpruner", "divprune"],
        "atoms": ["--group", "safety_checks"],
        "schema": [],
        "materialize": ["cdpruner", "--budget", "64", "-o", str(out / "state.json")],
        "explain": [
            str(ROOT / "docs/images/kept-tokens.png"), "What is this?", "--budget", "16",
            "--checkpoint", str(CHECKPOINT / "llava"), "-o", str(out / "kept.png"),
        ],
        "cost": ["--backbone", "qwen3-vl-8b"],
        "advise": [
            "--questions", "1", "--tokens", "576", "--budget", "64", "--tower-ms", "50",
            "--prefill-ms-per-token", "1", "--request-ms", "5",
        ],
        "search": ["--help"],
        "eval": ["--suite", "lmms:mme", "--served-name", "m", "--arm", "full=http://h:1",
                 "--dry-run"],
        "doctor": [],
        "selftest": ["--help"],
    }  # fmt: skip


SLOW = ("explain", "doctor")
"""Commands that import what takes seconds; they run where all run as programs."""

_ALL_IN_ONE = """
import sys, vllm_autoprune, offline_search
assert vllm_autoprune.__file__.startswith(sys.argv[1]), vllm_autoprune.__file__
assert offline_search.__file__.startswith(sys.argv[1]), offline_search.__file__
try:
    import benchmarks
except ImportError:
    pass
else:
    raise SystemExit("the checkout can be seen")
from vllm_autoprune.cli.main import COMMANDS, main
def run(*arguments):
    try:
        return main(arguments)
    except SystemExit as ended:
        return ended.code
forms = {forms!r}
assert set(COMMANDS) == set({names!r}), set(COMMANDS) ^ set({names!r})
failed = [name for name, arguments in forms.items() if run(name, *arguments) != 0]
failed += [name for name in COMMANDS if run(name, "--help") != 0]
raise SystemExit(f"failed: {{failed}}" if failed else 0)
"""


def environment(home: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(home), "HF_HUB_OFFLINE": "1"}


def test_every_command_runs_from_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    quick = {name: words for name, words in forms(tmp_path).items() if name not in SLOW}
    code = _ALL_IN_ONE.replace("{{failed}}", "{failed}")
    code = code.replace("{forms!r}", repr(quick)).replace("{names!r}", repr(sorted(COMMANDS)))
    ran = subprocess.run(
        [str(installed / "python"), "-c", code, str(installed.parent)],
        cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    assert "cdpruner: valid" in ran.stdout and "clone the repository" not in ran.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(name, marks=pytest.mark.engine if name == "explain" else ())
        for name in COMMANDS
    ],
)
def test_every_command_runs_as_a_program(installed: Path, tmp_path: Path, command: str) -> None:
    arguments = forms(tmp_path)[command]
    ran = subprocess.run(
        [str(installed / "vllm-autoprune"), command, *arguments],
        cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]


def test_the_installed_command_prints_its_version_without_torch(installed: Path) -> None:
    ran = subprocess.run(
        [str(installed / "python"), "-X", "importtime", str(installed / "vllm-autoprune"),
         "--version"],
        env=environment(installed), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert ran.stdout.strip() == version("vllm-autoprune")
    imported = {line.split("|")[-1].strip() for line in ran.stderr.splitlines()}
    assert "vllm_autoprune_command" in imported
    assert not {"torch", "vllm_autoprune"} & imported


def test_the_sdist_builds_the_wheel_of_this_checkout(source: Path, wheel: Path) -> None:
    files = WheelBuilder(str(ROOT)).recurse_included_files()
    here = {file.distribution_path for file in files}
    with zipfile.ZipFile(wheel) as opened:
        metadata = f"vllm_autoprune-{version('vllm-autoprune')}.dist-info/"
        inside = {name for name in opened.namelist() if not name.startswith(metadata)}
        text = opened.read(f"{metadata}METADATA").decode()
    assert inside == here
    assert {name.split("/")[0] for name in inside} == {
        "vllm_autoprune", "vllm_autoprune_command.py", "offline_search",
    }  # fmt: skip
    assert "vllm_autoprune/policies/autoprune.json" in inside
    assert "vllm_autoprune/evaluation/published.json" in inside
    assert text.count("\nProject-URL: ") >= 2
    for name in ("README.md", "LICENSE", "CITATION.cff", "docs/index.md", "examples", "Dockerfile"):
        assert (source / name).exists(), name


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


def test_no_file_of_the_wheel_imports_what_is_not_in_it() -> None:
    listed = WheelBuilder(str(ROOT)).recurse_included_files()
    files = {file.distribution_path: Path(file.path) for file in listed}
    provided = importable({name for name in files if name.endswith(".py")})
    missing = {
        f"{name} imports {module}"
        for name, path in files.items()
        if name.endswith(".py")
        for module in repository_imports(path)
        if module not in provided
    }
    assert missing == set()
