"""`python -m benchmarks.demo`: what README shows, on this machine.

Two models are each served stock and pruned, and sent the same requests.

mini-LLaVA is trained, so its answers are compared. The other one is LLaVA-1.5 at half the width,
with four language layers and two of the vision tower, so that prefill takes about the share of a
request that it takes at full size. Its weights are random: answers mean nothing, and costs are
those of any weights.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import timeit
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import BenchmarkError
from benchmarks.common.client import Client, Record
from benchmarks.common.report import environment, log_progress
from benchmarks.common.requests import build_body, build_content, draw_picture, encode_picture
from benchmarks.common.shapes import (
    TOKENS,
    count_kv_bytes,
    count_visual_tokens,
    draw_words,
    write_shape,
)
from benchmarks.server import end_servers_on_sigterm, serve
from benchmarks.yardsticks.examples import (
    CLIP,
    LLAVA,
    MAX_ANSWER_TOKENS,
    Example,
    draw_examples,
)
from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.ops.dtype import choose_dtype
from vllm_autoprune.report import Table
from vllm_autoprune.statistics import Spread
from vllm_autoprune.stream import EMPTY

_INTRODUCTION = """\
This demo serves two models with `vllm serve`, stock and pruned, on this machine, and compares both
with resizing the image to as many tokens:
  mini-LLaVA, trained, tiny:                      how many answers stay right
  LLaVA-1.5's proportions, random weights, large: how much faster and smaller requests become
The large one is served in {dtype}, which this machine multiplies fast, the tiny one in {small}. By
a product timed just now it takes about {minutes} minutes here, longer beside other work, and ends
with one table."""
_OTHER_SECONDS = 100
"""Starts of four servers and mini-LLaVA's questions, on two idle cores."""
_PRODUCTS = 1100
"""What all requests to the large model take, in products of one image's tokens in its MLP."""

_SERVED, _USERS, _SCENES = "llava", 8, 20
"""Name of the served model, requests at once, scenes that mini-LLaVA is asked about."""
_FLAGS = ("--served-model-name", _SERVED, "--max-model-len", "1024", "--block-size", "32",
          "--enforce-eager")  # fmt: skip
_WIDTH, _LAYERS, _TOWER_LAYERS, _STATE, _BUDGET = 2048, 4, 2, "cdpruner", 64
"""Of the large model."""
_ANSWER_TOKENS, _QUESTION_WORDS = 4, 16
"""Of its requests."""
_ALONE, _TOGETHER, _IMAGES, _QUESTIONS = 6, 24, 4, 3
"""Requests of one arm to it, images that are asked about several times, and how often each is."""
_SMALL_BUDGET = 16
"""K of mini-LLaVA's 144 tokens, the same ninth as 64 of 576."""
_Z = 1.96


def _ask(
    url: str, bodies: Sequence[bytes], at_once: int = _USERS, *, empty: bool = False
) -> list[Record]:
    """Send all requests, so many at a time; their answers in the same order.

    Raises :class:`BenchmarkError` where one is not answered; ``empty``: no text is an answer too.
    """
    client, pool, records = Client(url), ThreadPoolExecutor(at_once), list[Record]()
    try:
        for future in [pool.submit(client.send, body) for body in bodies]:
            record = future.result()
            if record.error not in (None, EMPTY if empty else None):
                raise BenchmarkError(f"a question was not answered: {record.error}")
            records.append(record)
    finally:
        # Requests that are still running fail when the server ends, which must not wait for them.
        pool.shutdown(wait=False, cancel_futures=True)
    return records


@dataclass(frozen=True)
class _Score:
    """Answers of mini-LLaVA: mean prompt tokens, share that is right, half of its interval."""

    prompt_tokens: float
    accuracy: float
    half_width: float


def _measure_answers(examples: Sequence[Example], out: Path) -> dict[str, _Score]:
    """Answers of stock vLLM, with resized images, pruned, and with the base policy alone."""
    contents = []
    for example in examples:  # encoded once
        image, question = build_content(example.question, [example.png_url])
        contents.append([{**image, "uuid": f"asked-{example.image_id}"}, question])
    # Float32 on every CPU, so that its answers are the same on all. An arm would profit from the
    # one before it by hits in caches.
    common = (*_FLAGS, "--no-enable-prefix-caching", "--dtype", choose_dtype(exact=True))
    pruning = (
        "--autoprune-state", "minillava", "--autoprune-text-tower", str(CLIP),
        "--autoprune-feature-cache-gb", "0", "--trust-request-mm-kwargs",
    )  # fmt: skip
    keeps = {"resized": "resized", "pruned": "state", "base policy": "reference"}
    scores = {}
    for server, flags, arms in (
        ("stock", common, {"stock": ""}), ("pruned", (*common, *pruning), keeps),
    ):  # fmt: skip
        log_progress(f"start mini-LLaVA, {server}")
        with serve(LLAVA, *flags, log=out / f"{server}.log") as serving:
            for arm, keep in arms.items():
                log_progress(f"ask mini-LLaVA, {arm}")
                pruned = {"autoprune": {"budget": _SMALL_BUDGET, "keep": keep}}
                fields = {"mm_processor_kwargs": pruned} if keep else {}
                bodies = [
                    build_body(_SERVED, content, tokens=MAX_ANSWER_TOKENS, fields=fields)
                    for content in contents
                ]
                answers = _ask(serving.url, bodies, empty=True)
                rights = [
                    (example.image_id, example.is_right(answer.text))
                    for example, answer in zip(examples, answers, strict=True)
                ]
                scores[arm] = _Score(
                    statistics.fmean(answer.prompt_tokens or 0 for answer in answers),
                    statistics.fmean(right for _, right in rights),
                    _half_width(rights),
                )
    return scores


