"""Paste generated parts into README.md: what the demo measured, the zoo, the table of support.

Knows nothing about how they are made. Run ``make demo`` first; then ``python scripts/readme.py``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the benchmarks are not part of what is installed

from benchmarks.zoo import table  # noqa: E402
from vllm_autoprune.serving import support  # noqa: E402

README = ROOT / "README.md"


def pasted(text: str, name: str, part: str) -> str:
    """``text`` with the part between the markers ``<!-- name -->`` and ``<!-- /name -->`` new."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"README.md has no markers <!-- {name} --> ... <!-- /{name} -->")
    return pattern.sub(lambda found: found[1] + part.rstrip() + "\n" + found[2], text)


def main() -> int:
    """Rewrite README.md; parts whose source is missing stay as they are, and are named."""
    text = pasted(README.read_text(), "support", support.as_markdown())
    text = pasted(text, "zoo", table.as_markdown())
    measured = ROOT / "out" / "demo" / "table.md"
    if measured.is_file():
        text = pasted(text, "demo", measured.read_text())
    else:
        print("no out/demo/table.md: run `make demo` to renew the figures", file=sys.stderr)
    README.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
