"""Size of the repository against ``budgets.toml``."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGETS = tomllib.loads((ROOT / "budgets.toml").read_text(encoding="utf-8"))
AREAS = BUDGETS["nodes"]


def files(suffix: str) -> Iterator[Path]:
    """Files of the repository, without environments, caches and what commands write."""
    for path in ROOT.rglob(f"*{suffix}"):
        parts = path.relative_to(ROOT).parts
        if not any(part.startswith(".") or part in ("out", "dist") for part in parts):
            yield path


def measure() -> dict[str, Counter[str]]:
    """Syntax nodes, lines and public names of each area; a file is in the most specific one."""
    sizes: dict[str, Counter[str]] = {area: Counter() for area in AREAS}
    for path in files(".py"):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        inside = (area for area in AREAS if name.startswith(f"{area}/"))
        size = sizes[max(inside, key=len, default="other")]
        tree = ast.parse(text)
        size["nodes"] += sum(1 for _ in ast.walk(tree))
        size["lines"] += text.count("\n")
        if path.name.startswith("_") and path.name != "__init__.py":
            continue  # nothing is imported from a module such as __main__.py
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                size["names"] += not node.name.startswith("_")
    return sizes


PAGES = {"README.md": 1_100, "docs/index.md": 600}
"""Words of the pages that are read first."""


def test_nothing_is_above_its_budget() -> None:
    sizes = measure()
    source = sum((size for area, size in sizes.items() if area != "tests"), Counter[str]())
    names = 1000 * source["names"] / source["lines"]
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in files(".md"))
    above = {f"nodes of {area}": sizes[area]["nodes"] - AREAS[area] for area in AREAS} | {
        "public names per 1,000 lines": names - BUDGETS["public_names_per_1000_lines"],
        "words of documents": words - BUDGETS["words"],
    }
    for page, most in PAGES.items():
        above[f"words of {page}"] = len((ROOT / page).read_text(encoding="utf-8").split()) - most
    assert {what: excess for what, excess in above.items() if excess > 0} == {}


VAGUE = {"one", "own", "first", "given", "whole", "left"}
"""Names that do not say what they hold: name the row, the interval, the state."""


def test_no_local_has_a_name_that_says_nothing() -> None:
    places = set()
    for path in files(".py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            for node in ast.walk(function):
                place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
                if isinstance(node, ast.arg) and node.arg in VAGUE:
                    places.add(f"{place}: {node.arg}")
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    places.update(f"{place}: {name}" for name in VAGUE & {node.id})
    assert sorted(places) == []
