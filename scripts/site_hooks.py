"""Hooks of mkdocs that generate pages, and adapt those of the repository to the site.

The reference of atoms and the JSON Schema of states are generated here and are not in git.

The front page has README's picture and the tables of its demo in place of ``<!-- demo -->``.

A link to a file outside docs leads to the repository if its address is given, and else becomes the
path of the file; a missing file stops the build. ``\\|``
in code within a table is shown as a plain ``|`` in the repository, but would keep its backslash on
the site.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\[([^\]]*)\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")
_DEMO = "<!-- demo -->\n"
_CODE = re.compile(r"`[^`\n]+`")


def _adapt_page(text: str, page: str, repository: str | None = None) -> str:
    """Replace links to files outside docs, ``\\|`` in code by ``|``, and the mark of the demo.

    ``page`` is the path of the page within docs, and ``repository`` the address of the repository.
    Raises FileNotFoundError for a link to a missing file.
    """
    text = text.replace(_DEMO, _read_demo()) if _DEMO in text else text
    folder = posixpath.join("docs", posixpath.dirname(page))

    def replace(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, "..", match[2]))
        if path.startswith("docs/"):  # mkdocs checks it
            return match[0]
        if not (ROOT / path).exists():
            raise FileNotFoundError(
                f"{page} links to {path}, which is not in the repository"
            )
        if repository:
            return f"[{match[1]}]({repository}/blob/main/{path}{match[3] or ''})"
        return f"{match[1]} (`{path}` in the repository)"

    # Only in code, where mkdocs does not divide cells at a plain |.
    return _CODE.sub(
        lambda match: match[0].replace("\\|", "|"), _LINK.sub(replace, text)
    )


def _read_demo() -> str:
    """README's picture and the tables of its demo, with links as in docs."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    begin = readme.index("![")
    end = readme.index("<!-- /demo -->")
    return readme[begin:end].replace("](docs/", "](")


def on_files(files: Files, *, config: MkDocsConfig, **_: object) -> None:
    """Called by mkdocs with the files of the site: adds those that are generated."""
    from mkdocs.structure.files import File

    for name, content in _generate_files().items():
        files.append(File.generated(config, name, content=content))


def _generate_files() -> dict[str, str]:
    """Content of the generated files by name, as ``vllm-autoprune atoms`` prints it."""
    from vllm_autoprune.tpdsl.reference import render_language
    from vllm_autoprune.tpdsl.registry import ATOMS
    from vllm_autoprune.tpdsl.state import PruningState

    counts = Counter(atom.origin for atom in ATOMS.values())
    total = counts["printed"] + counts["listed"]
    origins = (
        f"Of its {total} atoms the [paper](methods.md#autoprune) names {counts['printed']}; the "
        f"other {counts['listed']} and {counts['extension']} extensions are this project's own. "
        "`vllm-autoprune atoms` marks each."
    )
    schema = json.dumps(PruningState.model_json_schema(), indent=2, ensure_ascii=False)
    return {
        "atoms.md": f"# Atoms\n\n{origins}\n\n{render_language()}",
        "autoprune-state-1.schema.json": schema + "\n",
    }


def on_page_markdown(
    markdown: str, *, page: Page, config: MkDocsConfig, **_: object
) -> str:
    """Called by mkdocs with the source of every page."""
    return _adapt_page(markdown, page.file.src_uri, config.repo_url)
