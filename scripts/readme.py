"""Update the generated parts of README.md: demo results, shipped states and supported models.

Run ``make demo`` first, then ``python scripts/readme.py``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the benchmarks are not part of what is installed

from benchmarks.zoo.evidence import as_markdown as zoo_table  # noqa: E402
from vllm_autoprune.serving.startup import support  # noqa: E402

README = ROOT / "README.md"


def replace_part(text: str, name: str, part: str) -> str:
    """Replace the part between the markers ``<!-- name -->`` and ``<!-- /name -->``."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"README.md has no markers <!-- {name} --> ... <!-- /{name} -->")
    return pattern.sub(lambda match: match[1] + part.rstrip() + "\n" + match[2], text)


def main() -> int:
    """Rewrite README.md; a part without a source is kept and reported."""
    text = replace_part(README.read_text(), "support", support.as_markdown())
    text = replace_part(text, "zoo", zoo_table())
    results = ROOT / "out" / "demo" / "table.md"
    if results.is_file():
        text = replace_part(text, "demo", results.read_text())
    else:
        print("no out/demo/table.md: run `make demo` to update the figures", file=sys.stderr)
    README.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
