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
    """Definition of one name.

    ``where`` is the defining module. ``called`` has a function's parameters with their defaults and
    without annotations, or a class's bases. ``code`` is a digest of its lines without comments and
    docstrings; empty for a value.
    """

    kind: Literal["class", "function", "value", "module"]
    where: str
    called: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True)
class _Binding:
    """A statement that binds a name, and the module that contains it."""

    module: str
    node: ast.AST


def look_up(sources: Sources, module: str, name: str) -> Symbol | None:
    """The symbol ``module.name``, dotted where it is an attribute; None where there is none."""
    binding: _Binding | None = _Binding(module, ast.Module([], []))
    for i, part in enumerate(name.split(".")):
        if binding is None:
            return None
        binding = (
            _find_in_module(sources, module, part)
            if i == 0
            else _find_attribute(sources, binding, part)
        )
    return None if binding is None else _make_symbol(sources, binding)


def _make_symbol(sources: Sources, binding: _Binding) -> Symbol:
    node = binding.node
    if isinstance(node, ast.Module):
        return Symbol("module", binding.module)
    text = _text(sources, binding.module) or ""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        return Symbol("class", binding.module, f"({bases})", _digest(text, node))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        awaited = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
        called = f"{awaited}({_parameters(node.args)})"
        return Symbol("function", binding.module, called, _digest(text, node))
    return Symbol("value", binding.module)


def _parameters(arguments: ast.arguments) -> str:
    bare = ast.parse(f"lambda {ast.unparse(_without_annotations(arguments))}: 0", mode="eval").body
    assert isinstance(bare, ast.Lambda)
    return ast.unparse(bare.args)


def _without_annotations(arguments: ast.arguments) -> ast.arguments:
    copied = ast.parse(f"def f({ast.unparse(arguments)}): ...").body[0]
    assert isinstance(copied, ast.FunctionDef)
    for node in ast.walk(copied.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    return copied.args


def _digest(text: str, node: Definition) -> str:
    """Digest of the lines of code, equal under every Python version that parses them."""
    lines = dict(enumerate(text.splitlines()[node.lineno - 1 : node.end_lineno], node.lineno))
    for inner in ast.walk(node):
        if isinstance(inner, Definition) and ast.get_docstring(inner, clean=False) is not None:
            docstring = inner.body[0]
            for number in range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1):
                lines.pop(number, None)
    kept = (line.strip() for line in lines.values())
    code = "\n".join(line for line in kept if line and not line.startswith("#"))
    return hashlib.sha256(code.encode()).hexdigest()[:12]


def _find_in_module(
    sources: Sources, module: str, name: str, visited: frozenset[tuple[str, str]] = frozenset()
) -> _Binding | None:
    """The last statement that binds a name; ``visited`` (module, name) pairs end import cycles."""
    tree = _tree(sources, module)
    if tree is None or (module, name) in visited:
        return None
    for node in reversed(list(_statements(tree.body))):
        if _binds(node, name):
            return _Binding(module, node)
        if isinstance(node, ast.ImportFrom):
            imported = _follow_import(sources, module, node, name, visited)
            if imported is not None:
                return imported
        if _is_getattr_for(node, name):
            return _Binding(module, ast.Assign([], ast.Constant(None)))
    submodule = f"{module}.{name}"
    return _Binding(submodule, ast.Module([], [])) if _tree(sources, submodule) else None


def _binds(node: ast.AST, name: str) -> bool:
    """Whether a definition or an assignment binds the name."""
    if isinstance(node, Definition):
        return node.name == name
    return isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node)


def _follow_import(
    sources: Sources,
    module: str,
    node: ast.ImportFrom,
    name: str,
    visited: frozenset[tuple[str, str]],
) -> _Binding | None:
    """The definition that one import statement of ``module`` binds to ``name``."""
    for alias in node.names:
        every = alias.name == "*" and not name.startswith("_")
        if not every and (alias.asname or alias.name) != name:
            continue
        origin = _absolute_module(sources, module, node)
        definition = _find_in_module(
            sources, origin, name if every else alias.name, visited | {(module, name)}
        )
        if definition is not None:
            return definition
    return None


def _is_getattr_for(node: ast.stmt, name: str) -> bool:
    """True for a module-level ``__getattr__`` that mentions the name."""
    if not isinstance(node, ast.FunctionDef) or node.name != "__getattr__":
        return False
    return name in {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}


def _find_attribute(sources: Sources, binding: _Binding, name: str) -> _Binding | None:
    node = binding.node
    if isinstance(node, ast.ClassDef):
        return _find_in_class(sources, binding.module, node, name)
    if isinstance(node, ast.Module):
        return _find_in_module(sources, binding.module, name)
    if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
        kind = _resolve_expression(sources, binding.module, node.value.func)
        if kind is not None and isinstance(kind.node, ast.ClassDef):
            return _find_in_class(sources, kind.module, kind.node, name)
    return None


def _find_in_class(sources: Sources, module: str, kind: ast.ClassDef, name: str) -> _Binding | None:
    for node in reversed(list(_statements(kind.body))):
        if _binds(node, name):
            return _Binding(module, node)
    for inner in ast.walk(kind):
        if _binds(inner, f"self.{name}"):
            return _Binding(module, inner)
    for base in kind.bases:
        # In Generic[T] the class is what is subscripted.
        expression = base.value if isinstance(base, ast.Subscript) else base
        parent = _resolve_expression(sources, module, expression)
        if parent is None or not isinstance(parent.node, ast.ClassDef):
            continue
        if (inherited := _find_in_class(sources, parent.module, parent.node, name)) is not None:
            return inherited
    return None


def _resolve_expression(sources: Sources, module: str, expression: ast.expr) -> _Binding | None:
    first, *rest = ast.unparse(expression).split(".")
    binding = _find_in_module(sources, module, first)
    for part in rest:
        binding = None if binding is None else _find_attribute(sources, binding, part)
    return binding


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body and of its conditional blocks, in order; exception handlers first."""
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


def _absolute_module(sources: Sources, module: str, node: ast.ImportFrom) -> str:
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
