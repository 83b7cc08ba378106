"""Measurements of the demo: the model is served stock and pruned, both get the same questions."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.progress import Progress
from benchmarks.common.report import environment
from benchmarks.demo.chat_client import (
    SERVED_NAME,
    Answer,
    Query,
    Timing,
    ask_all,
    ask_timed,
    build_query,
)
from benchmarks.demo.configurations import (
    FULL,
    PRUNED,
    Configuration,
    everything_kept,
    interleaved,
)
from benchmarks.demo.failure import build_start_error
from benchmarks.demo.interrupt import InterruptHandler
from benchmarks.demo.kv_cache import count_visual_tokens, read_kv_layout
from benchmarks.demo.results import Results, build_control, build_row
from benchmarks.minillava.split import Example, draw_examples
from benchmarks.server import ServerDied, serve

COMMON_FLAGS = (
    "--served-model-name", SERVED_NAME, "--dtype", "bfloat16", "--max-model-len", "1024",
    "--block-size", "32", "--enforce-eager", "--no-enable-prefix-caching",
)  # fmt: skip
"""Of both servers. Prefix caching is off, because a hit would look like a fast prefill."""

_ASKED, _TIMED = "asked", "timed"


@dataclass(frozen=True)
class Settings:
    """What is served, and how many questions are sent."""

    model: Path
    text_tower: Path
    state: str
    scenes: int
    rounds: int
    out: Path

    @property
    def pruning_flags(self) -> tuple[str, ...]:
        """Further flags of the pruned server; features of images are not cached, because a row
        would profit from the one before it."""
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
        """The text of the answer to one example."""
        return self.answers[configuration][number].text


@dataclass(frozen=True)
class Questions:
    """Queries that are scored, and queries that are timed."""

    examples: tuple[Example, ...]
    scored: tuple[Query, ...]
    timed: tuple[Query, ...]


def draw_questions(scenes: int, rounds: int) -> Questions:
    """Questions on scenes of the test split, and one on each of ``rounds`` other scenes."""
    examples = tuple(draw_examples("test", scenes))
    first = {e.image_id: e for e in reversed(draw_examples("validation", rounds))}
    return Questions(
        examples,
        tuple(build_query(e, _ASKED) for e in examples),
        tuple(build_query(first[number], _TIMED) for number in range(rounds)),
    )


def measure(
    settings: Settings, progress: Progress, interrupt: InterruptHandler
) -> tuple[Results, Questions, Measured]:
    """Measure both servers, one after the other; interrupts end the running one."""
    settings.out.mkdir(parents=True, exist_ok=True)
    tokens, layout = count_visual_tokens(settings.model), read_kv_layout(settings.model)
    with progress.stage("draw scenes"):
        questions = draw_questions(settings.scenes, settings.rounds)
    kept = everything_kept(tokens)
    with interrupt.guard():
        stock = _serve_and_ask(settings, "stock", (), questions, (FULL,), (FULL,), progress)
    with interrupt.guard():
        flags, timed = settings.pruning_flags, (*PRUNED, kept)
        pruned = _serve_and_ask(settings, "pruned", flags, questions, PRUNED, timed, progress)
    measured = Measured(stock.answers | pruned.answers, stock.timings | pruned.timings)
    rows = tuple(
        build_row(c, questions.examples, measured.answers[c], measured.timings[c], layout)
        for c in (FULL, *PRUNED)
    )
    results = Results(
        rows=rows,
        control=build_control(measured.timings[FULL], measured.timings[kept]),
        questions=len(questions.examples),
        scenes=settings.scenes,
        visual_tokens=tokens,
        kv_formula=layout.formula,
        environment=environment(),
    )
    return results, questions, measured


def _serve_and_ask(
    settings: Settings,
    name: str,
    flags: Sequence[str],
    questions: Questions,
    scored: Sequence[Configuration],
    timed: Sequence[Configuration],
    progress: Progress,
) -> Measured:
    log = settings.out / f"{name}.log"
    with contextlib.ExitStack() as stack:
        with progress.stage(f"{name} server: start"):
            try:
                server = stack.enter_context(serve(settings.model, *COMMON_FLAGS, *flags, log=log))
            except ServerDied:
                raise build_start_error(log) from None
        return send_questions(server.url, name, questions, scored, timed, progress)


def send_questions(
    url: str,
    name: str,
    questions: Questions,
    scored: Sequence[Configuration],
    timed: Sequence[Configuration],
    progress: Progress,
) -> Measured:
    """Send all questions, several at a time, which warms up the server; then time others singly."""
    answers: dict[Configuration, list[Answer]] = {}
    timings: dict[Configuration, list[Timing]] = {c: [] for c in timed}
    total = len(scored) * len(questions.scored)
    with progress.stage(f"{name} server: questions", total) as advance:
        for configuration in scored:
            extra = configuration.extra_body
            answers[configuration] = ask_all(url, [(q, extra) for q in questions.scored], advance)
    rounds = len(questions.timed)
    with progress.stage(f"{name} server: times", rounds * len(timed)) as advance:
        for number, configuration in interleaved(timed, rounds):
            timing = ask_timed(url, questions.timed[number], configuration.extra_body)
            timings[configuration].append(timing)
            advance()
    return Measured(answers, timings)
