"""Measurements of the demo: the model is served stock and pruned, both get the same questions."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.report import environment, show_stage
from benchmarks.common.shapes import count_visual_tokens, read_kv_layout
from benchmarks.demo.chat_client import (
    SERVED_NAME,
    Answer,
    Query,
    ask_all,
    build_query,
)
from benchmarks.demo.configurations import (
    FULL,
    PRUNED,
    Configuration,
    everything_kept,
)
from benchmarks.demo.failure import build_start_error
from benchmarks.demo.interrupt import InterruptHandler
from benchmarks.demo.results import Results, build_control, build_row
from benchmarks.demo.speed import measure_speed
from benchmarks.minillava.split import LLAVA, Example, draw_examples
from benchmarks.server import ServerDied, serve
from vllm_autoprune.ops.dtype import Dtype, choose_dtype

COMMON_FLAGS = (
    "--served-model-name", SERVED_NAME, "--max-model-len", "1024",
    "--block-size", "32", "--enforce-eager", "--no-enable-prefix-caching",
)  # fmt: skip
"""Of both servers. Prefix caching is off, because a hit would look like a fast prefill."""

_ASKED = "asked"


@dataclass(frozen=True)
class Settings:
    """What is served, and how many questions are sent."""

    model: Path
    text_tower: Path
    state: str
    scenes: int
    out: Path

    @property
    def dtype(self) -> Dtype:
        """mini-LLaVA's is float32 on every CPU, so that its answers are the same on all."""
        return choose_dtype(exact=self.model == LLAVA)

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
    """Answers by configuration, in the order of the examples."""

    answers: dict[Configuration, list[Answer]]

    def answer(self, configuration: Configuration, number: int) -> str:
        """The text of the answer to one example."""
        return self.answers[configuration][number].text


@dataclass(frozen=True)
class Questions:
    """Questions that are scored, as examples and as queries."""

    examples: tuple[Example, ...]
    queries: tuple[Query, ...]


def draw_questions(scenes: int) -> Questions:
    """Questions on scenes of the test split."""
    examples = tuple(draw_examples("test", scenes))
    return Questions(examples, tuple(build_query(e, _ASKED) for e in examples))


def measure(settings: Settings, interrupt: InterruptHandler) -> tuple[Results, Questions, Measured]:
    """Measure all servers, one after the other; interrupts end the running one."""
    settings.out.mkdir(parents=True, exist_ok=True)
    tokens = count_visual_tokens(settings.model)
    layout = read_kv_layout(settings.model, settings.dtype)
    with show_stage("draw scenes"):
        questions = draw_questions(settings.scenes)
    kept = everything_kept(tokens)
    with interrupt.guard():
        stock = _serve_and_ask(settings, "stock", (), questions, (FULL,))
    with interrupt.guard():
        flags, asked = settings.pruning_flags, (*PRUNED, kept)
        pruned = _serve_and_ask(settings, "pruned", flags, questions, asked)
    measured = Measured(stock.answers | pruned.answers)
    rows = tuple(
        build_row(c, questions.examples, measured.answers[c], layout) for c in (FULL, *PRUNED)
    )
    results = Results(
        rows=rows,
        control=build_control(measured.answers[FULL], measured.answers[kept]),
        questions=len(questions.examples),
        scenes=settings.scenes,
        visual_tokens=tokens,
        kv_formula=layout.formula,
        dtype=settings.dtype,
        environment=environment(),
        speed=measure_speed(settings.out, interrupt),
    )
    return results, questions, measured


def _serve_and_ask(
    settings: Settings,
    name: str,
    flags: Sequence[str],
    questions: Questions,
    asked: Sequence[Configuration],
) -> Measured:
    log = settings.out / f"{name}.log"
    with contextlib.ExitStack() as stack:
        with show_stage(f"mini-LLaVA, {name}: start"):
            try:
                flags = (*COMMON_FLAGS, "--dtype", settings.dtype, *flags)
                server = stack.enter_context(serve(settings.model, *flags, log=log))
            except ServerDied:
                raise build_start_error(log) from None
        return send_questions(server.url, name, questions, asked)


def send_questions(
    url: str,
    name: str,
    questions: Questions,
    asked: Sequence[Configuration],
) -> Measured:
    """Send all questions in every configuration, several at a time."""
    answers: dict[Configuration, list[Answer]] = {}
    total = len(asked) * len(questions.queries)
    with show_stage(f"mini-LLaVA, {name}: questions", total) as advance:
        for configuration in asked:
            extra = configuration.extra_body
            answers[configuration] = ask_all(url, [(q, extra) for q in questions.queries], advance)
    return Measured(answers)
