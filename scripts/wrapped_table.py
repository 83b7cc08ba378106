"""Write the table of what is wrapped in vLLM, in docs/architecture.md, from its declarations.

Run ``python scripts/wrapped_table.py``; ``tests/docs`` compares the page with what it would write.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/architecture.md"
sys.path.insert(0, str(ROOT))

from vllm_autoprune.cli.output import CommandParser  # noqa: E402
from vllm_autoprune.serving.compat import collect_hooks, count_wrapped  # noqa: E402


def format_wrapped() -> str:
    """Format a row for each patch: names, model runner, why, and when it can be removed."""
    names: dict[tuple[str, str, int], list[str]] = {}
    reasons: dict[tuple[str, str, int], str] = {}
    hooks, _ = collect_hooks()
    for hook in reversed(hooks):  # decorators are applied from below
        if hook.patch is None:
            continue
        runner = hook.runner.upper() if hook.runner else "both"
        code = inspect.unwrap(hook.patch).__code__
        # Not in the order of imports, which differs between programs.
        place = (hook.runner or "", hook.patch.__module__, code.co_firstlineno)
        doc = inspect.getdoc(hook.patch) or ""
        reasons[place] = f"{runner} | {_read(doc, 'Why')} | {_read(doc, 'Remove when')}"
        module = hook.module.rpartition(".")[2]
        names.setdefault(place, []).extend(
            f"`{name}`" if "." in name else f"`{module}.{name}`" for name in hook.names
        )
    rows = [
        f"| {', '.join(names[place])} | {reasons[place]} |" for place in sorted(names)
    ]
    v1 = count_wrapped("v1")
    v2 = count_wrapped("v2")
    counts = f"In the engine core and workers: {v2} names under V2, {v1} under V1."
    head = [counts, "", "| wrapped | runner | why | until |", "|---|---|---|---|"]
    return "\n".join([*head, *rows])


def _read(doc: str, name: str) -> str:
    """The first sentence of the paragraph that begins with ``name``, as Markdown."""
    paragraph = re.search(
        rf"^{name}: (.+?)(?:\n\n|\n[A-Z][\w ]+: |\Z)", doc, re.M | re.S
    )
    assert paragraph, f"{doc.partition(chr(10))[0]} has no {name}"
    sentence = re.split(r"(?<=\.)\s+", paragraph[1])[0].removesuffix(".")
    return " ".join(sentence.split()).replace("``", "`")


def read_wrapped() -> str:
    """Read the present table from the page."""
    text = PAGE.read_text().split("<!-- wrapped -->\n")[1]
    return text.split("\n<!-- /wrapped -->")[0]


def main() -> None:
    """Write the table into the page."""
    CommandParser(description=__doc__).parse_args()
    PAGE.write_text(PAGE.read_text().replace(read_wrapped(), format_wrapped()))


if __name__ == "__main__":
    main()
