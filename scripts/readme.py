"""Update the generated parts of the pages: demo results and shipped states.

Run ``make demo`` first, then ``python scripts/readme.py``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the benchmarks are not part of what is installed

from benchmarks.policies import as_markdown as policies_table  # noqa: E402

PARTS = {
    "README.md": ("demo",),
    "docs/shipped-states.md": ("policies",),
}
"""Page -> names of its generated parts."""


def _replace_part(text: str, name: str, part: str, page: str = "README.md") -> str:
    """Replace the part between the markers ``<!-- name -->`` and ``<!-- /name -->``."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{page} has no markers <!-- {name} --> ... <!-- /{name} -->")
    return pattern.sub(lambda match: match[1] + part.rstrip() + "\n" + match[2], text)


def main() -> int:
    """Rewrite the pages; a part without a source is kept and reported."""
    sources = {"policies": policies_table()}
    results = ROOT / "out" / "demo" / "table.md"
    if results.is_file():
        sources["demo"] = results.read_text()
    else:
        print("no out/demo/table.md: run `make demo` to update the figures", file=sys.stderr)
    for page, names in PARTS.items():
        text = (ROOT / page).read_text()
        for name in names:
            if name in sources:
                text = _replace_part(text, name, sources[name], page)
        (ROOT / page).write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
