from __future__ import annotations

import pytest

from tests.golden.case import load, names
from tests.golden.generator import uniform

METHODS = {"cdpruner": 9, "divprune": 8, "next_order": 3, "clip_chunk": 4}


@pytest.mark.parametrize(("method", "count"), METHODS.items())
def test_every_case_is_there_and_its_inputs_are_the_recorded_ones(method: str, count: int) -> None:
    found = [load(name) for name in names(method)]  # load checks the digests
    assert len(found) == count
    assert all(case.recipe["gen"] == method and case.expected for case in found)


def test_the_hash_behind_the_inputs_gives_the_same_numbers_everywhere() -> None:
    assert uniform(11, "feat", (3,)).tolist() == uniform(11, "feat", (5,)).tolist()[:3]
    assert uniform(11, "feat", (1,)).item() != uniform(12, "feat", (1,)).item()
