"""Evaluator on mini-LLaVA in this process, for comparisons that need thousands of evaluations.

Vision features of every image are computed once, so a candidate costs a selection and one forward
pass of the language model over K tokens and the question.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.minillava.reader import Reader
from benchmarks.minillava.split import Example as SceneQuestion
from benchmarks.search.scenes import as_example, select_questions
from offline_search.dataset import SPLITS, Dataset, Split
from offline_search.evaluation.answers import Answers
from offline_search.evaluation.evaluator import EvaluationFailed, EvaluationJob
from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.tpdsl.executor.materialize import materialize
from vllm_autoprune.tpdsl.executor.refine import refine
from vllm_autoprune.tpdsl.tokens import VisualTokens

_SCENES_PER_BATCH = 8
_PROBE_BATCHES = 2


class MiniLlavaEvaluator:
    """Evaluator of one checkpoint on a number of scenes of each split."""

    def __init__(
        self, checkpoint: Path, scenes: dict[Split, int], *, each: int | None = None
    ) -> None:
        """``each`` is the maximum number of questions about one scene."""
        self._reader = Reader(checkpoint)
        self._questions = {
            split: select_questions(split, scenes[split], each=each) for split in SPLITS
        }
        examples = {
            split: [as_example(split, one) for one in self._questions[split]] for split in SPLITS
        }
        self.dataset = Dataset(checkpoint, examples)
        self._tokens: dict[tuple[Split, int], VisualTokens] = {}
        weights = _hash_weights(checkpoint)
        data = self.dataset.digest[:12]
        self.name = f"mini-LLaVA {weights} with transformers, data {data}"

    def probes(self) -> Sequence[VisualTokens]:
        """Visual tokens of the first batches of the search split."""
        batches = list(self._batches("search"))[:_PROBE_BATCHES]
        return [self._see("search", number, batch) for number, batch in enumerate(batches)]

    async def prepare(self) -> None:
        """Does nothing: the checkpoint is loaded already."""

    async def close(self) -> None:
        """Does nothing."""

    async def evaluate(self, job: EvaluationJob) -> Answers:
        """The answers to a job, computed in whole batches of scenes."""
        logprob: list[float] = []
        right: list[bool] = []
        begin = 0
        try:
            for number, batch in enumerate(self._batches(job.split)):
                selected = slice(max(job.start - begin, 0), max(job.stop - begin, 0))
                begin += len(batch)
                if batch[selected]:
                    scores, correct = self._answer(job, number, batch)
                    logprob += scores[selected].tolist()
                    right += correct[selected].tolist()
        except AutopruneError as error:
            raise EvaluationFailed(str(error)) from None
        return Answers(tuple(logprob), tuple(map(bool, right)))

    @torch.no_grad()
    def _answer(
        self, job: EvaluationJob, number: int, batch: list[SceneQuestion]
    ) -> tuple[Tensor, Tensor]:
        tokens = self._see(job.split, number, batch)
        rows = tokens.features
        if job.state is not None:
            rows = refine(materialize(job.state, job.budget), tokens).features
        answers = self._reader.score_answers(batch, rows)
        return answers.logprob, answers.right

    def _see(self, split: Split, number: int, batch: list[SceneQuestion]) -> VisualTokens:
        key = (split, number)
        if key not in self._tokens:
            self._tokens[key] = self._reader.encode(batch)
        return self._tokens[key]

    def _batches(self, split: Split) -> Iterator[list[SceneQuestion]]:
        groups = groupby(self._questions[split], key=lambda one: one.image_id // _SCENES_PER_BATCH)
        return (list(group) for _, group in groups)


def _hash_weights(checkpoint: Path) -> str:
    """Identifies the weights, so that a comparison is not resumed with others."""
    digest = hashlib.sha256()
    for path in sorted(checkpoint.rglob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
