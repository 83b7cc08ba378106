"""What rules for cells lose, on pictures that were drawn for it."""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks.accuracy.cells import count_losses

RECORDED = Path(__file__).parents[3] / "docs/data/cells-lost.csv"


def test_what_rules_lose_is_what_the_page_says() -> None:
    names = ("cells", "kept", "marks", "dropped", "dropped_of_one_colour")
    losses = {
        (kind, rule): dict(zip(names, n, strict=True))
        for kind, rule, *n in count_losses()
    }

    def lost(rule: str) -> set[str | int]:
        return {kind for (kind, of), n in losses.items() if of == rule and n["dropped"]}

    flat = [counts for (_, rule), counts in losses.items() if rule == "flat"]
    assert lost("flat") == {"bars of a chart", "board of 64 pixels a square"}
    assert all(counts["dropped"] == counts["dropped_of_one_colour"] for counts in flat)
    repeated = lost("predicted") - lost("flat")
    assert {"check boxes every 32 pixels", "dot leaders every 8 pixels"} <= repeated
    assert {"lines of one pixel", "screenshot", "screenshot scaled by 0.8"} <= repeated
    assert not {"check boxes every 40 pixels", "dot leaders every 7 pixels"} & repeated
    # What a tolerance takes is faint, not small; without one, noise of one level keeps everything.
    assert lost("flat:2") == lost("flat")
    assert lost("flat:8") == {*lost("flat"), "watermark of 6 levels"}
    noise = [
        losses["noise of one level", rule]["kept"]
        for rule in ("flat", "predicted", "flat:2")
    ]
    assert noise == [750, 750, losses["text", "flat"]["kept"]]
    # Glyphs and JPEG are a library's; the promises above are kept by every version.
    rows = list(csv.DictReader(RECORDED.read_text().splitlines()))
    assert [(row["kind"], row["rule"]) for row in rows] == [*losses]
    for row in rows:
        if row["kind"].startswith(("check boxes", "dot leaders", "lone", "bars")):
            counts = losses[row["kind"], row["rule"]]
            assert (int(row["marks"]), int(row["dropped"])) == (
                counts["marks"],
                counts["dropped"],
            )