def _half_width(rights: Sequence[tuple[int, bool]]) -> float:
    """Half of the 95 % interval of accuracy, of scenes and whether each answer is right.

    The wider of two: Wilson's takes questions as independent, and is correct near 0 and 1. The
    other one takes scenes as independent, because questions on one image are correlated.
    """
    p, n = statistics.fmean(right for _, right in rights), len(rights)
    wilson = _Z * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2)) / (1 + _Z**2 / n)
    scenes: dict[int, list[bool]] = {}
    for scene, right in rights:
        scenes.setdefault(scene, []).append(right)
    by_scene = [statistics.fmean(answers) for answers in scenes.values()]
    return max(wilson, _Z * statistics.stdev(by_scene) / math.sqrt(len(by_scene)))


@dataclass(frozen=True)
class _Timing:
    """What a request to the large model costs; milliseconds to the first token.

    ``questions`` are medians of the first, second and third question about one image.
    """

    prompt_tokens: int
    alone: Spread
    together: Spread
    requests_per_second: float
    questions: Sequence[float]

    @classmethod
    def measure(cls, url: str, arm: str, start: int) -> _Timing:
        """Time the requests of an arm; ``start`` is the number of its first image and text."""
        # A special first token would have no text to be timed.
        fields: dict[str, object] = {"ignore_eos": True, "skip_special_tokens": False}
        if arm == "resized":
            fields["mm_processor_kwargs"] = {"autoprune": {"keep": "resized"}}

        def build(question: int, image: int) -> bytes:
            url = encode_picture(draw_picture(start + image, 640, 480))
            content = build_content(draw_words(_QUESTION_WORDS, start + question), [url])
            return build_body(_SERVED, content, tokens=_ANSWER_TOKENS, fields=fields)

        def milliseconds(records: Sequence[Record]) -> Spread:
            return Spread.of([1000 * record.ttft for record in records])

        _ask(url, [build(number, number) for number in range(2)], 1)
        alone = _ask(url, [build(number, number) for number in range(10, 10 + _ALONE)], 1)
        bodies = [build(number, number) for number in range(100, 100 + _TOGETHER)]
        begin = time.perf_counter()
        together = _ask(url, bodies)
        seconds = time.perf_counter() - begin
        # Image by image, so that the second question finds what the first one left.
        questions = [
            _ask(url, [build(image + 100 * question, image) for question in range(_QUESTIONS)], 1)
            for image in range(300, 300 + _IMAGES)
        ]
        return cls(
            prompt_tokens=alone[0].prompt_tokens or 0,
            alone=milliseconds(alone),
            together=milliseconds(together),
            requests_per_second=_TOGETHER / seconds,
            questions=[milliseconds(records).median for records in zip(*questions, strict=True)],
        )

    @classmethod
    def measure_arms(cls, folder: Path, out: Path) -> dict[str, _Timing]:
        """Times of the large model, served stock, then pruned, also for resized images."""
        flags = (*_FLAGS, "--load-format", "dummy", "--max-num-seqs", "16")
        pruning = ("--autoprune-state", _STATE, "--autoprune-budget", str(_BUDGET),
                   "--autoprune-requests", "budget")  # fmt: skip
        times = {}
        for server, arguments, arms in (
            ("stock", flags, ("stock",)), ("pruned", (*flags, *pruning), ("pruned", "resized")),
        ):  # fmt: skip
            log_progress(f"start the large model, {server}")
            with serve(folder, *arguments, log=out / f"speed-{server}.log") as serving:
                for number, arm in enumerate(arms, 1):
                    log_progress(f"time the large model, {arm}")
                    # Arms of one server share no image and no text.
                    times[arm] = cls.measure(serving.url, arm, 1000 * number)
        return times


