"""Compatibility with supported vLLM releases that are not installed: every hook, as called."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from tests.serving.versions import look_up_hooks, read_records
from tests.tables import read_tables
from vllm_autoprune.serving.compat import BELOW, LOWEST, vllm_version

RECORDS = read_records()


def test_every_supported_minor_version_is_recorded() -> None:
    seen = {vllm_version(), *map(Version, RECORDS)}
    assert all(LOWEST <= version < BELOW for version in seen)
    minor_versions = {
        (LOWEST.major, minor) for minor in range(LOWEST.minor, BELOW.minor)
    }
    assert {(version.major, version.minor) for version in seen} == minor_versions


@pytest.mark.compat
@pytest.mark.slow
@pytest.mark.parametrize("version", RECORDS)
def test_hooks_of_a_release_have_the_installed_signatures(version: str) -> None:
    """Same names, kinds, parameters and defaults; differing code needs a recorded reason."""
    here = look_up_hooks()
    there = RECORDS[version]
    again = "PYTHONPATH=.next python -m tests.serving.versions"
    assert there.keys() == here.keys(), f"hooks were added or removed: run `{again}`"
    differing = {name for name in here if here[name]["code"] != there[name]["code"]}
    tables = read_tables(Path(__file__).with_suffix(".yaml"))
    assert (
        differing <= tables["hooks_of_a_release_have_the_installed_signatures"].keys()
    )
    assert {name: {**there[name], "code": ""} for name in here} == {
        name: {**symbol, "code": ""} for name, symbol in here.items()
    }
