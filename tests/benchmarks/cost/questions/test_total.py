"""Total costs, break-even and plot from hand-written files."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cost.__main__ import main
from benchmarks.cost.questions.arms import SPLIT, STOCK
from benchmarks.cost.questions.total import COLOURS, Costs, build_section, draw_totals, read_costs


def costs(first: float, another: float) -> Costs:
    return Costs(np.full(3, first), np.full(3, another))


def write(folder: Path, layers: int, model: str = "llava-next-7b") -> Path:
    """Stock: 10 s + 6 s a layer, then 0.1 s a layer; split: 10 s + 1 s, then 1 s + 0.2 s."""
    seconds = {
        STOCK: (10 + 6 * layers, 0.1 * layers),
        SPLIT: (10 + 1 * layers, 1 + 0.2 * layers),
    }
    passes = {
        arm: [
            {
                "ttft": [first] * 4,
                "again": [another] * 4,
                "processor": [2 * first] * 4,
                "processor_again": [2 * another] * 4,
            }
        ]
        for arm, (first, another) in seconds.items()
    }
    content = {
        "model": model, "layers": layers, "budget": 320, "digests": {STOCK: None, SPLIT: "ab"},
        "passes": passes, "many": {STOCK: [1.0, 0.1, 0.1], SPLIT: []},
    }  # fmt: skip
    path = folder / f"{layers}.json"
    path.write_text(json.dumps(content))
    return path


def test_break_even_is_where_both_totals_are_equal() -> None:
    stock, pruned = costs(10.0, 0.1), costs(4.0, 0.3)
    equal = pruned.break_even(stock)

    assert equal.value == equal.low == equal.high == pytest.approx(31.0)
    assert pruned.total(31).value == pytest.approx(stock.total(31).value)
    assert pruned.total(32).value > stock.total(32).value


def test_never_slower_later_has_no_break_even() -> None:
    assert math.isinf(costs(4.0, 0.1).break_even(costs(10.0, 0.1)).value)


def test_two_files_are_composed_for_the_published_depth(tmp_path: Path) -> None:
    paths = [write(tmp_path, 1), write(tmp_path, 4)]
    text, composed = read_costs(paths, ("ttft", "again"))

    assert "composed for 32 layers from 1 and 4" in text
    assert composed[STOCK].first[0] == pytest.approx(10 + 6 * 32)
    assert composed[SPLIT].another[0] == pytest.approx(1 + 0.2 * 32)
    section = build_section(paths)
    assert [claim.verdict for claim in section.claims] == ["holds", "does not hold"] * 2
    assert section.claims[0].measured.startswith("0.18")
    assert section.claims[1].measured.startswith("39 ")


def test_the_command_prints_json_and_draws_lines_and_measured_sums(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, 4)

    assert main(["questions", "total", str(path), "--json"]) == 0
    section = json.loads(capsys.readouterr().out)
    assert section["data"]["time to first token"][STOCK] == {"first": 34.0, "another": 0.4}
    assert section["data"]["processor time"][STOCK] == {"first": 68.0, "another": 0.8}
    assert section["claims"] == []  # they are about full depth
    drawn = path.with_suffix(".svg").read_text()
    _, served = read_costs([path], ("ttft", "again"))
    assert drawn.startswith("<svg") and STOCK in drawn and SPLIT in drawn
    assert drawn != draw_totals(served, {})


def test_every_grey_of_a_drawing_has_a_dark_form() -> None:
    drawn = draw_totals({STOCK: costs(0.1, 0.05)}, {})
    style = drawn[drawn.index("prefers-color-scheme: dark") : drawn.index("</style>")]
    used = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", drawn.replace(style, "")))
    assert used - {colour.lower() for colour in COLOURS} == set(
        re.findall(r'\[style\*="(#[0-9a-f]{6})"\]', style)
    )


@pytest.mark.parametrize("content", ["", "{}", '{"passes": {}}'])
def test_a_wrong_file_is_refused_in_one_line(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "1.json"
    path.write_text(content)

    assert main(["questions", "total", str(path)]) == 1
    assert main(["questions", "total"]) == 1
    assert capsys.readouterr().err.count("\n") == 2
