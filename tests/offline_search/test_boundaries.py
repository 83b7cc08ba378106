from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import offline_search
from tests.test_import_boundaries import imported_by

ROOM = Path(offline_search.__file__).parent
MODULES = sorted(ROOM.rglob("*.py"))


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOM.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_the_search_imports_no_server() -> None:
    assert len(MODULES) > 10
    for path in MODULES:
        for name in imported_by(path):
            assert name.split(".")[0] not in ("vllm", "benchmarks", "tests"), path.name
            assert not name.startswith("vllm_autoprune.serving"), path.name


def test_importing_the_search_loads_no_server_and_no_model_library() -> None:
    names = [dotted(path) for path in MODULES]
    code = (
        f"import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(sorted({{'vllm', 'transformers', 'optuna'}} & set(sys.modules)))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert process.stdout.strip() == "[]"


def test_only_the_evaluation_and_the_command_import_the_search() -> None:
    package = ROOM.parent / "vllm_autoprune"
    for path in package.rglob("*.py"):
        if path.relative_to(package).parts[0] in ("cli", "evaluation"):
            continue
        assert not any(name.startswith("offline_search") for name in imported_by(path)), path.name
