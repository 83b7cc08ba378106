"""Packages, commands and flags that the documentation names exist, and none is left out."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from vllm_autoprune.cli.main import COMMANDS
from vllm_autoprune.serving.settings import add_flags

ROOT = Path(__file__).resolve().parents[2]
ROOT_PAGES = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "benchmarks/yardsticks/README.md")
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in ROOT_PAGES)])
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
README = (ROOT / "README.md").read_text()
SERVING = (ROOT / "docs/serving.md").read_text()


def packages() -> set[str]:
    """Folders with an ``__init__.py``, of all that is not a test or a script."""
    return {
        str(path.parent.relative_to(ROOT))
        for top in ("vllm_autoprune", "offline_search", "benchmarks")
        for path in (ROOT / top).rglob("__init__.py")
    } - {"vllm_autoprune"}


def test_the_architecture_describes_every_package() -> None:
    listed = re.findall(
        r"^\| `((?:vllm_autoprune/|offline_search|benchmarks)[\w/]*)` \|", ARCHITECTURE, re.M
    )
    assert len(listed) == len(set(listed))
    assert set(listed) == packages()


def test_the_glossary_is_linked() -> None:
    assert "(glossary.md)" in ARCHITECTURE and "(docs/glossary.md)" in README


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_that_a_page_runs_exists(page: Path) -> None:
    text = re.sub(r"\s+", " ", page.read_text())  # commands are broken across lines
    names = set(
        re.findall(
            r"python -m ((?:benchmarks|tests|offline_search|vllm_autoprune)(?:\.\w+)*)", text
        )
    )
    missing = {
        name
        for name in names
        if not (ROOT / f"{name.replace('.', '/')}.py").is_file()
        and not (ROOT / name.replace(".", "/") / "__main__.py").is_file()
    }
    assert missing == set()


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "mistakes.md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_command_of_vllm_autoprune_on_a_page_exists(page: Path) -> None:
    text = page.read_text()
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S))
    names = re.findall(r"^vllm-autoprune ([a-z]+)", blocks, re.M)
    names += re.findall(r"`vllm-autoprune ([a-z]+)", text)
    assert set(names) <= COMMANDS.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_page_that_a_page_links_exists(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert {link for link in links if not (page.parent / link).exists()} == set()


def test_the_page_on_serving_lists_every_flag() -> None:
    parser = add_flags(argparse.ArgumentParser())
    flags = [
        option
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--autoprune")
    ]
    assert len(flags) >= 6
    assert [flag for flag in flags if f"| `{flag} " not in SERVING] == []
