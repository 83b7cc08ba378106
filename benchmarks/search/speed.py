"""How fast candidates are measured: together, one after another, and with a restart for each.

Knows nothing about where candidates come from: they are drawn at random. All three are measured in
one run on the same examples. The slow ways are measured on a few candidates and told for each.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.minillava.split import CLIP, LLAVA
from benchmarks.server import serve
from offline_search.answers import Answers
from offline_search.evaluators.protocol import Job
from offline_search.evaluators.served import ServedEvaluator
from offline_search.examples import Dataset
from offline_search.proposal import assembled
from offline_search.report.markdown import table
from offline_search.settings import Settings
from offline_search.space import Dice, composed
from vllm_autoprune.tpdsl.state import PruningState

_COMMON = (
    "--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "512", "--block-size", "32",
    "--autoprune-text-tower", str(CLIP),
)  # fmt: skip
_STATES = ("--autoprune-state", "cdpruner", "--autoprune-requests", "states")


@dataclass(frozen=True)
class Speed:
    """Seconds a candidate, and how many candidates that was measured on."""

    together: float
    alone: float
    restarted: float
    candidates: int
    few: int
    examples: int

    def as_markdown(self) -> str:
        """One row a way, with its ratio to the fastest."""
        ways = (
            ("together, in one batch, features shared", self.together, self.candidates),
            ("one request at a time, features not shared", self.alone, self.few),
            ("a server started for each", self.restarted, self.few),
        )
        rows = [[name, str(n), f"{s:.2f}", f"{s / self.together:.1f}"] for name, s, n in ways]
        head = [f"{self.examples} examples", "candidates", "s a candidate", "times the first"]
        return "\n".join(table(head, rows, "lrrr")) + "\n"


def drawn(count: int, budget: int) -> list[PruningState]:
    """Random candidates of one search."""
    settings = Settings(base_policy="visionzip", budgets=(budget,))
    return [
        assembled(composed(Dice(Random(seed)), budget), settings, "candidate")
        for seed in range(count)
    ]


def measure(dataset: Dataset, candidates: int, few: int, budget: int) -> Speed:
    """Start servers and time all three ways."""
    states = drawn(candidates, budget)
    with serve(LLAVA, *_COMMON, *_STATES) as server:
        asyncio.run(_answered(server.url, dataset, states[:1], budget))
        together = _timed(server.url, dataset, states, budget, at_once=32)
    with serve(LLAVA, *_COMMON, *_STATES, "--autoprune-feature-cache-gb", "0") as server:
        asyncio.run(_answered(server.url, dataset, states[:1], budget))
        alone = _timed(server.url, dataset, states[:few], budget, at_once=1)
    began = time.monotonic()
    for state in states[:few]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.json"
            path.write_text(json.dumps(state.model_dump(mode="json")))
            with serve(LLAVA, *_COMMON, *_STATES[2:], "--autoprune-state", str(path)) as server:
                asyncio.run(_answered(server.url, dataset, [state], budget))
    restarted = time.monotonic() - began
    count = len(dataset.of("search"))
    return Speed(together / candidates, alone / few, restarted / few, candidates, few, count)


def _timed(
    url: str, dataset: Dataset, states: Sequence[PruningState], budget: int, at_once: int
) -> float:
    began = time.monotonic()
    asyncio.run(_answered(url, dataset, states, budget, at_once))
    return time.monotonic() - began


async def _answered(
    url: str,
    dataset: Dataset,
    states: Sequence[PruningState],
    budget: int,
    at_once: int = 32,
) -> list[Answers]:
    evaluator = ServedEvaluator([url], dataset, at_once=at_once)
    await evaluator.prepare()
    count = len(dataset.of("search"))
    jobs = [Job(state, budget, "search", 0, count) for state in states]
    try:
        return list(await asyncio.gather(*(evaluator.evaluate(job) for job in jobs)))
    finally:
        await evaluator.close()
