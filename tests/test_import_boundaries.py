from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import vllm_autoprune

PACKAGE = Path(vllm_autoprune.__file__).parent

# What a room may import of the rooms beside it: arrows point down only. Of serving, sorted by
# process: API server and worker are separate processes and never import each other.
SHARED = {"hooks", "compat", "settings", "plan", "served_state"}
CORE = {
    "ops": set[str](),
    "tpdsl": {"ops", "backbones"},
    "base_policies": {"tpdsl", "ops"},
}
SERVING = {
    "hooks": set[str](),
    "compat": {"hooks"},
    "settings": {"compat"},
    "plan": {"compat"},
    "served_state": {"hooks", "compat", "plan", "settings"},
    "encoder_budget": {"hooks", "plan"},
    "api": SHARED,
    "worker": SHARED,
    "models": SHARED | {"api", "worker"},
    "startup": SHARED | {"api", "models"},
    "plugin": {"hooks", "compat", "settings", "startup"},
}
# All packages of the repository, lowest first: a package imports itself and those of lower layers.
LAYERS = (
    {"vllm_autoprune.errors"},
    {"vllm_autoprune.http_client"},
    {"vllm_autoprune.backbones"},
    {"vllm_autoprune.cost"},
    {"vllm_autoprune.statistics"},
    {"vllm_autoprune.record_file"},
    {"vllm_autoprune.report"},
    {"vllm_autoprune.advise"},
    {"vllm_autoprune.probe"},
    {"vllm_autoprune.ops"},
    {"vllm_autoprune.tpdsl"},
    {"vllm_autoprune.base_policies"},
    {"vllm_autoprune.serving"},
    {"vllm_autoprune.checkpoint", "vllm_autoprune.selftest"},
    {"vllm_autoprune.explain"},
    {"vllm_autoprune.picture"},
    {"vllm_autoprune.evaluation"},
    {"offline_search"},
    {"vllm_autoprune.cli"},
    {"benchmarks"},
)
HEAVY = ("vllm", "transformers")


def modules(room: str) -> list[Path]:
    """Files of a room: a folder of the package, or one module."""
    folder = PACKAGE / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_by(path: Path) -> set[str]:
    """Every absolute module name in the import statements of a file, wherever they stand."""
    actual: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            actual.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path.name}: a relative import"
            actual.add(node.module)
            actual.update(f"{node.module}.{alias.name}" for alias in node.names)
    return actual


@pytest.mark.parametrize(
    ("room", "prefix", "allowed"),
    [
        *((room, "vllm_autoprune.", {"errors", *rooms}) for room, rooms in CORE.items()),
        *((f"serving/{room}", "vllm_autoprune.serving.", rooms) for room, rooms in SERVING.items()),
    ],
)
def test_arrows_point_down(room: str, prefix: str, allowed: set[str]) -> None:
    rooms = {room.rpartition("/")[2], *allowed}
    wrong = {
        f"{path.name}: {name}"
        for path in modules(room)
        for name in imported_by(path)
        if name.startswith(prefix) and name.removeprefix(prefix).split(".")[0] not in rooms
    }
    assert wrong == set()


def test_every_module_of_serving_is_in_a_room() -> None:
    listed = {path for room in SERVING for path in modules(f"serving/{room}")}
    assert listed == set(modules("serving")) - {PACKAGE / "serving" / "__init__.py"}


def sources() -> dict[str, Path]:
    """Every module of the repository except tests and scripts."""
    root = PACKAGE.parent
    paths = [p for top in (PACKAGE, root / "offline_search", root / "benchmarks")
             for p in top.rglob("*.py")]  # fmt: skip
    return {dotted(path): path for path in paths}


def package(module: str) -> str:
    """The entry of :data:`LAYERS` that a module belongs to, or its own name."""
    known = set().union(*LAYERS)
    parts = module.split(".")
    return next((p for p in (parts[0], ".".join(parts[:2])) if p in known), module)


def test_every_package_has_a_layer() -> None:
    known = set().union(*LAYERS)
    assert {package(module) for module in sources()} - known == {"vllm_autoprune"}


def test_no_package_imports_a_higher_one() -> None:
    layer = {name: number for number, names in enumerate(LAYERS) for name in names}
    modules_by_name = sources()
    wrong = {
        f"{module} imports {name}"
        for module, path in modules_by_name.items()
        if (importer := package(module)) in layer
        for name in imported_by(path) & modules_by_name.keys()
        if (other := package(name)) in layer
        and other != importer
        and layer[other] >= layer[importer]
    }
    assert wrong == set()


def needed_modules(path: Path, known: set[str]) -> set[str]:
    """Modules that a file needs; of ``from package import module`` the module only."""
    needed: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            needed.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            needed.update(name if name in known else node.module for name in names)
    return needed & known


def test_there_is_no_import_cycle() -> None:
    paths = sources()
    graph = {name: needed_modules(path, set(paths)) - {name} for name, path in paths.items()}
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError


def test_the_core_names_and_loads_no_server() -> None:
    core = [path for room in CORE for path in modules(room)]
    for path in core:
        assert not {name.split(".")[0] for name in imported_by(path)} & set(HEAVY), path.name
    names = ["vllm_autoprune", *map(dotted, core)]
    code = (
        f"import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert ran.stdout.strip() == "[]"
