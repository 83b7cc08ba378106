"""States measured on mini-LLaVA within this process: what a server measures, without a server.

Knows nothing about searching. Every image is seen once and its features are kept, so a candidate
costs a selection and one pass of the language model over K tokens and the question. For comparing
strategies, which takes thousands of evaluations; a winner is measured through vLLM.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.minillava.reader import Reader
from benchmarks.minillava.split import Example as Asked
from benchmarks.search.data import as_example, questions
from offline_search.answers import Answers
from offline_search.evaluators.protocol import EvaluationFailed, Job
from offline_search.examples import SPLITS, Dataset
from offline_search.records import Split
from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.tpdsl.executor.materialize import materialize
from vllm_autoprune.tpdsl.executor.refine import refine
from vllm_autoprune.tpdsl.tokens import VisualTokens

_SCENES_AT_ONCE = 8
_PROBED = 2


class MiniLlavaEvaluator:
    """One checkpoint and its splits; ``name`` tells what was measured."""

    def __init__(
        self, checkpoint: Path, scenes: dict[Split, int], *, each: int | None = None
    ) -> None:
        """``each`` is the most questions asked about one scene."""
        self._reader = Reader(checkpoint)
        self._asked = {split: questions(split, scenes[split], each=each) for split in SPLITS}
        examples = {
            split: [as_example(split, one) for one in self._asked[split]] for split in SPLITS
        }
        self.dataset = Dataset(checkpoint, examples)
        self._seen: dict[tuple[Split, int], VisualTokens] = {}
        weights = _fingerprint(checkpoint)
        data = self.dataset.digest[:12]
        self.name = f"mini-LLaVA {weights} with transformers, data {data}"

    def probes(self) -> Sequence[VisualTokens]:
        """The first scenes of the search split, one record of some questions each."""
        parts = list(self._parts("search"))[:_PROBED]
        return [self._look("search", number, part) for number, part in enumerate(parts)]

    async def prepare(self) -> None:
        """Nothing to look for: the checkpoint is open."""

    async def close(self) -> None:
        """Nothing to let go of."""

    async def evaluate(self, job: Job) -> Answers:
        """Whole batches of scenes are answered, and what was not asked is left out."""
        logprob: list[float] = []
        right: list[bool] = []
        begin = 0
        try:
            for number, part in enumerate(self._parts(job.split)):
                wanted = slice(max(job.start - begin, 0), max(job.stop - begin, 0))
                begin += len(part)
                if part[wanted]:
                    found = self._answer(job, number, part)
                    logprob += found[0][wanted].tolist()
                    right += found[1][wanted].tolist()
        except AutopruneError as error:
            raise EvaluationFailed(str(error)) from None
        return Answers(tuple(logprob), tuple(map(bool, right)))

    @torch.no_grad()
    def _answer(self, job: Job, number: int, part: list[Asked]) -> tuple[Tensor, Tensor]:
        tokens = self._look(job.split, number, part)
        rows = tokens.features
        if job.state is not None:
            rows = refine(materialize(job.state, job.budget), tokens).features
        answered = self._reader.score_answers(part, rows)
        return answered.logprob, answered.right

    def _look(self, split: Split, number: int, part: list[Asked]) -> VisualTokens:
        key = (split, number)
        if key not in self._seen:
            self._seen[key] = self._reader.encode(part)
        return self._seen[key]

    def _parts(self, split: Split) -> Iterator[list[Asked]]:
        groups = groupby(self._asked[split], key=lambda one: one.image_id // _SCENES_AT_ONCE)
        return (list(part) for _, part in groups)


def _fingerprint(checkpoint: Path) -> str:
    """Which weights are measured: a comparison must not go on with others."""
    digest = hashlib.sha256()
    for path in sorted(checkpoint.rglob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
