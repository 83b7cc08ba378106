"""Hook of mkdocs: what reads differently there than in the repository.

Links from a page to files outside docs become the path of the file, or, where ``repo_url`` is set,
links to the file there. A file that is missing stops the build. ``\\|`` in code within a table is
a plain ``|`` in the repository, but would keep its backslash on the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\[([^\]]*)\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"`[^`\n]+`")


class Config(Protocol):
    """The setting of mkdocs that is read."""

    repo_url: str | None


def rewrite_links(text: str, repo_url: str | None) -> str:
    """The page with links to ``../FILE`` rewritten; raises FileNotFoundError for a missing file."""

    def replace(match: re.Match[str]) -> str:
        label, path, anchor = match[1], match[2], match[3] or ""
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"a page links to ../{path}, which is not in the repository")
        if repo_url:
            return f"[{label}]({repo_url.rstrip('/')}/blob/main/{path}{anchor})"
        return f"{label} (`{path}` in the repository)"

    return _LINK.sub(replace, text)


def on_page_markdown(markdown: str, *, config: Config, **_: object) -> str:
    """Called by mkdocs with the source of every page."""
    return restore_pipes(rewrite_links(markdown, config.repo_url))


def restore_pipes(text: str) -> str:
    """The page with every ``\\|`` within code as ``|``; cells are not divided there."""
    return _CODE.sub(lambda match: match[0].replace("\\|", "|"), text)
