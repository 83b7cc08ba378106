from __future__ import annotations

from pathlib import Path

from benchmarks.zoo.evidence import as_markdown
from vllm_autoprune.tpdsl.states.load import shipped_states

README = Path(__file__).resolve().parents[3] / "README.md"


def test_the_readme_shows_the_evidence_that_states_carry() -> None:
    assert as_markdown().rstrip() in README.read_text(encoding="utf-8"), (
        "run: python scripts/readme.py"
    )


def test_the_table_names_every_shipped_state() -> None:
    table = as_markdown()
    assert all(f"`{name}`" in table for name in shipped_states())
