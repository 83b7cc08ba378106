"""Write the table of models in docs/support.md: checkpoints, N, a state and K, or why not.

Run ``python scripts/models_table.py``; ``tests/docs`` compares the page with what it would write.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/support.md"
sys.path.insert(0, str(ROOT))

from vllm_autoprune.backbones import BACKBONE_SHAPES  # noqa: E402
from vllm_autoprune.checkpoint import count_tokens  # noqa: E402
from vllm_autoprune.cli.output import CommandParser  # noqa: E402
from vllm_autoprune.selftest.backbones import TINY_MODELS, build  # noqa: E402
from vllm_autoprune.serving.models import BACKBONES, CHECKPOINTS, REFUSALS  # noqa: E402
from vllm_autoprune.tpdsl.atoms.source import BudgetCall  # noqa: E402

SIDE = 1024
"""Side, in pixels, of the square image whose tokens are counted."""


def _square(pixels: int) -> dict[str, int]:
    return {"height": pixels, "width": pixels}


def _edges(least: int, most: int) -> dict[str, Any]:
    return {"pixels": {"size": {"shortest_edge": least, "longest_edge": most}}}


def _tiles(*sides: int) -> list[list[int]]:
    return [[height, width] for height in sides for width in sides]


_QWEN2 = _edges(3136, 12845056)
_QWEN3 = _edges(65536, 16777216)
_GLM = _edges(12544, 9633792)
_PIXTRAL = {"vision": {"image_size": 1540}, "pixels": {"size": {"longest_edge": 1540}}}
_INTERNVL = {
    "config": {"image_seq_length": 256},
    "vision": {"image_size": [448, 448]},
    "pixels": {"size": _square(448), "max_patches": 12},
    "processor": {"image_seq_length": 256},
}
_INTERNVL_CHAT = _INTERNVL | {
    "published": {
        "force_image_size": 448,
        "max_dynamic_patch": 12,
        "vision_config": {"image_size": 448},
    },
}

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "llava_next": {
        "tiles": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        "vision": {"image_size": 336},
        "pixels": {"size": {"shortest_edge": 336}, "crop_size": _square(336)},
    },
    "llava_onevision": {
        "tiles": _tiles(*range(384, 2305, 384)),
        "vision": {"image_size": 384},
        "pixels": {"size": _square(384)},
        "processor": {"num_image_tokens": 729},
    },
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni"), _QWEN2),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN3),
    "cohere_compass": _QWEN3,
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm_ocr"), _GLM),
    "paddleocr_vl": _edges(147384, 2822400),
    **dict.fromkeys(("mistral3", "lightonocr"), _PIXTRAL),
    **dict.fromkeys(("internvl", "interns1"), _INTERNVL),
    **dict.fromkeys(("internvl_chat", "qianfan_ocr", "skywork_chat"), _INTERNVL_CHAT),
    "idefics3": {
        "vision": {"image_size": 364},
        "pixels": {
            "size": {"longest_edge": 1456},
            "max_image_size": {"longest_edge": 364},
        },
        "processor": {"image_seq_len": 169},
    },
    "smolvlm": {
        "vision": {"image_size": 384},
        "pixels": {
            "size": {"longest_edge": 1536},
            "max_image_size": {"longest_edge": 384},
        },
        "processor": {"image_seq_len": 81},
    },
    "gemma3": {
        "config": {"mm_tokens_per_image": 256},
        "vision": {"image_size": 896},
        "pixels": {"size": _square(896)},
        "processor": {"image_seq_length": 256},
    },
    "gemma4": {
        "vision": {"patch_size": 16, "default_output_length": 280},
        "pixels": {"patch_size": 16, "max_soft_tokens": 280},
        "processor": {"image_seq_length": 280},
    },
}
"""Backbone -> geometry of its published checkpoints (config.json, preprocessor_config.json), which
replaces that of the tiny model."""


def count_published(name: str) -> int:
    """N of an image of :data:`SIDE` pixels, by vLLM's processor with the published geometry."""
    if name not in TINY_MODELS:  # LLaVA-1.5 resizes all images to one size
        return next(
            shape.tokens for shape in BACKBONE_SHAPES.values() if shape.family == name
        )
    with tempfile.TemporaryDirectory() as folder:
        return count_tokens(
            str(build(name, Path(folder), PUBLISHED[name])), SIDE, SIDE
        ).tokens


def format_models(tokens: Mapping[str, int]) -> str:
    """Format two tables: models that are served, with N from ``tokens``, and refused models."""
    served: list[tuple[str, ...]] = [
        (
            "checkpoints",
            "architecture",
            f"N at {SIDE} x {SIDE}",
            "start with",
            "videos",
        ),
        ("---", "---", "--:", "---", "---"),
    ]
    for architecture, backbone in BACKBONES.items():
        count = tokens[backbone.name]
        kept = BudgetCall.parse(backbone.budget).tokens_kept(count)
        ids = _as_code(CHECKPOINTS[architecture])
        start = f"`{backbone.state}`, {kept}"
        videos = "pruned" if backbone.videos else "-"
        served.append((ids, f"`{architecture}`", f"{count}", start, videos))
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
        backbone.name: count_published(backbone.name) for backbone in BACKBONES.values()
    }
    PAGE.write_text(PAGE.read_text().replace(read_table(), format_models(counts)))


if __name__ == "__main__":
    main()
