"""Size of the repository against ``budgets.toml``."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGETS = tomllib.loads((ROOT / "budgets.toml").read_text(encoding="utf-8"))


@cache
def files(suffix: str) -> list[Path]:
    """Files of the repository, without environments, caches and what commands write."""
    paths: list[Path] = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if not (name.startswith(".") or name in ("out", "dist"))
        ]
        shown = (name for name in names if not name.startswith("."))
        paths += [Path(folder, name) for name in shown if name.endswith(suffix)]
    return paths


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_nothing_is_above_its_budget() -> None:
    areas = BUDGETS["nodes"]

    def measure() -> dict[str, Counter[str]]:
        """Syntax nodes, lines and public names of each area; a file is in the most specific one."""
        sizes: dict[str, Counter[str]] = {area: Counter() for area in areas}
        for path in files(".py"):
            text = path.read_text(encoding="utf-8")
            name = path.relative_to(ROOT).as_posix()
            inside = (area for area in areas if name.startswith(f"{area}/"))
            size = sizes[max(inside, key=len, default="other")]
            tree = parse(path)
            size["nodes"] += sum(1 for _ in ast.walk(tree))
            size["lines"] += text.count("\n")
            if path.name.startswith("_") and path.name != "__init__.py":
                continue  # nothing is imported from a module such as __main__.py
            for node in tree.body:
                if isinstance(
                    node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
                ):
                    size["names"] += not node.name.startswith("_")
        return sizes

    # Words of the pages that are read first.
    pages = {"README.md": 1_100, "docs/index.md": 600}
    sizes = measure()
    source = sum(
        (size for area, size in sizes.items() if area != "tests"), Counter[str]()
    )
    names = 1000 * source["names"] / source["lines"]
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in files(".md"))
    above = {
        f"nodes of {area}": sizes[area]["nodes"] - areas[area] for area in areas
    } | {
        "public names per 1,000 lines": names - BUDGETS["public_names_per_1000_lines"],
        "words of documents": words - BUDGETS["words"],
    }
    for page, maximum in pages.items():
        above[f"words of {page}"] = (
            len((ROOT / page).read_text(encoding="utf-8").split()) - maximum
        )
    assert {what: excess for what, excess in above.items() if excess > 0} == {}


VAGUE = {"one", "own", "first", "given", "whole", "left"}
"""Names that do not say what they hold: name the row, the interval, the state."""


def test_no_local_has_a_name_that_says_nothing() -> None:
    places = [f"{line}: {name}" for line, name in find_locals() if name in VAGUE]
    assert places == []


def test_code_is_not_denser_than_its_limits() -> None:
    # Names that say as little in most places, and can be right in some.
    seldom = VAGUE | {
        "asked", "at", "before", "each", "found", "held", "kept", "known", "least", "made",
        "most", "others", "place", "rest", "right", "same", "several", "shown", "told",
    }  # fmt: skip
    # Rules of ruff with waivers: complexity, arguments, statements, `except Exception`.
    waived = {"C901", "PLR0913", "PLR0915", "BLE001"}

    def is_tuple_assignment(node: ast.AST) -> bool:
        """Whether this is ``a, b = x, y``, which says two things in a statement."""
        return (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple)
            and isinstance(node.value, ast.Tuple)
        )

    def find_waivers(text: str) -> Iterator[list[str]]:
        """Rules that each line of a file waives."""
        for codes in re.findall(r"# noqa: ([A-Z0-9, ]+)", text):
            yield codes.replace(",", " ").split()

    limits = BUDGETS["density"]
    lines = 0
    tuples = 0
    skips = 0
    waivers = 0
    for path in files(".py"):
        text = path.read_text(encoding="utf-8")
        lines += text.count("\n")
        tuples += sum(map(is_tuple_assignment, ast.walk(parse(path))))
        skips += text.count("# fmt: " + "skip")
        waivers += sum(not waived.isdisjoint(codes) for codes in find_waivers(text))
    names = sum(name in seldom for _, name in find_locals())
    above = {
        "tuple assignments per 1,000 lines": 1000 * tuples / lines
        - limits["tuple_assignments_per_1000_lines"],
        "vague names per 1,000 lines": 1000 * names / lines
        - limits["vague_names_per_1000_lines"],
        "`# fmt: " + "skip`": skips - limits["format_skips"],
        "waived rules": waivers - limits["waivers"],
    }
    assert {what: excess for what, excess in above.items() if excess > 0} == {}


@cache
def find_locals() -> list[tuple[str, str]]:
    """Place and name of each argument, and of each assignment to a local variable."""
    names: dict[tuple[str, int, int], str] = {}
    for path in files(".py"):
        for function in ast.walk(parse(path)):
            if not isinstance(
                function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
            ):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.arg):
                    names[str(path), node.lineno, node.col_offset] = node.arg
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names[str(path), node.lineno, node.col_offset] = node.id
    return [(f"{path}:{line}", name) for (path, line, _), name in names.items()]
