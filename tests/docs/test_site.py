"""The documentation site: `make docs` builds it strictly; this tests its hooks and its order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.site_hooks import generate_files, restore_pipes, rewrite_links
from vllm_autoprune.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


WITHIN = "[search](../search.md#strategies)"
OUTSIDE = "See [the policy](../SECURITY.md#scope) and [states](states.md)."


@pytest.mark.parametrize(
    ("page", "repository", "name", "text"),
    [
        (OUTSIDE, None, "page.md",
         "See the policy (`SECURITY.md` in the repository) and [states](states.md)."),
        (OUTSIDE, "https://example.org/r/", "page.md", "See [the policy](https://example.org/r/"
         "blob/main/SECURITY.md#scope) and [states](states.md)."),
        (WITHIN, None, "studies/search.md", WITHIN),
        ("[x](../../README.md)", None, "studies/search.md", "x (`README.md` in the repository)"),
    ],
)  # fmt: skip
def test_links_to_files_outside_docs_become_paths_or_links_to_the_repository(
    page: str, repository: str | None, name: str, text: str
) -> None:
    assert rewrite_links(page, repository, name) == text


def test_a_link_to_a_file_that_is_missing_stops_the_build() -> None:
    with pytest.raises(FileNotFoundError, match=r"studies/search\.md links to nosuch\.md"):
        rewrite_links("[x](../../nosuch.md)", None, "studies/search.md")


def test_code_in_tables_is_shown_without_backslashes() -> None:
    assert (
        restore_pipes(r"| `--state PATH\|NAME` | a \| b |") == r"| `--state PATH|NAME` | a \| b |"
    )


def test_the_site_has_what_the_commands_print(capsys: pytest.CaptureFixture[str]) -> None:
    files = generate_files()
    for name, command in (
        ("atoms.md", ["atoms", "--markdown"]),
        ("autoprune-state-1.schema.json", ["schema"]),
    ):
        assert main(command) == 0
        assert files[name] == capsys.readouterr().out


def test_every_page_has_a_place_in_the_order() -> None:
    placed = re.findall(r"^ +- .*?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    docs = ROOT / "docs"
    found = (*docs.glob("*.md"), *docs.glob("studies/*.md"))
    pages = {"atoms.md", *(path.relative_to(docs).as_posix() for path in found)}
    assert sorted(placed) == sorted(pages) and placed[0] == "index.md"


def test_the_readme_fits_on_one_screen_and_a_half() -> None:
    words = re.sub(
        r"<!-- demo -->.*<!-- /demo -->", "", (ROOT / "README.md").read_text(), flags=re.S
    )
    assert len(words.split()) < 900
