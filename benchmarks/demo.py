"""`python -m benchmarks.demo`: the measurements that README shows, on this machine.

Two models are each served stock and pruned, and sent the same requests. Figures are written as rows
of ``demo.csv``, and the page's tables are made of those rows alone.

mini-LLaVA is trained, so its answers are compared. The large model is LLaVA-1.5 at half its width,
with four language layers and two of the vision tower, so that prefill takes about the share of a
request that it takes at full size. Its weights are random, so its answers mean nothing; its costs
do not depend on the weights.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
import time
import timeit
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.common.client import Client, Record
from benchmarks.common.command import run_command
from benchmarks.common.report import environment, log_progress
from benchmarks.common.requests import (
    build_body,
    build_content,
    draw_picture,
    encode_picture,
)
from benchmarks.common.shapes import (
    TOKENS,
    count_kv_bytes,
    count_visual_tokens,
    draw_words,
    write_shape,
)
from benchmarks.server import serve
from benchmarks.yardsticks.examples import (
    CLIP,
    LLAVA,
    MAX_ANSWER_TOKENS,
    Example,
    draw_examples,
)
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.ops.dtype import choose_dtype
from vllm_autoprune.report import Table
from vllm_autoprune.statistics import Spread
from vllm_autoprune.stream import EMPTY
from vllm_autoprune.tpdsl.loading import DEFAULT_STATE

_INTRODUCTION = """\
This demo serves two models with `vllm serve`, stock and pruned, on this machine, and compares both
with resizing the image to as many tokens:
  mini-LLaVA, trained, tiny:                      how many answers stay right
  LLaVA-1.5's proportions, random weights, large: how much faster and smaller requests become
The large one is served in {dtype}, which this machine multiplies fast, the tiny one in {small}.
The load average is {load} on {cores} cores. At that load, and by a product timed just now, it takes
about {minutes} minutes, and ends with two tables."""
_OTHER_SECONDS = 130
"""Seconds for the starts of four servers and mini-LLaVA's questions, on two idle cores."""
_PRODUCTS = 1070
"""Duration of all requests to the large model, in products of one image's tokens in its MLP."""

_SERVED = "llava"
_USERS = 8
_SCENES = 20
"""Name of the served model, requests at once, scenes that mini-LLaVA is asked about."""
_FLAGS = f"--served-model-name {_SERVED} --max-model-len 1024 --block-size 32 --enforce-eager"
_WIDTH = 2048
_LAYERS = 4
_TOWER_LAYERS = 2
_STATE = "cdpruner"
_BUDGET = 64
"""K of the large model."""
_ANSWER_TOKENS = 4
_QUESTION_WORDS = 16
"""Words in a question to the large model."""
_ALONE = 6
_TOGETHER = 24
_IMAGES = 4
"""Requests that an arm of the large model gets one at a time and all together, and the number of
images that are asked about twice."""
_SMALL_BUDGET = 16
"""K of mini-LLaVA's 144 tokens, the same ninth as 64 of 576."""
_CHOICES: Mapping[str, Mapping[str, str]] = {
    "image resized": {"keep": "resized"},
    "random tokens": {"keep": "random"},
    "`norm`, tokens of largest norm": {"state": "norm"},
    "`cen_divprune`, published": {"state": "cen_divprune"},
    f"`{DEFAULT_STATE}`, the default": {"state": DEFAULT_STATE},
    "`minillava`, found on this model": {"state": "minillava"},
}
"""How mini-LLaVA's K tokens are chosen, and the field of a request that asks for it."""
_DECIMALS = {"MB": 1, "requests/s": 2}
"""Decimals of figures in the tables, by unit."""
_Z = 1.96


class _Figure(NamedTuple):
    """A row of ``demo.csv``: a figure with its 95 % interval or, for times, its quartiles."""

    what: str
    model: str
    arm: str
    value: float
    low: float | None = None
    high: float | None = None
    unit: str = ""

    def __str__(self) -> str:
        if self.unit == "%":
            half = max(
                abs(x - self.value) for x in (self.low, self.high) if x is not None
            )
            return f"{self.value:.1f} ± {half:.1f}"
        return f"{self.value:,.{_DECIMALS.get(self.unit, 0)}f}"


