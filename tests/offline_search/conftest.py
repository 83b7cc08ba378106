"""Fixtures of the offline search: a data folder with a synthetic task, and searches on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from offline_search.dataset import Dataset
from tests.offline_search.synthetic import Searches, dataset


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    return dataset(tmp_path / "data")


@pytest.fixture
def search(data: Dataset, tmp_path: Path) -> Searches:
    return Searches(data, tmp_path)
