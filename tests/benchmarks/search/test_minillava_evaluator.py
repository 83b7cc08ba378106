from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from benchmarks.minillava.split import CHECKPOINT
from benchmarks.search.minillava_evaluator import MiniLlavaEvaluator
from offline_search.evaluation.answers import accuracy, relative_logprob
from offline_search.evaluation.candidate_check import selection_fingerprint
from offline_search.evaluation.evaluator import EvaluationJob
from vllm_autoprune import load_state

SCENES = 10


@pytest.fixture(scope="module")
def evaluator() -> MiniLlavaEvaluator:
    torch.set_num_threads(1)
    scenes = {"search": SCENES, "validation": 1, "test": 1}
    return MiniLlavaEvaluator(CHECKPOINT, scenes)  # type: ignore[arg-type]


async def test_scores_follow_the_quality_of_the_selection(
    evaluator: MiniLlavaEvaluator,
) -> None:
    count = len(evaluator.dataset.examples("search"))
    full = await evaluator.evaluate(EvaluationJob(None, 0, "search", 0, count))
    guided = await evaluator.evaluate(EvaluationJob(load_state("cdpruner"), 8, "search", 0, count))
    blind = await evaluator.evaluate(EvaluationJob(load_state("visionzip"), 8, "search", 0, count))
    assert accuracy(full) > 0.97 and accuracy(full) > accuracy(guided) > accuracy(blind) + 0.1
    assert 0 > relative_logprob(guided, full).mean() > relative_logprob(blind, full).mean() + 0.5


async def test_partial_jobs_add_up_to_the_whole(evaluator: MiniLlavaEvaluator) -> None:
    count = len(evaluator.dataset.examples("search"))
    state = load_state("visionzip")
    cuts: Sequence[int] = (0, 1, 7, count // 2 + 3, count)
    parts = [
        await evaluator.evaluate(EvaluationJob(state, 8, "search", start, stop))
        for start, stop in pairwise(cuts)
    ]
    whole = await evaluator.evaluate(EvaluationJob(state, 8, "search", 0, count))
    assert sum((part.right for part in parts), ()) == whole.right
    joined = torch.tensor(sum((part.logprob for part in parts), ()))
    assert torch.equal(joined, torch.tensor(whole.logprob))


def test_probes_distinguish_states(evaluator: MiniLlavaEvaluator) -> None:
    probes = evaluator.probes()
    assert probes
    names = ("cdpruner", "visionzip", "autoprune", "divprune")
    seen = {name: selection_fingerprint(load_state(name), (8,), probes) for name in names}
    assert len(set(seen.values())) == len(names)
    assert seen["cdpruner"] == selection_fingerprint(load_state("ablation-quota-0"), (8,), probes)
