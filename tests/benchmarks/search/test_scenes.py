from __future__ import annotations

from pathlib import Path

from benchmarks.minillava.wordings import KINDS
from benchmarks.search.scenes import select_questions, write_data
from offline_search.dataset import SPLITS, Split, read_dataset

FEW: dict[Split, int] = {"search": 2, "validation": 3, "test": 4}


def test_the_data_folder_can_be_read(tmp_path: Path) -> None:
    write_data(tmp_path, FEW)
    dataset = read_dataset(tmp_path)
    for split in SPLITS:
        questions = select_questions(split, FEW[split])
        read = dataset.examples(split)
        assert sorted(e.question for e in read) == sorted(e.question for e in questions)
        assert len({example.image for example in read}) == FEW[split]
        assert dataset.image_bytes(read[0]).startswith(b"\x89PNG")
        pairs = [example.pair for example in read if example.pair is not None]
        assert pairs and all(pairs.count(pair) == 2 for pair in pairs)


def test_sampled_questions_keep_pairs_together() -> None:
    every = [(one.image_id, one.question) for one in select_questions("search", 4)]
    some = select_questions("search", 4, each=5)
    places = [every.index((one.image_id, one.question)) for one in some]
    assert places == sorted(places)
    for scene in range(4):
        questions = [one for one in some if one.image_id == scene]
        assert 4 <= len(questions) <= 5, "a pair that does not fit leaves one place"
        pairs = [one.pair for one in questions if one.pair is not None]
        assert all(pairs.count(pair) == 2 for pair in pairs)
    assert {one.kind for one in some} > {some[0].kind}


def test_splits_share_no_scene_and_have_every_kind() -> None:
    by_split = {split: select_questions(split, 5) for split in SPLITS}
    for questions in by_split.values():
        assert {one.kind for one in questions} == set(KINDS)
    images = [one.image.numpy().tobytes() for questions in by_split.values() for one in questions]
    assert len(set(images)) == 5 * len(SPLITS)
