"""Record of one vLLM release: which hooks it has, kept as a small file of names and signatures."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tests.serving.versions.sources import Sources
from tests.serving.versions.symbols import Symbol, look_up
from vllm_autoprune.serving.hooks import HOOKS

FOLDER = Path(__file__).parent


class Release(BaseModel):
    """The hooks of one release; None for a name that it does not have."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str
    wheel: str
    sha256: str
    symbols: dict[str, Symbol | None]


def names() -> tuple[tuple[str, str], ...]:
    """(module, name) of everything that the start-up probe looks for."""
    return tuple((hook.module, name) for hook in HOOKS for name in hook.names)


def symbols_of(sources: Sources) -> dict[str, Symbol | None]:
    """What sources have of each hook, by its full name."""
    return {f"{module}.{name}": look_up(sources, module, name) for module, name in names()}


def file_of(version: str) -> Path:
    """Where a release is kept."""
    return FOLDER / f"vllm-{version}.json"


def kept() -> list[Release]:
    """Every release that is kept here."""
    return [read(file) for file in sorted(FOLDER.glob("vllm-*.json"))]


def read(file: Path) -> Release:
    """One release."""
    return Release.model_validate_json(file.read_text(encoding="utf-8"))
