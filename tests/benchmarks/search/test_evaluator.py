"""The evaluator of searches on a yardstick, and the data folder of its questions."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.search.evaluator import JointEvaluator, YardstickEvaluator, write_data
from benchmarks.yardsticks import open_yardstick
from benchmarks.yardsticks.examples import draw_examples
from benchmarks.yardsticks.yardstick import EncodedBatch
from offline_search.dataset import SPLITS, Dataset, Split, read_dataset
from offline_search.evaluator import EvaluationJob
from offline_search.history import Answers
from vllm_autoprune import PruningState, load_state
from vllm_autoprune.errors import EvaluationFailed, SelectionError
from vllm_autoprune.evaluation.questions import Example, read_questions

FEW: dict[Split, int] = {"search": 2, "validation": 3, "test": 4}


def open_evaluator(name: str, images: int, **options: Any) -> YardstickEvaluator:
    torch.set_num_threads(1)
    counts: dict[Split, int] = {"search": images, "validation": 1, "test": 1}
    return YardstickEvaluator(open_yardstick(name), counts, **options)


@pytest.fixture(scope="module")
def evaluator() -> YardstickEvaluator:
    return open_evaluator("minillava", 10)


async def measure(
    evaluator: YardstickEvaluator,
    candidate: PruningState | None,
    budget: int = 8,
    start: int = 0,
    stop: int | None = None,
) -> Answers:
    """Answers to the questions of the search split, by default to all of them."""
    stop = len(evaluator.dataset.splits["search"]) if stop is None else stop
    return await evaluator.evaluate(
        EvaluationJob(candidate, budget, "search", start, stop)
    )


async def test_partial_jobs_add_up_to_the_whole(evaluator: YardstickEvaluator) -> None:
    count = len(evaluator.dataset.splits["search"])
    state = load_state("visionzip")
    cuts = pairwise((0, 1, 7, count // 2 + 3, count))
    parts = [await measure(evaluator, state, 8, *cut) for cut in cuts]
    answers = await measure(evaluator, state)
    assert sum((part.right for part in parts), ()) == answers.right
    joined = torch.tensor(sum((part.logprob for part in parts), ()))
    assert torch.equal(joined, torch.tensor(answers.logprob))


async def test_a_budget_is_a_share_where_images_differ_in_size() -> None:
    evaluator = open_evaluator("miniqwen", 3, each=4)
    state = load_state("divprune")
    assert len({tokens.count for tokens in evaluator.encode_probes()}) > 1
    # 72 of 72 tokens are all tokens of an image of any size; 9 of 72 are an eighth.
    full = await measure(evaluator, None)
    assert await measure(evaluator, state, 72) == full
    eighth = await measure(evaluator, state, 9)
    assert eighth.relative_to(full, ()).mean() < -0.1


async def test_a_failed_evaluation_is_recorded_with_the_whole_text_of_its_cause(
    evaluator: YardstickEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise SelectionError.of("/scoring", "has no signal", "add one", subject="s")

    monkeypatch.setattr(EncodedBatch, "score", refuse)
    with pytest.raises(EvaluationFailed) as raised:
        await measure(evaluator, load_state("trim"), 3, 0, 1)
    assert raised.value.reason == "s: /scoring: has no signal -> add one"


def test_a_data_folder_has_all_questions_and_its_splits_share_no_scene(
    tmp_path: Path,
) -> None:
    write_data(tmp_path, FEW)
    dataset = read_dataset(tmp_path)
    for split in SPLITS:
        questions = draw_examples(split, FEW[split])
        examples = dataset.splits[split]
        texts = sorted(example.question for example in examples)
        assert texts == sorted(example.question for example in questions)
        assert len({example.image for example in examples}) == FEW[split]
    digests = {picture.digest for picture in dataset.images.values()}
    assert len(digests) == sum(FEW.values())


def test_sampled_questions_keep_pairs_together(tmp_path: Path) -> None:
    write_data(tmp_path, FEW, each=5)
    for examples in read_dataset(tmp_path).splits.values():
        for image in {example.image for example in examples}:
            about = [example for example in examples if example.image == image]
            assert 4 <= len(about) <= 5, "a pair that does not fit leaves one place"
            pairs = [example.pair for example in about if example.pair is not None]
            assert all(pairs.count(pair) == 2 for pair in pairs)


def test_pictures_of_a_data_folder_are_clean_and_clips_are_folders_of_frames(
    tmp_path: Path,
) -> None:
    write_data(tmp_path / "pages", FEW, model="miniqwen", clean=True)
    pictures = read_dataset(tmp_path / "pages").images
    clean = draw_examples("test", FEW["test"], "miniqwen", clean=True)[-1]
    assert pictures["images/test-3.png"].read() == clean.png
    write_data(tmp_path / "clips", FEW, model="clips")
    questions = read_questions(tmp_path / "clips/test.jsonl", frames=8)
    drawn = draw_examples("test", FEW["test"], "clips")
    texts = [(example.question, example.answer) for example in drawn]
    assert [(q.text, *q.answers) for q in questions] == texts
    videos = {picture.digest for q in questions for picture in q.pictures}
    assert len(videos) == FEW["test"]
    write_data(tmp_path / "long", FEW, model="clips", brief_frames=32)
    questions = read_questions(tmp_path / "long/test.jsonl", frames=32)
    folders = {picture.path for q in questions for picture in q.pictures}
    assert {len(list(folder.iterdir())) for folder in folders} == {32}


async def test_yardsticks_are_asked_in_turn_each_about_its_own_pictures() -> None:
    class Stub:
        """Answers question q with its factor times q."""

        def __init__(self, key: str, factor: float, count: int) -> None:
            self.key = key
            self.model = f"mini-{key}"
            self._factor = factor
            examples = [
                Example(image=f"{n}.png", question=f"{n}?", answer="a")
                for n in range(count)
            ]
            self.dataset = Dataset(Path(), dict.fromkeys(SPLITS, examples))

        async def evaluate(self, job: EvaluationJob) -> Answers:
            values = [self._factor * n for n in range(job.start, job.stop)]
            return Answers(tuple(values), (True,) * len(values))

    stubs: Any = [Stub("a", 1.0, 4), Stub("b", -10.0, 5), Stub("c", 100.0, 4)]
    joint = JointEvaluator(stubs)
    asked = joint.dataset.splits["search"]
    assert [example.model for example in asked] == ["a", "b", "c"] * 4
    assert asked[0].image == "a/0.png" and asked[1].image == "b/0.png"
    expected = [factor * n for n in range(4) for factor in (1.0, -10.0, 100.0)]
    for start in range(12):
        for stop in range(start + 1, 13):
            answers = await joint.evaluate(
                EvaluationJob(None, 0, "search", start, stop)
            )
            assert list(answers.logprob) == expected[start:stop]
    assert joint.name.startswith(
        "mini-a and mini-b and mini-c with transformers, data "
    )
