"""How fast candidates are measured: together, one after another, and with a restart for each.

Knows nothing about where candidates come from: they are drawn at random. All three are measured in
one run on the same examples. The slow ways are measured on a few candidates and told for each.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.common.shapes import write_llava
from benchmarks.minillava.split import CLIP, LLAVA
from benchmarks.server import Server, serve
from offline_search.answers import Answers
from offline_search.evaluators.protocol import Job
from offline_search.evaluators.served import AT_ONCE, ServedEvaluator
from offline_search.examples import Dataset
from offline_search.proposal import assembled
from offline_search.report.markdown import table
from offline_search.settings import Settings
from offline_search.space import Dice, composed
from vllm_autoprune.tpdsl.state import PruningState

_COMMON = ("--enforce-eager", "--dtype", "bfloat16", "--block-size", "32")
_STATES = ("--autoprune-state", "cdpruner", "--autoprune-requests", "states")
_NOTHING_SHARED = (
    "--autoprune-feature-cache-gb", "0", "--no-enable-prefix-caching",
    "--mm-processor-cache-gb", "0",
)  # fmt: skip
"""Else a state that reads no question finds its image's features, or even its KV, again."""
_ANSWER = "w7"
"""A word of the tokenizer that :func:`write_llava` gives a model without weights."""


@dataclass(frozen=True)
class Measured:
    """The model that candidates are measured on, and what it is asked."""

    model: Path
    flags: tuple[str, ...]
    dataset: Dataset


def mini_llava(dataset: Dataset) -> Measured:
    """A few million parameters: what a request costs besides its model."""
    flags = (*_COMMON, "--max-model-len", "512", "--autoprune-text-tower", str(CLIP))
    return Measured(LLAVA, flags, dataset)


def true_widths(dataset: Dataset, layers: int, folder: Path) -> Measured:
    """LLaVA-1.5-7B's widths and vision tower, so many language layers, no weights.

    The same images and questions. Answers become a word that its tokenizer has: what they score
    means nothing here, and costs what it costs.
    """
    model = write_llava(folder / f"llava-{layers}", layers)
    worded = {
        split: tuple(one.model_copy(update={"answer": _ANSWER}) for one in examples)
        for split, examples in dataset.splits.items()
    }
    flags = (*_COMMON, "--max-model-len", "1024", "--load-format", "dummy")
    return Measured(model, flags, Dataset(dataset.folder, worded))


@dataclass(frozen=True)
class Way:
    """One way to measure candidates; seconds are for all of them, processor's of server and all."""

    name: str
    candidates: int
    seconds: float
    processor: float

    @property
    def each(self) -> float:
        """Seconds a candidate."""
        return self.seconds / self.candidates


@dataclass(frozen=True)
class Speed:
    """All ways on the same examples, the one that a search takes first."""

    ways: Sequence[Way]
    examples: int

    def as_markdown(self) -> str:
        """One row a way, with its ratios to the first: of time, and of processor time.

        On a machine with other work the second is the one to believe.
        """
        first = self.ways[0]
        rows = [
            [
                way.name,
                str(way.candidates),
                f"{way.each:.2f}",
                f"{way.each / first.each:.1f}",
                f"{1000 * way.processor / way.candidates / self.examples:.1f}",
                f"{way.processor / way.candidates / (first.processor / first.candidates):.1f}",
            ]
            for way in self.ways
        ]
        head = [
            f"{self.examples} examples",
            "candidates",
            "s a candidate",
            "times the first",
            "CPU ms an answer",
            "times the first",
        ]
        return "\n".join(table(head, rows, "lrrrrr")) + "\n"


def drawn(count: int, budget: int) -> list[PruningState]:
    """Random candidates of one search."""
    settings = Settings(base_policy="visionzip", budgets=(budget,))
    return [
        assembled(composed(Dice(Random(seed)), budget), settings, "candidate")
        for seed in range(count)
    ]


def measure(on: Measured, candidates: int, few: int, budget: int) -> Speed:
    """Start servers and time all three ways."""
    dataset, states = on.dataset, drawn(candidates, budget)
    with serve(on.model, *on.flags, *_STATES) as server:
        asyncio.run(_answered(server.url, dataset, states[:1], budget))
        together = _timed("together, features shared", server, dataset, states, budget)
    with serve(on.model, *on.flags, *_STATES, *_NOTHING_SHARED) as server:
        asyncio.run(_answered(server.url, dataset, states[:1], budget))
        name = "one request at a time, features not shared"
        alone = _timed(name, server, dataset, states[:few], budget, at_once=1)
    began, processor = time.monotonic(), 0.0
    for state in states[:few]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.json"
            path.write_text(json.dumps(state.model_dump(mode="json")))
            flags = (*on.flags, *_STATES[2:], "--autoprune-state", str(path))
            with serve(on.model, *flags) as server:
                asyncio.run(_answered(server.url, dataset, [state], budget))
                processor += processor_seconds(server.process.pid)
    restarted = Way("a server started for each", few, time.monotonic() - began, processor)
    return Speed((together, alone, restarted), len(dataset.of("search")))


def _timed(
    name: str,
    server: Server,
    dataset: Dataset,
    states: Sequence[PruningState],
    budget: int,
    at_once: int = AT_ONCE,
) -> Way:
    began = time.monotonic()
    before = processor_seconds(server.process.pid) + time.process_time()
    asyncio.run(_answered(server.url, dataset, states, budget, at_once))
    processor = processor_seconds(server.process.pid) + time.process_time() - before
    return Way(name, len(states), time.monotonic() - began, processor)


def processor_seconds(group: int) -> float:
    """What the living processes of a process group have used; 0 where there is no ``/proc``."""
    ticks = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may have ended by now
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def _answered(
    url: str,
    dataset: Dataset,
    states: Sequence[PruningState],
    budget: int,
    at_once: int = AT_ONCE,
) -> list[Answers]:
    evaluator = ServedEvaluator([url], dataset, at_once=at_once)
    await evaluator.prepare()
    count = len(dataset.of("search"))
    jobs = [Job(state, budget, "search", 0, count) for state in states]
    try:
        return list(await asyncio.gather(*(evaluator.evaluate(job) for job in jobs)))
    finally:
        await evaluator.close()
