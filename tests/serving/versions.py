"""Hooks of vLLM releases that cannot be installed here, recorded by what their sources say.

``PYTHONPATH=.next python -m tests.serving.versions`` writes the record of the release whose sources
``make test-next`` has fetched.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_autoprune import serving
from vllm_autoprune.serving.compat import collect_hooks, vllm_version

Symbol = dict[str, str]
"""Definition of one name: its ``kind``; ``called``, a function's parameters with their defaults and
without annotations, or a class's bases; ``code``, a digest of its lines without comments and
docstrings, empty for a value."""


def look_up(module: str, name: str) -> Symbol:  # noqa: C901
    """The symbol ``module.name``, dotted where it is an attribute; raises where there is none."""
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        # Not bound to its class; what a module makes by ``__getattr__`` is nowhere static.
        static = inspect.getattr_static(value, part, None)
        value = getattr(value, part) if static is None else static
    if inspect.ismodule(value):
        return {"kind": "module", "called": "", "code": ""}
    value = value.fget if isinstance(value, property) else value
    value = inspect.unwrap(getattr(value, "__func__", value))
    try:
        source = inspect.getsource(value)
        # A method, whose docstring may have lines at the margin.
        source = f"if True:\n{source}" if source.startswith(" ") else source
        node = ast.parse(source).body[0]
        node = node.body[0] if isinstance(node, ast.If) else node
    except (TypeError, OSError):
        node = ast.Pass()
    if isinstance(node, ast.ClassDef):
        called = f"({', '.join(map(ast.unparse, node.bases))})"
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        called = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
        called += f"({ast.unparse(node.args)})"
    else:
        return {"kind": "value", "called": "", "code": ""}
    # Digest of the lines of code, equal under every Python version that parses them.
    lines = dict(
        enumerate(source.splitlines()[node.lineno - 1 : node.end_lineno], node.lineno)
    )
    definitions = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for inner in ast.walk(node):
        if (
            isinstance(inner, definitions)
            and ast.get_docstring(inner, clean=False) is not None
        ):
            docstring = inner.body[0]
            for number in range(
                docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1
            ):
                lines.pop(number, None)
    code = [line.strip() for line in lines.values()]
    text = "\n".join(line for line in code if line and not line.startswith("#"))
    kind = "class" if isinstance(node, ast.ClassDef) else "function"
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return {"kind": kind, "called": called, "code": digest}


def find_imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of every import from vLLM that happens at run time."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            for other in child.orelse:
                yield from find_imports(other)
        elif (
            isinstance(child, ast.ImportFrom)
            and (child.module or "").split(".")[0] == "vllm"
        ):
            yield from ((child.module or "", alias.name) for alias in child.names)
        else:
            yield from find_imports(child)


def look_up_hooks() -> dict[str, Symbol]:
    """Every hook in the release that is installed here, or before it on the path."""
    hooks, problems = collect_hooks()
    assert not problems
    always = [hook for hook in hooks if not hook.optional]
    names = {(hook.module, name) for hook in always for name in hook.names}
    owners = {(module, name.partition(".")[0]) for module, name in names}
    modules = {module for module, _ in names}
    for path in Path(serving.__file__).parent.rglob("*.py"):
        imports = set(find_imports(ast.parse(path.read_text(encoding="utf-8"))))
        names |= {(m, n) for m, n in imports - owners if f"{m}.{n}" not in modules}
    return {f"{module}.{name}": look_up(module, name) for module, name in names}


def read_records() -> dict[str, dict[str, Symbol]]:
    """The hooks of every release that is recorded beside this file, by its version."""
    files = sorted(Path(__file__).parent.glob("vllm-*.json"))
    records = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return {record["version"]: record["symbols"] for record in records}


if __name__ == "__main__":
    version = vllm_version().base_version
    record = {"version": version, "symbols": dict(sorted(look_up_hooks().items()))}
    file = Path(__file__).with_name(f"vllm-{version}.json")
    file.write_text(
        json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
