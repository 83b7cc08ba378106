"""Lookup of names in Python sources without importing them: definition and call signature."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from tests.serving.versions.sources import Sources

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Symbol:
    """What sources say of one name.

    ``called`` has a function's parameters and their defaults, without annotations, and a class's
    bases. ``code`` is a digest of its lines without comments and docstring; empty for a value.
    """

    kind: Literal["class", "function", "value", "module"]
    where: str
    called: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True)
class _Found:
    """A statement, and the module that it stands in."""

    module: str
    node: ast.AST


def look_up(sources: Sources, module: str, name: str) -> Symbol | None:
    """The symbol ``module.name``, dotted where it is an attribute; None where there is none."""
    found: _Found | None = _Found(module, ast.Module([], []))
    for i, part in enumerate(name.split(".")):
        if found is None:
            return None
        found = _in_module(sources, module, part) if i == 0 else _attribute(sources, found, part)
    return None if found is None else _described(sources, found)


def _described(sources: Sources, found: _Found) -> Symbol:
    node = found.node
    if isinstance(node, ast.Module):
        return Symbol("module", found.module)
    text = _text(sources, found.module) or ""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        return Symbol("class", found.module, f"({bases})", _digest(text, node))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        awaited = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
        called = f"{awaited}({_parameters(node.args)})"
        return Symbol("function", found.module, called, _digest(text, node))
    return Symbol("value", found.module)


def _parameters(arguments: ast.arguments) -> str:
    bare = ast.parse(f"lambda {ast.unparse(_unannotated(arguments))}: 0", mode="eval").body
    assert isinstance(bare, ast.Lambda)
    return ast.unparse(bare.args)


def _unannotated(arguments: ast.arguments) -> ast.arguments:
    copied = ast.parse(f"def f({ast.unparse(arguments)}): ...").body[0]
    assert isinstance(copied, ast.FunctionDef)
    for node in ast.walk(copied.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    return copied.args


def _digest(text: str, node: Definition) -> str:
    """Of the lines that do something: the same for every Python that reads them."""
    lines = dict(enumerate(text.splitlines()[node.lineno - 1 : node.end_lineno], node.lineno))
    for inner in ast.walk(node):
        if isinstance(inner, Definition) and ast.get_docstring(inner, clean=False) is not None:
            said = inner.body[0]
            for number in range(said.lineno, (said.end_lineno or said.lineno) + 1):
                lines.pop(number, None)
    kept = (line.strip() for line in lines.values())
    code = "\n".join(line for line in kept if line and not line.startswith("#"))
    return hashlib.sha256(code.encode()).hexdigest()[:12]


def _in_module(
    sources: Sources, module: str, name: str, passed: frozenset[tuple[str, str]] = frozenset()
) -> _Found | None:
    """``passed``: names that modules import from one another in a circle are nowhere."""
    tree = _tree(sources, module)
    if tree is None or (module, name) in passed:
        return None
    # The last statement that binds a name decides.
    for node in reversed(list(_statements(tree.body))):
        if isinstance(node, Definition) and node.name == name:
            return _Found(module, node)
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
            return _Found(module, node)
        if isinstance(node, ast.ImportFrom):
            imported = _imported(sources, module, node, name, passed)
            if imported is not None:
                return imported
        if _served_by_getattr(node, name):
            return _Found(module, ast.Assign([], ast.Constant(None)))
    below = f"{module}.{name}"
    return _Found(below, ast.Module([], [])) if _tree(sources, below) is not None else None


def _imported(
    sources: Sources,
    module: str,
    node: ast.ImportFrom,
    name: str,
    passed: frozenset[tuple[str, str]],
) -> _Found | None:
    """The definition that one import statement of ``module`` binds to ``name``."""
    for alias in node.names:
        every = alias.name == "*" and not name.startswith("_")
        if not every and (alias.asname or alias.name) != name:
            continue
        origin = _absolute(sources, module, node)
        definition = _in_module(
            sources, origin, name if every else alias.name, passed | {(module, name)}
        )
        if definition is not None:
            return definition
    return None


def _served_by_getattr(node: ast.stmt, name: str) -> bool:
    """True for a module-level ``__getattr__`` that mentions the name."""
    if not isinstance(node, ast.FunctionDef) or node.name != "__getattr__":
        return False
    return name in {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}


def _attribute(sources: Sources, found: _Found, name: str) -> _Found | None:
    node = found.node
    if isinstance(node, ast.ClassDef):
        return _in_class(sources, found.module, node, name)
    if isinstance(node, ast.Module):
        return _in_module(sources, found.module, name)
    if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
        kind = _named(sources, found.module, node.value.func)
        if kind is not None and isinstance(kind.node, ast.ClassDef):
            return _in_class(sources, kind.module, kind.node, name)
    return None


def _in_class(sources: Sources, module: str, kind: ast.ClassDef, name: str) -> _Found | None:
    for node in reversed(list(_statements(kind.body))):
        if isinstance(node, Definition) and node.name == name:
            return _Found(module, node)
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
            return _Found(module, node)
    for inner in ast.walk(kind):
        if isinstance(inner, ast.Assign | ast.AnnAssign) and f"self.{name}" in _targets(inner):
            return _Found(module, inner)
    for base in kind.bases:
        # Generic[T] and the like: what is subscripted is the class.
        of = _named(sources, module, base.value if isinstance(base, ast.Subscript) else base)
        if of is None or not isinstance(of.node, ast.ClassDef):
            continue
        if (inherited := _in_class(sources, of.module, of.node, name)) is not None:
            return inherited
    return None


def _named(sources: Sources, module: str, expression: ast.expr) -> _Found | None:
    first, *rest = ast.unparse(expression).split(".")
    found = _in_module(sources, module, first)
    for part in rest:
        found = None if found is None else _attribute(sources, found, part)
    return found


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Of a body and of what it does only sometimes, in order, what it does on errors first."""
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from _statements(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for inner in ("handlers", "body", "orelse", "finalbody"):
                for part in vars(node).get(inner, []):
                    yield from _statements(
                        part.body if isinstance(part, ast.ExceptHandler) else [part]
                    )
        else:
            yield node


def _targets(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    parts = [part for t in targets for part in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return {ast.unparse(part) for part in parts}


def _absolute(sources: Sources, module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = sources(module.replace(".", "/") + "/__init__.py") is not None
    above = module.split(".")
    above = above[: len(above) - node.level + package]
    return ".".join([*above, *([node.module] if node.module else [])])


def _text(sources: Sources, module: str) -> str | None:
    path = module.replace(".", "/")
    text = sources(f"{path}.py")
    return sources(f"{path}/__init__.py") if text is None else text


@lru_cache(maxsize=256)
def _tree(sources: Sources, module: str) -> ast.Module | None:
    text = _text(sources, module)
    return None if text is None else ast.parse(text)
