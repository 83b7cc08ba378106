"""docs/support.md: its backbones are those that are served, and its tests exist."""

from __future__ import annotations

import re
from pathlib import Path

from vllm_autoprune.serving.models import BACKBONES, check_clip_inputs

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs/support.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]


def test_the_page_has_a_row_for_every_backbone() -> None:
    rows, backbones = [row for row in ROWS if len(row) == 8][1:], BACKBONES.values()
    assert len(rows) == len(backbones)
    reads_tower = [backbone.input_problems is check_clip_inputs for backbone in backbones]
    assert [row[4] for row in rows].count("yes") == sum(reads_tower)
    positions = [row[5] for row in rows]
    assert positions.count("M-RoPE") == sum(b.mrope for b in backbones)


def test_every_feature_names_tests_that_exist() -> None:
    files = {path.name for path in TESTS.rglob("test_*.py")}
    rows = re.findall(r"^\| (.+) \| (yes|refused|no|untested) \| .* \| ?(.*) \|$", PAGE, re.M)
    assert len(rows) > 30 and len({feature for feature, _, _ in rows}) == len(rows)
    for feature, status, named in rows:
        assert named or status == "untested", feature
        assert set(re.findall(r"`(.+?)`", named)) <= files, feature
