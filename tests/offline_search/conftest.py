"""Fixtures of the offline search: a data folder with a synthetic task."""

from __future__ import annotations

from pathlib import Path

import pytest

from offline_search.dataset import Dataset
from offline_search.settings import Settings
from tests.offline_search.synthetic import BUDGET, dataset


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    folder = tmp_path / "data"
    folder.mkdir()
    return dataset(folder)


@pytest.fixture
def settings() -> Settings:
    return Settings(
        strategy="autoprune", rounds=3, per_round=3, budgets=(BUDGET,), proposer="scripted"
    )
