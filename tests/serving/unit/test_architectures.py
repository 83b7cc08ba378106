"""Checkpoints: every architecture of vLLM is served or refused, and each reason is in its code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import vllm
from vllm.model_executor.models.registry import (
    _MULTIMODAL_MODELS,
    _TRANSFORMERS_SUPPORTED_MODELS,
)

from vllm_autoprune.serving.models import BACKBONES, CHECKPOINTS, REFUSALS

MODELS = Path(vllm.__file__).parent / "model_executor/models"


def read_source(module: str) -> str:
    """Source of a module or package, which may not be importable without a GPU."""
    place = MODELS / f"{module}.py"
    if "." in module:
        place = Path(vllm.__file__).parents[1] / module.replace(".", "/")
        place = place if place.is_dir() else place.with_suffix(".py")
    files = place.rglob("*.py") if place.is_dir() else [place]
    return "\n".join(file.read_text() for file in files)


def read_symbol(module: str, symbol: str = "") -> str:
    """Source of a class, or of a function in it, found without importing it."""
    source = read_source(module)
    node: ast.AST = ast.parse(source)
    if not symbol:
        return source
    for name in symbol.split("."):
        node = next(n for n in ast.walk(node) if getattr(n, "name", None) == name)
    return ast.get_source_segment(source, node) or ""


def test_every_architecture_that_takes_images_is_served_or_refused_once() -> None:
    assert CHECKPOINTS.keys() == BACKBONES.keys()
    known = [*CHECKPOINTS, *(name for row in REFUSALS for name in row.models)]
    assert len(known) == len(set(known))
    assert set(known) <= _MULTIMODAL_MODELS.keys() | _TRANSFORMERS_SUPPORTED_MODELS.keys()
    takes_images = {
        name for name, (module, _) in _MULTIMODAL_MODELS.items() if '"image"' in read_source(module)
    }
    assert takes_images <= set(known)


@pytest.mark.parametrize(
    ("architecture", "shown"),
    [(name, texts[1]) for row in REFUSALS for name, texts in row.models.items() if texts[1:]],
)
def test_a_reason_is_in_the_code_that_it_names(architecture: str, shown: str) -> None:
    where, _, part = shown.partition(": ")
    assert part in read_symbol(*where.split())
