"""Serves the model twice, stock and pruned, and asks both the same questions.

Knows nothing about tables or pictures.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.demo.ask import SERVED_NAME, Answer, Client, Query, Timing, query
from benchmarks.demo.configurations import (
    FULL,
    PRUNED,
    Configuration,
    everything_kept,
    interleaved,
)
from benchmarks.demo.cost import kv_layout, visual_tokens
from benchmarks.demo.failure import not_started
from benchmarks.demo.progress import Progress
from benchmarks.demo.results import Results, control, row
from benchmarks.demo.stop import Stopper
from benchmarks.minillava.split import Example, held_out
from benchmarks.server import ServerDied, serve

COMMON_FLAGS = (
    "--served-model-name", SERVED_NAME, "--dtype", "bfloat16", "--max-model-len", "1024",
    "--block-size", "32", "--enforce-eager", "--no-enable-prefix-caching",
)  # fmt: skip
"""Of both servers. Prefix caching is off: a hit would be taken for a fast prefill."""

_ASKED, _TIMED = "asked", "timed"


@dataclass(frozen=True)
class Setting:
    """What to serve and how much to ask."""

    model: Path
    text_tower: Path
    state: str
    scenes: int
    rounds: int
    out: Path

    @property
    def pruning_flags(self) -> tuple[str, ...]:
        """What the second server gets on top; features of an image are not kept for the next
        question, or a row would profit from the one before it."""
        return (
            "--autoprune-state", self.state,
            "--autoprune-text-tower", str(self.text_tower),
            "--autoprune-feature-cache-gb", "0",
            "--trust-request-mm-kwargs",
        )  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """Answers by configuration, in the order of the examples, and times in order of rounds."""

    answers: dict[Configuration, list[Answer]]
    timings: dict[Configuration, list[Timing]]

    def answer(self, configuration: Configuration, number: int) -> str:
        """What was said to one example."""
        return self.answers[configuration][number].text


@dataclass(frozen=True)
class Questions:
    """What is asked for the scores, and what with the clock running, in wire form."""

    examples: tuple[Example, ...]
    asked: tuple[Query, ...]
    timed: tuple[Query, ...]


def questions(scenes: int, rounds: int) -> Questions:
    """Questions on scenes of the test split, and one on each of ``rounds`` other scenes."""
    examples = tuple(held_out("test", scenes))
    first = {e.image_id: e for e in reversed(held_out("validation", rounds))}
    return Questions(
        examples,
        tuple(query(e, _ASKED) for e in examples),
        tuple(query(first[number], _TIMED) for number in range(rounds)),
    )


def measure(
    setting: Setting, progress: Progress, stopper: Stopper
) -> tuple[Results, Questions, Measured]:
    """Both servers, one after the other; none is left behind when the demo is stopped."""
    setting.out.mkdir(parents=True, exist_ok=True)
    tokens, layout = visual_tokens(setting.model), kv_layout(setting.model)
    with progress.stage("draw scenes"):
        asked = questions(setting.scenes, setting.rounds)
    kept = everything_kept(tokens)
    with stopper.guard():
        stock = _serve_and_ask(setting, "stock", (), asked, (FULL,), (FULL,), progress, stopper)
    with stopper.guard():
        flags, timed = setting.pruning_flags, (*PRUNED, kept)
        pruned = _serve_and_ask(setting, "pruned", flags, asked, PRUNED, timed, progress, stopper)
    measured = Measured(stock.answers | pruned.answers, stock.timings | pruned.timings)
    rows = tuple(
        row(c, asked.examples, measured.answers[c], measured.timings[c], layout)
        for c in (FULL, *PRUNED)
    )
    results = Results(
        rows=rows,
        control=control(measured.timings[FULL], measured.timings[kept]),
        questions=len(asked.examples),
        scenes=setting.scenes,
        visual_tokens=tokens,
        kv_formula=layout.formula,
        environment=environment(),
    )
    return results, asked, measured


def _serve_and_ask(
    setting: Setting,
    name: str,
    flags: Sequence[str],
    asked: Questions,
    scored: Sequence[Configuration],
    timed: Sequence[Configuration],
    progress: Progress,
    stopper: Stopper,
) -> Measured:
    log = setting.out / f"{name}.log"
    with contextlib.ExitStack() as stack:
        with progress.stage(f"{name} server: start"):
            try:
                server = stack.enter_context(serve(setting.model, *COMMON_FLAGS, *flags, log=log))
            except ServerDied:
                raise not_started(log) from None
        asking = ask_everything(server.url, name, asked, scored, timed, progress)
        return asyncio.run(stopper.cancellable(asking))


async def ask_everything(
    url: str,
    name: str,
    asked: Questions,
    scored: Sequence[Configuration],
    timed: Sequence[Configuration],
    progress: Progress,
) -> Measured:
    """First all questions, some at a time, which warms the server up; then one by one, timed."""
    answers: dict[Configuration, list[Answer]] = {}
    timings: dict[Configuration, list[Timing]] = {c: [] for c in timed}
    async with Client(url) as client:
        total = len(scored) * len(asked.asked)
        with progress.stage(f"{name} server: questions", total) as advance:
            for configuration in scored:
                extra = configuration.extra_body
                pairs = [(item, extra) for item in asked.asked]
                answers[configuration] = await client.ask_all(pairs, advance)
        rounds = len(asked.timed)
        with progress.stage(f"{name} server: times", rounds * len(timed)) as advance:
            for number, configuration in interleaved(timed, rounds):
                timing = await client.timed(asked.timed[number], configuration.extra_body)
                timings[configuration].append(timing)
                advance()
    return Measured(answers, timings)


def environment() -> dict[str, str]:
    """Where the figures come from."""
    names = ("vllm", "torch", "transformers", "openai")
    found = {name: importlib.metadata.version(name) for name in names}
    return {
        **found,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": str(os.cpu_count()),
    }
