"""Hooks: the list of vLLM names is complete, and all of them exist."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_autoprune import serving
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.startup import hooks
from vllm_autoprune.serving.startup.hooks import HOOKS, Hook, find_missing_names, require_hooks

ROOM = Path(serving.__file__).parent


def test_missing_names_are_reported() -> None:
    assert find_missing_names(Hook("json", ("JSONEncoder.encode", "dumps"), "a test")) == ()
    gone = find_missing_names(Hook("json", ("JSONEncoder.encode", "JSONEncoder.sing"), "a test"))
    assert gone == ("JSONEncoder.sing",)
    (missing,) = find_missing_names(Hook("no_such_module", ("a", "b"), "a test"))
    assert missing.startswith("no_such_module (ModuleNotFoundError")


@pytest.mark.compat
@pytest.mark.slow
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: f"{hook.module}:{hook.names[0]}")
def test_every_hook_exists(hook: Hook) -> None:
    assert find_missing_names(hook) == ()


def test_missing_hook_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = (
        Hook("json", ("dumps", "sing"), "the song"),
        Hook("json", ("dance",), "the dance", only="Dancer"),
        Hook("json", ("paint",), "the picture", only="Painter"),
    )
    monkeypatch.setattr(hooks, "HOOKS", known)
    with pytest.raises(ConfigError) as caught:
        require_hooks("Dancer")
    assert [problem.where for problem in caught.value.problems] == ["json.sing", "json.dance"]
    assert "the dance" in str(caught.value)


@pytest.mark.parametrize("architecture", BACKBONES)
def test_names_of_every_backbone_are_listed(architecture: str) -> None:
    assert any(hook.only == BACKBONES[architecture].stock for hook in HOOKS)


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


def test_every_import_from_vllm_is_listed() -> None:
    listed = {(hook.module, name.split(".")[0]) for hook in HOOKS for name in hook.names}
    modules = {hook.module for hook in HOOKS}
    imports = {
        pair
        for path in ROOM.rglob("*.py")
        for pair in imported(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert len(imports) > 10
    assert {(m, n) for m, n in imports - listed if f"{m}.{n}" not in modules} == set()
