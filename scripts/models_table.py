"""Write the table of models in docs/support.md: checkpoints, N, K to start with, or why not.

Run ``python scripts/models_table.py``; ``tests/docs`` compares the page with what it would write.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/support.md"
sys.path.insert(0, str(ROOT))

from vllm_autoprune.backbones import BACKBONE_SHAPES  # noqa: E402
from vllm_autoprune.checkpoint import count_published  # noqa: E402
from vllm_autoprune.cli.output import CommandParser  # noqa: E402
from vllm_autoprune.serving.models import BACKBONES, CHECKPOINTS, REFUSALS  # noqa: E402
from vllm_autoprune.tpdsl.atoms.source import BudgetCall  # noqa: E402

SIDE = 1024
"""Side, in pixels, of the square image whose tokens are counted."""


def count_square(family: str) -> int:
    """N of an image of :data:`SIDE` pixels on the first listed backbone of a family."""
    shapes = [s for s in BACKBONE_SHAPES.values() if s.family == family]
    return count_published(shapes[0], SIDE, SIDE).tokens


def format_models(tokens: Mapping[str, int]) -> str:
    """Format two tables: models that are served, with N from ``tokens``, and refused models."""
    served: list[tuple[str, ...]] = [
        (
            "checkpoints",
            "architecture",
            f"N at {SIDE} x {SIDE}",
            "K",
            "videos",
        ),
        ("---", "---", "--:", "--:", "---"),
    ]
    for architecture, backbone in BACKBONES.items():
        count = tokens[backbone.name]
        kept = BudgetCall.parse(backbone.budget).tokens_kept(count)
        ids = _as_code(CHECKPOINTS[architecture])
        videos = "pruned" if backbone.videos else "-"
        served.append((ids, f"`{architecture}`", f"{count}", f"{kept}", videos))
    refused = [("not served: checkpoints (architecture)", "why"), ("---", "---")]
    for row in REFUSALS:
        pairs = [
            (texts[0], f"(`{architecture}`)")
            for architecture, texts in row.models.items()
        ]
        ids = "<br>".join(
            f"{_as_code(ids)} {name}" if ids else name for ids, name in pairs
        )
        refused.append((ids, row.why))
    tables = (
        "\n".join(f"| {' | '.join(row)} |" for row in rows)
        for rows in (served, refused)
    )
    return "\n\n".join(tables)


def _as_code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def read_table() -> str:
    """Read the present tables from the page."""
    return PAGE.read_text().split("<!-- models -->\n")[1].split("\n<!-- /models -->")[0]


def main() -> None:
    """Write the tables into the page."""
    CommandParser(description=__doc__).parse_args()
    counts = {
        backbone.name: count_square(backbone.name) for backbone in BACKBONES.values()
    }
    PAGE.write_text(PAGE.read_text().replace(read_table(), format_models(counts)))


if __name__ == "__main__":
    main()
