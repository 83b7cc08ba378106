"""The evaluator of searches on a yardstick, and the data folder of its questions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks.search.evaluator import YardstickEvaluator, write_data
from benchmarks.yardsticks import open_yardstick
from benchmarks.yardsticks.examples import draw_examples
from benchmarks.yardsticks.questions import KINDS
from offline_search.components import Candidate, SelectionProgram
from offline_search.dataset import SPLITS, Split, read_dataset
from offline_search.evaluator import EvaluationJob
from offline_search.history import Answers, accuracy, relative_logprob
from offline_search.rounds import selection_fingerprint
from vllm_autoprune import load_state
from vllm_autoprune.errors import EvaluationFailed

SCENES = 10
FEW: dict[Split, int] = {"search": 2, "validation": 3, "test": 4}


def _images(search: int) -> dict[Split, int]:
    return {"search": search, "validation": 1, "test": 1}


@pytest.fixture(scope="module")
def evaluator() -> YardstickEvaluator:
    torch.set_num_threads(1)
    return YardstickEvaluator(open_yardstick("minillava"), _images(SCENES))


async def test_scores_follow_the_quality_of_the_selection(
    evaluator: YardstickEvaluator,
) -> None:
    count = len(evaluator.dataset.examples("search"))
    full = await evaluator.evaluate(EvaluationJob(None, 0, "search", 0, count))
    guided = await evaluator.evaluate(EvaluationJob(load_state("cdpruner"), 8, "search", 0, count))
    blind = await evaluator.evaluate(EvaluationJob(load_state("visionzip"), 8, "search", 0, count))
    assert accuracy(full) > 0.97 and accuracy(full) > accuracy(guided) > accuracy(blind) + 0.1
    assert 0 > relative_logprob(guided, full).mean() > relative_logprob(blind, full).mean() + 0.5


async def test_partial_jobs_add_up_to_the_whole(evaluator: YardstickEvaluator) -> None:
    count = len(evaluator.dataset.examples("search"))
    state = load_state("visionzip")
    cuts: Sequence[int] = (0, 1, 7, count // 2 + 3, count)
    parts = [
        await evaluator.evaluate(EvaluationJob(state, 8, "search", start, stop))
        for start, stop in pairwise(cuts)
    ]
    answers = await evaluator.evaluate(EvaluationJob(state, 8, "search", 0, count))
    assert sum((part.right for part in parts), ()) == answers.right
    joined = torch.tensor(sum((part.logprob for part in parts), ()))
    assert torch.equal(joined, torch.tensor(answers.logprob))


def test_probes_distinguish_states(evaluator: YardstickEvaluator) -> None:
    probes = evaluator.probes()
    assert probes
    names = ("cdpruner", "visionzip", "autoprune", "divprune")
    seen = {name: selection_fingerprint(load_state(name), (8,), probes) for name in names}
    assert len(set(seen.values())) == len(names)
    # Other signals, the same tokens; `ablation-quota-0` still adds residuals to CDPruner's rows.
    alone = load_state("autoprune").without_exchange()
    assert alone.digest != load_state("cdpruner").digest
    assert seen["cdpruner"] == selection_fingerprint(alone, (8,), probes)


async def test_a_budget_is_a_share_where_images_differ_in_size() -> None:
    torch.set_num_threads(1)
    evaluator = YardstickEvaluator(open_yardstick("miniqwen"), _images(3), each=4)
    sizes = [tokens.count for tokens in evaluator.probes()]
    assert len(set(sizes)) > 1
    count = len(evaluator.dataset.examples("search"))
    full = await evaluator.evaluate(EvaluationJob(None, 0, "search", 0, count))
    state = load_state("divprune")
    # 72 of 72 tokens are all tokens of an image of any size; 9 of 72 are an eighth.
    answers = await evaluator.evaluate(EvaluationJob(state, 72, "search", 0, count))
    assert answers == full
    eighth = await evaluator.evaluate(EvaluationJob(state, 9, "search", 0, count))
    assert relative_logprob(eighth, full).mean() < -0.1


@pytest.mark.parametrize(("name", "budget"), [("minillava", 8), ("miniqwen", 9)])
async def test_programs_are_measured_on_the_tokens_that_they_select(name: str, budget: int) -> None:
    """The base policy's picks score as the base policy does, any others differently."""
    torch.set_num_threads(1)
    evaluator = YardstickEvaluator(open_yardstick(name), _images(2), each=4, base_policy="divprune")
    count = len(evaluator.dataset.examples("search"))
    head = "def select(features, signals, K):\n    return"

    async def measure(candidate: Candidate) -> Answers:
        return await evaluator.evaluate(EvaluationJob(candidate, budget, "search", 0, count))

    base = await measure(load_state("divprune"))
    assert await measure(SelectionProgram(f"{head} signals['reference']")) == base
    front = await measure(SelectionProgram(f"{head} range(K)"))
    assert sum(front.logprob) < sum(base.logprob)
    wrong = SelectionProgram(f"{head} [0]")
    with pytest.raises(EvaluationFailed, match="different indices"):
        await measure(wrong)


def test_the_data_folder_can_be_read_and_sampled_questions_keep_pairs_together(
    tmp_path: Path,
) -> None:
    write_data(tmp_path / "all", FEW)
    write_data(tmp_path / "few", FEW, each=5)
    dataset, sampled = read_dataset(tmp_path / "all"), read_dataset(tmp_path / "few")
    images = set()
    for split in SPLITS:
        questions, read = draw_examples(split, FEW[split]), dataset.examples(split)
        assert {question.kind for question in questions} == set(KINDS)
        assert sorted(e.question for e in read) == sorted(e.question for e in questions)
        assert len({example.image for example in read}) == FEW[split]
        images |= {dataset.image_bytes(example) for example in read}
        some = sampled.examples(split)
        for image in {example.image for example in some}:
            about = [example for example in some if example.image == image]
            assert 4 <= len(about) <= 5, "a pair that does not fit leaves one place"
            pairs = [example.pair for example in about if example.pair is not None]
            assert all(pairs.count(pair) == 2 for pair in pairs)
        assert {example.category for example in some} > {some[0].category}
    assert len(images) == sum(FEW.values()), "splits share no scene"
    assert all(image.startswith(b"\x89PNG") for image in images)
