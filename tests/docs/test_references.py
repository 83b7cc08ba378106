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


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_that_a_page_runs_exists(page: Path) -> None:
    text = re.sub(r"\s+", " ", page.read_text())  # commands are broken across lines
    packages = "benchmarks|tests|offline_search|vllm_autoprune"
    for name in re.findall(rf"python -m ((?:{packages})(?:\.\w+)*)", text):
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), name


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "mistakes.md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_command_of_vllm_autoprune_on_a_page_exists(page: Path) -> None:
    names = re.findall(r"`vllm-autoprune ([a-z]+)", page.read_text())
    assert set(names) <= COMMANDS.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_page_that_a_page_links_exists(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert {link for link in links if not (page.parent / link).exists()} == set()


def test_the_page_on_serving_lists_every_flag() -> None:
    actions = add_flags(argparse.ArgumentParser())._actions
    options = [option for action in actions for option in action.option_strings]
    flags = [option for option in options if option.startswith("--autoprune")]
    assert len(flags) >= 6
    assert [flag for flag in flags if f"| `{flag} " not in SERVING] == []
