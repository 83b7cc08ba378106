from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import vllm_autoprune

PACKAGE = Path(vllm_autoprune.__file__).parent

# What a folder may import from the folders beside it: arrows point down only.
MAY_IMPORT = {
    "ops": set[str](),
    "tpdsl": {"ops", "backbones"},
    "base_policies": {"tpdsl", "ops"},
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


def modules(folder: str) -> list[Path]:
    return sorted((PACKAGE / folder).rglob("*.py"))


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


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_arrows_point_down(folder: str) -> None:
    allowed = {folder, "errors", *MAY_IMPORT[folder]}
    wrong = {
        f"{path.name}: {name}"
        for path in modules(folder)
        for name in imported_by(path)
        if name.startswith("vllm_autoprune.") and name.split(".")[1] not in allowed
    }
    assert wrong == set()


def test_the_core_has_no_import_cycle() -> None:
    paths = {dotted(path): path for folder in MAY_IMPORT for path in modules(folder)}
    graph = {name: imported_by(path) & (paths.keys() - {name}) for name, path in paths.items()}
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError


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


def test_there_is_no_import_cycle_outside_serving() -> None:
    paths = {n: p for n, p in sources().items() if not n.startswith("vllm_autoprune.serving")}
    graph = {name: needed_modules(path, set(paths)) - {name} for name, path in paths.items()}
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_the_core_names_no_server(folder: str) -> None:
    assert modules(folder)
    for path in modules(folder):
        assert not {name.split(".")[0] for name in imported_by(path)} & set(HEAVY), path.name


def test_importing_the_core_loads_no_server() -> None:
    names = ["vllm_autoprune", *(dotted(path) for folder in MAY_IMPORT for path in modules(folder))]
    code = (
        f"import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert ran.stdout.strip() == "[]"


# Rooms of serving, sorted by process; what each may import of the others. `compat` is below all.
SHARED = {"compat", "settings", "plan", "served_state"}
SERVING = {
    "compat": set[str](),
    "hooks": set[str](),
    "settings": {"compat"},
    "plan": {"compat"},
    "served_state": {"compat", "plan", "settings"},
    "encoder_budget": {"plan"},
    "api": SHARED,
    "worker": SHARED,
    "models": SHARED | {"api", "worker"},
    "startup": SHARED | {"hooks", "api", "models"},
    "plugin": {"compat", "settings", "startup"},
}


def serving_modules(room: str) -> list[Path]:
    folder = PACKAGE / "serving" / room
    return sorted(folder.glob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def test_every_module_of_serving_is_in_a_room() -> None:
    listed = {path for room in SERVING for path in serving_modules(room)}
    assert listed == set(modules("serving")) - {PACKAGE / "serving" / "__init__.py"}


@pytest.mark.parametrize("room", SERVING)
def test_rooms_of_serving_import_only_lower_rooms(room: str) -> None:
    """Above all: API server and worker are separate processes and never import each other."""
    allowed = {room, *SERVING[room]}
    wrong = {
        f"{path.name}: {name}"
        for path in serving_modules(room)
        for name in imported_by(path)
        if name.startswith("vllm_autoprune.serving.") and name.split(".")[2] not in allowed
    }
    assert wrong == set()


def test_serving_has_no_import_cycle() -> None:
    paths = {dotted(path): path for path in modules("serving")}
    graph = {name: imported_by(path) & (paths.keys() - {name}) for name, path in paths.items()}
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError
