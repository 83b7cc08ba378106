"""Draw docstrings and module names at random, to be read by somebody new to the project.

``python scripts/draw_names.py --seed 1`` prints forty docstrings and thirty modules with the places
where they stand. A sentence or a name that needs a second reading is to be rewritten.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("vllm_autoprune", "offline_search", "benchmarks", "tests")
DOCSTRINGS, MODULES = 40, 30


def main() -> None:
    """Print one draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    docstrings = [docstring for path in paths for docstring in read_docstrings(path)]
    for place, name, text in rng.sample(docstrings, DOCSTRINGS):
        print(f"{place} {name}\n    " + text.replace("\n", "\n    "))
    print()
    modules = [path for path in paths if path.stem not in ("__init__", "__main__")]
    for path in rng.sample(modules, MODULES):
        print(f"{path.relative_to(ROOT)}:1")


def read_docstrings(path: Path) -> Iterator[tuple[str, str, str]]:
    """(file:line, name, text) of each docstring in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                line = node.body[0].lineno
                name = "(module)" if isinstance(node, ast.Module) else node.name
                yield f"{path.relative_to(ROOT)}:{line}", name, text


if __name__ == "__main__":
    main()