def _format_table(
    times: Mapping[str, _Timing], scores: Mapping[str, _Score], large: Path, questions: int
) -> str:
    """The table and its notes as Markdown; ``large``: folder of the large model."""
    arms, users, machine = ("stock", "resized", "pruned"), f"{_USERS} at once", environment()
    three, small = [times[arm] for arm in arms], [scores[arm] for arm in arms]
    dtype = choose_dtype(exact=True)
    large_bytes = count_kv_bytes(large)
    small_bytes = count_kv_bytes(LLAVA, dtype)

    def heading(model: str, tokens: int, budget: int) -> tuple[str, ...]:
        cells = (model, f"N = {tokens}", f"K = {budget}", f"K = {budget}")
        return tuple(f"**{cell}**" for cell in cells)

    rows = [
        heading("large, random weights", TOKENS, _BUDGET),
        ("prompt tokens of a request", *(f"{t.prompt_tokens}" for t in three)),
        ("KV cache of a request, MB",
         *(f"{t.prompt_tokens * large_bytes / 1e6:.1f}" for t in three)),
        ("first token, alone, ms", *(f"{t.alone.median:,.0f}" for t in three)),
        (f"first token, {users}, ms", *(f"{t.together.median:,.0f}" for t in three)),
        (f"requests/s, {users}", *(f"{t.requests_per_second:.2f}" for t in three)),
        ("first token, question 1/2/3, ms",
         *("/".join(f"{median:,.0f}" for median in t.questions) for t in three)),
        heading("mini-LLaVA, trained", count_visual_tokens(LLAVA), _SMALL_BUDGET),
        ("prompt tokens of a request", *(f"{s.prompt_tokens:.1f}" for s in small)),
        ("KV cache of a request, MB",
         *(f"{s.prompt_tokens * small_bytes / 1e6:.2f}" for s in small)),
        ("right answers, %",
         *(f"{100 * s.accuracy:.1f} ± {100 * s.half_width:.1f}" for s in small)),
    ]  # fmt: skip
    stock, pruned = (times[arm].alone for arm in ("stock", "pruned"))
    notes = (
        "Large: LLaVA-1.5's shape at half its width, 4 language layers and 2 of the tower, in "
        f"{machine['dtype of local servers']}. Medians of {stock.count} requests alone "
        f"and {times['stock'].together.count} at once, each of {_ANSWER_TOKENS} tokens and on "
        f"a new image; quartiles alone: {stock.low:,.0f} to {stock.high:,.0f} stock, "
        f"{pruned.low:,.0f} to {pruned.high:,.0f} pruned. {machine['cores']} cores at a load "
        f"average of {machine['load average']}: other work changes such times. Resized and pruned "
        "have the same number of tokens; their times differ by more than the selection takes.",
        "Question 1/2/3: one image asked about three times, prefix caching on. Stock finds "
        "the image in its cache; a state that reads the question prefills K tokens again.",
        f"mini-LLaVA, in {dtype}: {questions} held-out questions, ± half of the "
        "95 % interval. Pruned is the state that a search found for it; its base policy alone: "
        f"{100 * scores['base policy'].accuracy:.1f} %. Resized: its tokens pooled to K cells, "
        "which it was not trained on, so it is a weak rival here.",
    )
    table = Table("", ("", *arms), rows, "lrrr").markdown()
    return "\n".join([table, "", *(f"- {note}" for note in notes)]) + "\n"


def _run_demo(out: Path) -> None:
    """Say how long it takes, measure, and print the table, which is also written to ``out``."""
    # By the time that a product of the large model takes now.
    dtype = choose_dtype()
    rows, weight = torch.randn(TOKENS, _WIDTH), torch.randn(11008 * _WIDTH // 4096, _WIDTH)
    if dtype == "bfloat16":
        rows, weight = rows.bfloat16(), weight.bfloat16()
    seconds = timeit.repeat(lambda: torch.nn.functional.linear(rows, weight), number=1, repeat=5)
    minutes = math.ceil((_OTHER_SECONDS + _PRODUCTS * statistics.median(seconds)) / 60)
    introduction = _INTRODUCTION.format(
        dtype=dtype, small=choose_dtype(exact=True), minutes=minutes
    )
    print(introduction, file=sys.stderr, flush=True)
    # Busy-waiting threads of torch in the client would slow the server that is measured.
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    examples = draw_examples("test", _SCENES)
    scores = _measure_answers(examples, out)
    sizes = {"tower_layers": _TOWER_LAYERS, "width": _WIDTH}
    large = write_shape("llava-1.5-7b", out / "shape", _LAYERS, **sizes)
    table = _format_table(_Timing.measure_arms(large, out), scores, large, len(examples))
    (out / "table.md").write_text(table)
    print(table, end="")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 with a complete table, 130 after Ctrl-C, 1 where something failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo",
        description="Serve two models stock and pruned: the trained mini-LLaVA, to compare "
        "answers, and one of LLaVA-1.5's proportions with random weights, to compare times.",
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder of table, logs")
    options = parser.parse_args(arguments)
    end_servers_on_sigterm()
    try:
        _run_demo(options.out)
    except KeyboardInterrupt:
        print("demo: stopped, no server is left running", file=sys.stderr)
        return 130
    except AutopruneError as error:
        print(f"demo: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