def _measure_answers(examples: Sequence[Example], out: Path) -> list[_Figure]:
    """Share of mini-LLaVA's answers that are right, by how the tokens are chosen."""
    contents = []
    for example in examples:  # images are encoded once for all arms
        image, question = build_content(example.question, [example.png_url])
        contents.append([{**image, "uuid": f"asked-{example.image_id}"}, question])
    # Float32 gives the same answers on every CPU. Caches are off, because an arm would profit from
    # hits that the arm before it left.
    dtype = choose_dtype(exact=True)
    common = f"{_FLAGS} --no-enable-prefix-caching --dtype {dtype}".split()
    pruning = (
        f"--autoprune-state {_STATE} --autoprune-requests shipped-states "
        "--autoprune-feature-cache-gb 0"
    ).split()
    pruning += ["--autoprune-text-tower", str(CLIP)]
    model = f"mini-LLaVA, {dtype}, {len(examples)} held-out questions"
    figures = []
    for server, flags, arms in (
        ("stock", common, {"all tokens": {}}),
        ("pruned", (*common, *pruning), _CHOICES),
    ):
        log_progress(f"start mini-LLaVA, {server}")
        with serve(LLAVA, *flags, log=out / f"{server}.log") as serving:
            for arm, choice in arms.items():
                log_progress(f"ask mini-LLaVA, {arm}")
                pruned = {"autoprune": {"budget": _SMALL_BUDGET, **choice}}
                fields = {"mm_processor_kwargs": pruned} if choice else {}
                bodies = [
                    build_body(
                        _SERVED, content, tokens=MAX_ANSWER_TOKENS, fields=fields
                    )
                    for content in contents
                ]
                # An answer without text is counted as wrong, not as a failure.
                answers = Client(serving.url).send_all(bodies, _USERS, accepted=EMPTY)
                scored = [
                    (example.image_id, example.is_right(answer.text))
                    for example, answer in zip(examples, answers, strict=True)
                ]
                accuracy = statistics.fmean(correct for _, correct in scored)
                half = _half_width(scored)
                ends = (accuracy, max(0, accuracy - half), min(1, accuracy + half))
                value, low, high = (round(100 * x, 3) for x in ends)
                figures.append(
                    _Figure("right answers", model, arm, value, low, high, "%")
                )
    return figures


def _half_width(scored: Sequence[tuple[int, bool]]) -> float:
    """Half of the 95 % interval of accuracy, from the scene of each answer and whether it is right.

    The wider of two intervals: Wilson's treats questions as independent, and is correct near 0 and
    1. The other treats scenes as independent, because answers about one image are correlated.
    """
    p = statistics.fmean(correct for _, correct in scored)
    n = len(scored)
    wilson = _Z * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2)) / (1 + _Z**2 / n)
    scenes: dict[int, list[bool]] = {}
    for scene, correct in scored:
        scenes.setdefault(scene, []).append(correct)
    by_scene = [statistics.fmean(answers) for answers in scenes.values()]
    return max(wilson, _Z * statistics.stdev(by_scene) / math.sqrt(len(by_scene)))


def _time_requests(url: str, arm: str, start: int, kv_bytes: int) -> Iterator[_Figure]:
    """Costs of an arm of the large model; ``start`` is the first number of its images and texts."""
    # A special first token would have no text, so its time could not be measured.
    fields: dict[str, object] = {"ignore_eos": True, "skip_special_tokens": False}
    if arm == "resized":
        fields["mm_processor_kwargs"] = {"autoprune": {"keep": "resized"}}
    model = (
        f"LLaVA-1.5's shape at half its width, {_LAYERS} language layers and {_TOWER_LAYERS} of "
        f"the tower, {choose_dtype()}"
    )

    def build(question: int, image: int) -> bytes:
        url = encode_picture(draw_picture(start + image, 640, 480))
        content = build_content(draw_words(_QUESTION_WORDS, start + question), [url])
        return build_body(_SERVED, content, tokens=_ANSWER_TOKENS, fields=fields)

    def summarize(what: str, records: Sequence[Record]) -> _Figure:
        ttft = Spread.of([1000 * record.ttft for record in records])
        median, low, high = (round(x, 2) for x in (ttft.median, ttft.low, ttft.high))
        return _Figure(f"first token, {what}", model, arm, median, low, high, "ms")

    client = Client(url)
    client.send_all([build(number, number) for number in range(2)])
    alone = client.send_all(
        [build(number, number) for number in range(10, 10 + _ALONE)]
    )
    bodies = [build(number, number) for number in range(100, 100 + _TOGETHER)]
    begin = time.perf_counter()
    together = client.send_all(bodies, _USERS)
    seconds = time.perf_counter() - begin
    # Image by image, so that the second question finds the caches that the first one filled.
    second = [
        client.send_all([build(image, image), build(image + 100, image)])[1]
        for image in range(300, 300 + _IMAGES)
    ]
    tokens = alone[0].prompt_tokens or 0
    yield _Figure("prompt of a request", model, arm, tokens, unit="tokens")
    yield _Figure(
        "KV cache of a request",
        model,
        arm,
        round(tokens * kv_bytes / 1e6, 3),
        unit="MB",
    )
    yield summarize("alone", alone)
    yield summarize(f"{_USERS} at once", together)
    yield summarize("second question", second)
    rate = round(_TOGETHER / seconds, 3)
    yield _Figure(f"answered, {_USERS} at once", model, arm, rate, unit="requests/s")


