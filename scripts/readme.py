"""Update the generated parts of the pages: demo results and shipped states.

Run ``make demo`` first, then ``python scripts/readme.py``.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the benchmarks are not installed

from benchmarks.common.report import read_commit  # noqa: E402
from benchmarks.policies import as_markdown as policies_table  # noqa: E402
from vllm_autoprune.cli.output import CommandParser  # noqa: E402


def main() -> int:
    """Rewrite the parts between ``<!-- name -->`` and ``<!-- /name -->``; returns 0."""
    CommandParser(description=__doc__).parse_args()
    parts = {"docs/shipped-states.md": ("policies", policies_table())}
    demo = ROOT / "out/demo"
    if (demo / "tables.md").is_file():
        parts["README.md"] = ("demo", (demo / "tables.md").read_text())
        commit = read_commit("benchmarks/demo.py")
        head, *rows = csv.reader((demo / "demo.csv").read_text().splitlines())
        lines = [
            [*head, "command", "commit"],
            *([*row, "make demo", commit] for row in rows),
        ]
        with (ROOT / "docs/data/demo.csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(lines)
    else:
        print(
            "no out/demo/tables.md: run `make demo` to update the figures",
            file=sys.stderr,
        )
    for page, (name, part) in parts.items():
        text = (ROOT / page).read_text()
        before, begin, after = text.partition(f"<!-- {name} -->\n")
        _, end, after = after.partition(f"<!-- /{name} -->")
        if not end:
            raise SystemExit(
                f"{page} has no markers <!-- {name} --> ... <!-- /{name} -->"
            )
        (ROOT / page).write_text(f"{before}{begin}{part.rstrip()}\n{end}{after}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
