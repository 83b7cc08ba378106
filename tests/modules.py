"""Modules of the repository, and what each imports."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import vllm_autoprune

PACKAGE = Path(vllm_autoprune.__file__).parent


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# Every module of the repository except tests, scripts and the entry point.
SOURCES = {
    dotted(path): path
    for top in ("vllm_autoprune", "offline_search", "benchmarks")
    for path in (PACKAGE.parent / top).rglob("*.py")
}


@cache
def imported_modules(path: Path) -> frozenset[str]:
    """Modules in the import statements of a file, wherever they stand.

    Of ``from package import name`` it is the submodule, if the name is one, or else the package.
    """
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path.name}: a relative import"
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            modules.update(name if name in SOURCES else node.module for name in names)
    return frozenset(modules)
