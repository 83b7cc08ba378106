"""Output of the demo: scores with their uncertainty, the table and its notes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
import timeit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.markdown import Markdown

from benchmarks.common import BenchmarkError
from benchmarks.common.client import Record
from benchmarks.common.report import environment, show_stage
from benchmarks.common.shapes import TOKENS, KvLayout, count_visual_tokens, read_kv_layout
from benchmarks.demo import measure
from benchmarks.demo.picture import NAMES, draw_example
from benchmarks.yardsticks.examples import CLIP, LLAVA, Example, draw_examples, grade_answers
from vllm_autoprune import load_state
from vllm_autoprune.ops.dtype import choose_dtype
from vllm_autoprune.report import Table
from vllm_autoprune.statistics import Spread

INTRODUCTION = """\
This demo serves two models with `vllm serve`, stock and pruned, on this machine, and compares both
with resizing the image to as many tokens:
  mini-LLaVA, trained, tiny:                      how many answers stay right
  LLaVA-1.5's proportions, random weights, large: how much faster and smaller requests become
The large one is served in {dtype}, which this machine multiplies fast, the tiny one in {small}. By
a product timed just now it takes about {minutes} minutes here, longer beside other work, and ends
with one table and a picture."""
_OTHER_SECONDS = 140
"""Starts of four servers and mini-LLaVA's questions, on two idle cores."""
_PRODUCTS = 1100
"""What all requests to the large model take, in products of one image's tokens in its MLP."""
_SHOWN_BUDGET = 16
"""K of mini-LLaVA's 144 tokens in the table, the same ninth as 64 of 576."""
_Z = 1.96


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration. Shares lie between 0 and 1; tokens and bytes are means over questions."""

    configuration: measure.Configuration
    accuracy: float
    half_width: float
    accuracy_plus: float
    by_kind: Mapping[str, float]
    prompt_tokens: float
    kv_bytes: float


@dataclass(frozen=True, slots=True)
class Results:
    """All results of the demo.

    ``control``: answers of the pruned server with all tokens that equal the stock server's, and all
    that were asked.
    """

    rows: tuple[Row, ...]
    control: Mapping[str, int]
    questions: int
    scenes: int
    visual_tokens: int
    kv_formula: str
    dtype: str
    environment: Mapping[str, str]
    speed: measure.Speed
    seconds: float = 0.0

    def row(self, keep: measure.Keep, budget: int | None = None) -> Row:
        """The row of one configuration."""
        wanted = measure.Configuration(keep, budget)
        return next(row for row in self.rows if row.configuration == wanted)

    def verdict(self, budget: int = 8) -> str:
        """The result at one budget, in a sentence."""
        keeps: tuple[measure.Keep, ...] = ("reference", "state", "resized", "random")
        shares = [f"{NAMES[k]} {100 * self.row(k, budget).accuracy:.1f} %" for k in keeps]
        full = self.row("full")
        fewer = full.prompt_tokens / self.row("state", budget).prompt_tokens
        return (
            f"At K = {budget} of {self.visual_tokens} visual tokens: {', '.join(shares)} "
            f"(full: {100 * full.accuracy:.1f} %), with {fewer:.1f} times fewer prompt tokens "
            "and KV bytes."
        )


def half_width(examples: Sequence[Example], answers: Sequence[str]) -> float:
    """Half of the 95 % interval of accuracy: the wider of two intervals.

    Wilson's takes questions as independent, and is correct near 0 and 1. The other one takes scenes
    as independent, because questions on one image are correlated.
    """
    p, n = grade_answers(examples, answers).accuracy, len(examples)
    wilson = _Z * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2)) / (1 + _Z**2 / n)
    scenes: dict[int, list[int]] = {}
    for place, example in enumerate(examples):
        scenes.setdefault(example.image_id, []).append(place)
    if len(scenes) < 2:
        return wilson
    by_scene = [
        grade_answers([examples[i] for i in places], [answers[i] for i in places]).accuracy
        for places in scenes.values()
    ]
    return max(wilson, _Z * statistics.stdev(by_scene) / math.sqrt(len(by_scene)))


def _build_row(
    configuration: measure.Configuration,
    examples: Sequence[Example],
    answers: Sequence[Record],
    layout: KvLayout,
) -> Row:
    """Scores and cost of one configuration."""
    texts = [answer.text for answer in answers]
    scores = grade_answers(examples, texts)
    tokens = statistics.fmean(answer.prompt_tokens or 0 for answer in answers)
    return Row(
        configuration=configuration,
        accuracy=scores.accuracy,
        half_width=half_width(examples, texts),
        accuracy_plus=scores.accuracy_plus,
        by_kind=scores.by_kind,
        prompt_tokens=tokens,
        kv_bytes=tokens * layout.bytes_per_token,
    )


def _format_summary(results: Results) -> str:
    """The table and its notes as Markdown."""
    speed, machine, k = results.speed, results.environment, _SHOWN_BUDGET
    users = f"{measure.USERS} at once"
    three = (speed.stock, speed.resized, speed.pruned)
    small = (results.row("full"), results.row("resized", k), results.row("state", k))
    questions = ("/".join(f"{spread.median:,.0f}" for spread in row.questions) for row in three)

    def heading(model: str, tokens: int, budget: int) -> tuple[str, ...]:
        cells = (model, f"N = {tokens}", f"K = {budget}", f"K = {budget}")
        return tuple(f"**{cell}**" for cell in cells)

    rows = [
        heading("large, random weights", speed.tokens, speed.budget),
        ("prompt tokens of a request", *(f"{row.prompt_tokens}" for row in three)),
        ("KV cache of a request, MB", *(f"{row.kv_bytes / 1e6:.1f}" for row in three)),
        ("first token, alone, ms", *(f"{row.alone.median:,.0f}" for row in three)),
        (f"first token, {users}, ms", *(f"{row.together.median:,.0f}" for row in three)),
        (f"requests/s, {users}", *(f"{row.requests_per_second:.2f}" for row in three)),
        ("first token, question 1/2/3, ms", *questions),
        heading("mini-LLaVA, trained", results.visual_tokens, k),
        ("prompt tokens of a request", *(f"{row.prompt_tokens:.1f}" for row in small)),
        ("KV cache of a request, MB", *(f"{row.kv_bytes / 1e6:.2f}" for row in small)),
        (
            "right answers, %",
            *(f"{100 * row.accuracy:.1f} ± {100 * row.half_width:.1f}" for row in small),
        ),
    ]

    def quartiles(spread: Spread) -> str:
        return f"{spread.low:,.0f} to {spread.high:,.0f}"

    alone, base = speed.stock.alone, results.row("reference", k)
    notes = (
        "Large: LLaVA-1.5's shape at half its width, 4 language layers and 2 of the tower, in "
        f"{machine['dtype of local servers']}. Medians of {alone.count} requests alone "
        f"and {speed.stock.together.count} at once, each of {measure.ANSWER_TOKENS} tokens and on "
        f"a new image; quartiles alone: {quartiles(alone)} stock, "
        f"{quartiles(speed.pruned.alone)} pruned. {machine['cores']} cores at a load average of "
        f"{machine['load average']}: other work changes such times. Resized and pruned have the "
        "same number of tokens; their times differ by more than the selection takes.",
        "Question 1/2/3: one image asked about three times, prefix caching on. Stock finds "
        "the image in its cache; a state that reads the question prefills K tokens again.",
        f"mini-LLaVA, in {results.dtype}: {results.questions} held-out questions, ± half of the "
        "95 % interval. Pruned is the state that a search found for it; its base policy alone: "
        f"{100 * base.accuracy:.1f} %. Resized: its tokens pooled to K cells, which it was not "
        "trained on, so it is a weak rival here.",
    )
    table = Table("", ("", "stock", "resized", "pruned"), rows, "lrrr").markdown()
    return "\n".join([table, "", *(f"- {note}" for note in notes)]) + "\n"


def _measure(
    settings: measure.Settings, guard: measure.Guard
) -> tuple[Results, Sequence[Example], measure.Answers]:
    """Measure all servers, one after the other; ``guard`` ends the running one."""
    settings.out.mkdir(parents=True, exist_ok=True)
    layout = read_kv_layout(settings.model, settings.dtype)
    with show_stage("draw scenes"):
        examples = draw_examples("test", settings.scenes)
    answers = measure.measure_answers(settings, examples, guard)
    *_, everything = answers
    pairs = list(zip(answers[measure.FULL], answers[everything], strict=True))
    same = sum((a.text, a.prompt_tokens) == (b.text, b.prompt_tokens) for a, b in pairs)
    results = Results(
        rows=tuple(
            _build_row(c, examples, answers[c], layout) for c in (measure.FULL, *measure.PRUNED)
        ),
        control={"same_answers": same, "asked": len(pairs)},
        questions=len(examples),
        scenes=settings.scenes,
        visual_tokens=count_visual_tokens(settings.model),
        kv_formula=layout.formula,
        dtype=settings.dtype,
        environment=environment(),
        speed=measure.measure_speed(settings.out, guard),
    )
    return results, examples, answers


def run_demo(options: argparse.Namespace, guard: measure.Guard) -> None:
    """The whole demo."""
    start = time.monotonic()
    settings = measure.Settings(
        model=options.model or LLAVA,
        text_tower=options.text_tower or CLIP,
        state=options.state,
        scenes=options.scenes,
        out=options.out.resolve(),
    )
    for checkpoint in (settings.model, settings.text_tower):
        if not (checkpoint / "model.safetensors").is_file():
            raise BenchmarkError(f"{checkpoint} contains no checkpoint (model.safetensors)")
    load_state(settings.state)  # fails here rather than after a minute
    dtype = choose_dtype()
    # By the time that a product of the large model takes now.
    rows, weight = (
        torch.randn(TOKENS, measure.WIDTH),
        torch.randn(11008 * measure.WIDTH // 4096, measure.WIDTH),
    )
    if dtype == "bfloat16":
        rows, weight = rows.bfloat16(), weight.bfloat16()
    seconds = timeit.repeat(lambda: torch.nn.functional.linear(rows, weight), number=1, repeat=5)
    minutes = math.ceil((_OTHER_SECONDS + _PRODUCTS * statistics.median(seconds)) / 60)
    introduction = INTRODUCTION.format(dtype=dtype, small=settings.dtype, minutes=minutes)
    print(introduction, file=sys.stderr, flush=True)
    # Busy-waiting threads of torch in the client would slow the server that is measured.
    torch.set_num_threads(1)
    results, examples, answers = _measure(settings, guard)
    with show_stage("picture"):
        picture = draw_example(settings, examples, answers)
    results = dataclasses.replace(results, seconds=time.monotonic() - start)
    content = {**dataclasses.asdict(results), "verdict": results.verdict(), "picture": picture}
    text, summary = json.dumps(content, indent=2), _format_summary(results)
    (settings.out / "results.json").write_text(text + "\n")
    (settings.out / "table.md").write_text(summary)
    if options.json:
        print(text)
        return
    console = Console()
    if console.is_terminal:
        console.print(Markdown(summary))
    else:
        print(summary, end="")
    console.print(
        f"\npicture: {picture['path']} (patches recomputed with transformers, whose rounding may "
        f"keep a few\nothers); every configuration: {settings.out / 'results.json'}; "
        f"{results.seconds:.0f} s in all",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
