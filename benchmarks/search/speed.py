"""Speed of candidate evaluation: concurrent, sequential, and with a server restart for each.

All three methods are measured in one run on the same examples with random candidates, the slow ones
on fewer of them.
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
from offline_search.candidates.proposal import assemble_state
from offline_search.candidates.search_space import RandomSource, sample_proposal
from offline_search.dataset import Dataset
from offline_search.evaluation.answers import Answers
from offline_search.evaluation.evaluator import EvaluationJob
from offline_search.evaluation.served_evaluator import MAX_IN_FLIGHT, ServedEvaluator
from offline_search.report.markdown import table
from offline_search.settings import Settings
from vllm_autoprune.tpdsl.states.state import PruningState

_SERVER_FLAGS = ("--enforce-eager", "--block-size", "32")
_STATE_FLAGS = ("--autoprune-state", "cdpruner", "--autoprune-requests", "states")
_NO_CACHE_FLAGS = (
    "--autoprune-feature-cache-gb", "0", "--no-enable-prefix-caching",
    "--mm-processor-cache-gb", "0",
)  # fmt: skip
"""Without these, requests about an image share its features, and some even its KV cache."""
_ANSWER = "w7"
"""A word of the tokenizer that :func:`write_llava` gives a model without weights."""


@dataclass(frozen=True)
class ServedModel:
    """The model that candidates are evaluated on, with its server flags and data set."""

    model: Path
    flags: tuple[str, ...]
    dataset: Dataset


def mini_llava(dataset: Dataset) -> ServedModel:
    """mini-LLaVA, whose small size leaves the fixed cost of a request."""
    flags = (*_SERVER_FLAGS, "--max-model-len", "512", "--autoprune-text-tower", str(CLIP))
    return ServedModel(LLAVA, flags, dataset)


def llava_7b_widths(dataset: Dataset, layers: int, folder: Path) -> ServedModel:
    """LLaVA-1.5-7B's widths and vision tower with random weights and few language layers.

    Answers are replaced by a word of its tokenizer, so only their cost is meaningful.
    """
    model = write_llava(folder / f"llava-{layers}", layers)
    splits = {
        split: tuple(one.model_copy(update={"answer": _ANSWER}) for one in examples)
        for split, examples in dataset.splits.items()
    }
    flags = (*_SERVER_FLAGS, "--max-model-len", "1024", "--load-format", "dummy")
    return ServedModel(model, flags, Dataset(dataset.folder, splits))


@dataclass(frozen=True)
class Timing:
    """Time of one method for all candidates; ``processor`` adds up server and client."""

    name: str
    candidates: int
    seconds: float
    processor: float

    @property
    def seconds_each(self) -> float:
        """Seconds per candidate."""
        return self.seconds / self.candidates

    @property
    def processor_each(self) -> float:
        """Processor seconds per candidate."""
        return self.processor / self.candidates


@dataclass(frozen=True)
class SpeedComparison:
    """All methods on the same examples; the first is the one that a search uses."""

    timings: Sequence[Timing]
    examples: int

    def as_markdown(self) -> str:
        """One row per method, with ratios to the first of wall time and of processor time.

        Processor time is the more reliable one on a machine that does other work.
        """
        first = self.timings[0]
        rows = [
            [
                timing.name,
                str(timing.candidates),
                f"{timing.seconds_each:.2f}",
                f"{timing.seconds_each / first.seconds_each:.1f}",
                f"{1000 * timing.processor_each / self.examples:.1f}",
                f"{timing.processor_each / first.processor_each:.1f}",
            ]
            for timing in self.timings
        ]
        head = [
            f"{self.examples} examples",
            "candidates",
            "s per candidate",
            "times the first",
            "CPU ms per answer",
            "times the first",
        ]
        return "\n".join(table(head, rows, "lrrrrr")) + "\n"


def random_states(count: int, budget: int) -> list[PruningState]:
    """Random candidates."""
    settings = Settings(base_policy="visionzip", budgets=(budget,))
    return [
        assemble_state(sample_proposal(RandomSource(Random(seed)), budget), settings)
        for seed in range(count)
    ]


def measure_speed(served: ServedModel, candidates: int, few: int, budget: int) -> SpeedComparison:
    """Start servers and time all three methods."""
    dataset, states = served.dataset, random_states(candidates, budget)
    with serve(served.model, *served.flags, *_STATE_FLAGS) as server:
        asyncio.run(_evaluate(server.url, dataset, states[:1], budget))
        concurrent = _time_evaluation("together, features shared", server, dataset, states, budget)
    with serve(served.model, *served.flags, *_STATE_FLAGS, *_NO_CACHE_FLAGS) as server:
        asyncio.run(_evaluate(server.url, dataset, states[:1], budget))
        name = "one request at a time, features not shared"
        sequential = _time_evaluation(name, server, dataset, states[:few], budget, max_in_flight=1)
    start, processor = time.monotonic(), -time.process_time()
    for state in states[:few]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.json"
            path.write_text(json.dumps(state.model_dump(mode="json")))
            flags = (*served.flags, *_STATE_FLAGS[2:], "--autoprune-state", str(path))
            with serve(served.model, *flags) as server:
                asyncio.run(_evaluate(server.url, dataset, [state], budget))
                processor += processor_seconds(server.process.pid)
    processor += time.process_time()
    restarted = Timing("a server started for each", few, time.monotonic() - start, processor)
    return SpeedComparison((concurrent, sequential, restarted), len(dataset.examples("search")))


def _time_evaluation(
    name: str,
    server: Server,
    dataset: Dataset,
    states: Sequence[PruningState],
    budget: int,
    max_in_flight: int = MAX_IN_FLIGHT,
) -> Timing:
    start = time.monotonic()
    before = processor_seconds(server.process.pid) + time.process_time()
    asyncio.run(_evaluate(server.url, dataset, states, budget, max_in_flight))
    processor = processor_seconds(server.process.pid) + time.process_time() - before
    return Timing(name, len(states), time.monotonic() - start, processor)


def processor_seconds(group: int) -> float:
    """Processor time of all running processes of a group; 0 on systems without ``/proc``."""
    ticks = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process may have exited
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def _evaluate(
    url: str,
    dataset: Dataset,
    states: Sequence[PruningState],
    budget: int,
    max_in_flight: int = MAX_IN_FLIGHT,
) -> list[Answers]:
    evaluator = ServedEvaluator([url], dataset, max_in_flight=max_in_flight)
    await evaluator.prepare()
    count = len(dataset.examples("search"))
    jobs = [EvaluationJob(state, budget, "search", 0, count) for state in states]
    try:
        return list(await asyncio.gather(*(evaluator.evaluate(job) for job in jobs)))
    finally:
        await evaluator.close()
