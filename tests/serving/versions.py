"""Hooks of vLLM releases that cannot be installed here, recorded by what their sources say.

``PYTHONPATH=.next python -m tests.serving.versions`` writes the record of the release whose sources
``make test-next`` has fetched.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from vllm_autoprune import serving
from vllm_autoprune.serving.compat import collect_hooks, vllm_version

_DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Symbol(BaseModel):
    """Definition of one name.

    ``called`` has a function's parameters with their defaults and without annotations, or a class's
    bases; ``code`` is a digest of its lines without comments and docstrings, empty for a value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["class", "function", "value", "module"]
    called: str = ""
    code: str = ""


class Release(BaseModel):
    """The hooks of one release."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str
    symbols: dict[str, Symbol]


def look_up(module: str, name: str) -> Symbol:
    """The symbol ``module.name``, dotted where it is an attribute; raises where there is none."""
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        # Not bound to its class; what a module makes by ``__getattr__`` is nowhere static.
        static = inspect.getattr_static(found, part, None)
        found = getattr(found, part) if static is None else static
    if inspect.ismodule(found):
        return Symbol(kind="module")
    found = found.fget if isinstance(found, property) else found
    function = inspect.unwrap(getattr(found, "__func__", found))
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (TypeError, OSError):
        return Symbol(kind="value")
    node = ast.parse(source).body[0]
    match node:
        case ast.ClassDef():
            bases = ", ".join(map(ast.unparse, node.bases))
            return Symbol(kind="class", called=f"({bases})", code=_digest(source, node))
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
            awaited = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
            called = f"{awaited}({ast.unparse(node.args)})"
            return Symbol(kind="function", called=called, code=_digest(source, node))
    return Symbol(kind="value")


def _digest(source: str, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Digest of the lines of code, equal under every Python version that parses them."""
    lines = dict(enumerate(source.splitlines()[node.lineno - 1 : node.end_lineno], node.lineno))
    for inner in ast.walk(node):
        if isinstance(inner, _DEFINITIONS) and ast.get_docstring(inner, clean=False) is not None:
            docstring = inner.body[0]
            for number in range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1):
                lines.pop(number, None)
    code = [line.strip() for line in lines.values()]
    text = "\n".join(line for line in code if line and not line.startswith("#"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of every import from vLLM that happens at run time."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            for other in child.orelse:
                yield from imported(other)
        elif isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] == "vllm":
            yield from ((child.module or "", alias.name) for alias in child.names)
        else:
            yield from imported(child)


def installed() -> Release:
    """The release that is installed here, or before it on the path."""
    hooks, problems = collect_hooks()
    assert not problems
    names = {(hook.module, name) for hook in hooks for name in hook.names}
    owners = {(module, name.partition(".")[0]) for module, name in names}
    modules = {module for module, _ in names}
    for path in Path(serving.__file__).parent.rglob("*.py"):
        imports = set(imported(ast.parse(path.read_text(encoding="utf-8"))))
        names |= {(m, n) for m, n in imports - owners if f"{m}.{n}" not in modules}
    symbols = {f"{module}.{name}": look_up(module, name) for module, name in names}
    return Release(version=vllm_version().base_version, symbols=symbols)


def recorded() -> list[Release]:
    """Every release that is recorded beside this file."""
    files = sorted(Path(__file__).parent.glob("vllm-*.json"))
    return [Release.model_validate_json(file.read_text(encoding="utf-8")) for file in files]


if __name__ == "__main__":
    release = installed()
    record = Path(__file__).with_name(f"vllm-{release.version}.json")
    record.write_text(release.model_dump_json(indent=1) + "\n", encoding="utf-8")
