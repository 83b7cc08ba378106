from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.minillava.split import LEARNT_KINDS, evaluation_split
from benchmarks.search.data import SEEDS, questions, write
from offline_search.examples import SPLITS, read_dataset
from offline_search.records import Split

FEW: dict[Split, int] = {"search": 2, "validation": 3, "test": 4}


@pytest.mark.parametrize("hard", [False, True])
def test_the_folder_is_what_a_search_reads(hard: bool, tmp_path: Path) -> None:
    write(tmp_path, FEW, hard=hard)
    dataset = read_dataset(tmp_path)
    for split in SPLITS:
        asked = questions(split, FEW[split], hard=hard)
        read = dataset.of(split)
        assert sorted(e.question for e in read) == sorted(e.question for e in asked)
        assert len({example.image for example in read}) == FEW[split]
        assert dataset.image(read[0]).startswith(b"\x89PNG")
        pairs = [example.pair for example in read if example.pair is not None]
        assert pairs and all(pairs.count(pair) == 2 for pair in pairs)


@pytest.mark.parametrize("hard", [False, True])
def test_few_questions_about_a_scene_are_some_of_all_and_pairs_stay_together(hard: bool) -> None:
    every = [(one.image_id, one.question) for one in questions("search", 4, hard=hard)]
    some = questions("search", 4, hard=hard, each=5)
    places = [every.index((one.image_id, one.question)) for one in some]
    assert places == sorted(places)
    for scene in range(4):
        asked = [one for one in some if one.image_id == scene]
        assert 4 <= len(asked) <= 5, "a pair that does not fit leaves one place"
        pairs = [one.pair for one in asked if one.pair is not None]
        assert all(pairs.count(pair) == 2 for pair in pairs)
    assert {one.kind for one in some} > {some[0].kind}


def test_the_splits_are_not_the_readmes_and_ask_what_was_learnt() -> None:
    assert 0 not in SEEDS.values() and len(set(SEEDS.values())) == 3
    shown = {example.question for example in evaluation_split(5)}
    for split in SPLITS:
        asked = questions(split, 5, hard=False)
        assert {example.kind for example in asked} == set(LEARNT_KINDS)
        assert {example.question for example in asked} != shown