def _measure_times(folder: Path, out: Path) -> list[_Figure]:
    """Costs of the large model served stock, then pruned; the latter also for resized images."""
    flags = f"{_FLAGS} --load-format dummy --max-num-seqs 16".split()
    pruning = (
        f"--autoprune-state {_STATE} --autoprune-budget {_BUDGET} "
        "--autoprune-requests budget"
    ).split()
    figures = list[_Figure]()
    kv_bytes = count_kv_bytes(folder)
    for server, arguments, arms in (
        ("stock", flags, ("stock",)),
        ("pruned", (*flags, *pruning), ("pruned", "resized")),
    ):
        log_progress(f"start the large model, {server}")
        with serve(folder, *arguments, log=out / f"speed-{server}.log") as serving:
            for number, arm in enumerate(arms, 1):
                log_progress(f"time the large model, {arm}")
                # Different arms of one server share no image and no text.
                figures += _time_requests(serving.url, arm, 1000 * number, kv_bytes)
    machine = environment()
    load = float(machine["load average"])
    return [*figures, _Figure("load average", f"{machine['cores']} cores", "", load)]


def _format_tables(figures: Sequence[_Figure]) -> str:
    """Both tables and their notes as Markdown, from the rows of ``demo.csv``."""
    arms = ("stock", "resized", "pruned")
    cells = {(f.what, f.arm): f for f in figures}
    budget = f"K = {_BUDGET}"
    rows: list[tuple[str, ...]] = [
        ("tokens of an image", f"N = {TOKENS}", budget, budget)
    ]
    rows += [
        (f"{what}, {figure.unit}", *(str(cells[what, arm]) for arm in arms))
        for (what, arm), figure in cells.items()
        if arm == "stock"
    ]
    large = Table("", ("large, random weights", *arms), rows, "lrrr")
    answers = [figure for figure in figures if figure.what == "right answers"]
    tokens = f"K = {_SMALL_BUDGET} of {count_visual_tokens(LLAVA)}"
    head = (f"mini-LLaVA, trained, {tokens}", "right answers, %")
    small = Table("", head, [(figure.arm, str(figure)) for figure in answers], "lr")
    stock, pruned = (cells["first token, alone", arm] for arm in ("stock", "pruned"))
    load = cells["load average", ""]
    notes = (
        f"Large: {stock.model}, pruned by `{_STATE}`. Medians of {_ALONE} requests alone and "
        f"{_TOGETHER} at once, each of {_ANSWER_TOKENS} tokens and on a new image; quartiles "
        f"alone: {stock.low:,.0f} to {stock.high:,.0f} stock, {pruned.low:,.0f} to "
        f"{pruned.high:,.0f} pruned. {load.model} at a load average of {load.value:.2f}: other "
        "work changes such times. Resized and pruned prompts have equally many tokens, so the "
        "selection explains only a part of the difference between their times.",
        "Second question: about an image that is in the prefix cache, where a state that reads "
        "the question, as `cdpruner` does and the default does not, prefills K tokens again.",
        f"{answers[0].model}, ± half of the 95 % interval. Resized: its tokens pooled to K cells, "
        "which it was not trained on, so it is a weak rival here.",
    )
    lists = "\n".join(f"- {note}" for note in notes)
    return f"{large.markdown()}\n\n{small.markdown()}\n\n{lists}\n"


def _run_demo(out: Path) -> int:
    """Print how long it will take, measure, and print the tables; ``out`` gets tables and rows."""
    # The estimate comes from the time that a product of the large model takes now.
    dtype = choose_dtype()
    rows = torch.randn(TOKENS, _WIDTH)
    weight = torch.randn(11008 * _WIDTH // 4096, _WIDTH)
    if dtype == "bfloat16":
        rows = rows.bfloat16()
        weight = weight.bfloat16()
    seconds = timeit.repeat(
        lambda: torch.nn.functional.linear(rows, weight), number=1, repeat=5
    )
    machine = environment()
    load = float(machine["load average"])
    cores = int(machine["cores"])
    fixed_seconds = _OTHER_SECONDS * (1 + load / cores)
    minutes = math.ceil((fixed_seconds + _PRODUCTS * statistics.median(seconds)) / 60)
    introduction = _INTRODUCTION.format(
        dtype=dtype,
        small=choose_dtype(exact=True),
        load=load,
        cores=cores,
        minutes=minutes,
    )
    print(introduction, file=sys.stderr, flush=True)
    # Torch threads of the client wait busily, which would slow the server under test.
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    examples = draw_examples("test", _SCENES)
    figures = _measure_answers(examples, out)
    sizes = {"tower_layers": _TOWER_LAYERS, "width": _WIDTH}
    large = write_shape("llava-1.5-7b", out / "shape", _LAYERS, **sizes)
    figures += _measure_times(large, out)
    with (out / "demo.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([_Figure._fields, *figures])
    tables = _format_tables(figures)
    (out / "tables.md").write_text(tables)
    print(tables, end="")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 if the tables are complete, 130 after Ctrl-C, 1 after a failure."""
    parser = CommandParser(
        prog="python -m benchmarks.demo",
        description="Serve two models stock and pruned: the trained mini-LLaVA, to compare "
        "answers, and one of LLaVA-1.5's proportions with random weights, to compare times.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo"), help="folder of tables, logs"
    )
    return run_command("demo", lambda: _run_demo(parser.parse_args(arguments).out))


if __name__ == "__main__":
    sys.exit(main())
