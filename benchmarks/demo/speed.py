"""Times of the demo: a model whose prefill is what costs, served stock and pruned.

The shape is LLaVA-1.5's at half the width, with four language layers and two of the vision tower,
so that prefill takes about the share of a request that it takes at full size. Its weights are
random: answers mean nothing, and costs are those of any weights.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from benchmarks.common import BenchmarkError
from benchmarks.common.client import Client, Record, build_body, build_content
from benchmarks.common.pictures import draw_picture, encode_picture
from benchmarks.common.report import Advance, show_stage
from benchmarks.common.shapes import TOKENS, draw_words, read_kv_layout, write_llava
from benchmarks.demo.failure import build_start_error
from benchmarks.demo.interrupt import InterruptHandler
from benchmarks.server import ServerDied, serve
from vllm_autoprune.statistics import Spread, spread

WIDTH, LAYERS, TOWER_LAYERS = 2048, 4, 2
STATE, BUDGET = "cdpruner", 64
USERS = 8
QUESTIONS = 3
"""Questions about one image."""
ANSWER_TOKENS, QUESTION_WORDS = 4, 16
SERVED_NAME = "llava-shape"

_FLAGS = (
    "--served-model-name", SERVED_NAME, "--load-format", "dummy",
    "--max-model-len", "1024", "--block-size", "32", "--enforce-eager", "--max-num-seqs", "16",
)  # fmt: skip
_PRUNING = (
    "--autoprune-state", STATE, "--autoprune-budget", str(BUDGET),
    "--autoprune-requests", "budget",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of requests of one arm."""

    alone: int = 6
    together: int = 24
    images: int = 4
    """Images that are asked about several times."""

    @property
    def requests(self) -> int:
        """Number of all requests, including two that warm the server up."""
        return 2 + self.alone + self.together + self.images * QUESTIONS


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """What one way to serve an image costs; milliseconds."""

    prompt_tokens: int
    kv_bytes: int
    alone: Spread
    together: Spread
    requests_per_second: float
    questions: tuple[Spread, ...]
    """Time to first token of the first, second and third question about one image."""


@dataclass(frozen=True, slots=True)
class Speed:
    """All of the comparison."""

    stock: SpeedRow
    resized: SpeedRow
    pruned: SpeedRow
    tokens: int = TOKENS
    budget: int = BUDGET


def measure_speed(out: Path, interrupt: InterruptHandler, plan: Plan | None = None) -> Speed:
    """Serve the shape stock, then pruned, and time the same requests on both."""
    plan = plan or Plan()
    folder = write_llava(out / "shape", LAYERS, tower_layers=TOWER_LAYERS, width=WIDTH)
    token_bytes = read_kv_layout(folder).bytes_per_token
    with interrupt.guard():
        arms: dict[str, Mapping[str, object]] = {"stock": {}}
        rows = _serve_and_time(folder, out, (), arms, plan, token_bytes)
    with interrupt.guard():
        arms = {"pruned": {}, "resized": {"keep": "resized"}}
        rows |= _serve_and_time(folder, out, _PRUNING, arms, plan, token_bytes)
    return Speed(rows["stock"], rows["resized"], rows["pruned"])


def _serve_and_time(
    folder: Path,
    out: Path,
    flags: Sequence[str],
    arms: Mapping[str, Mapping[str, object]],
    plan: Plan,
    token_bytes: int,
) -> dict[str, SpeedRow]:
    name = next(iter(arms))
    log = out / f"speed-{name}.log"
    with contextlib.ExitStack() as stack:
        with show_stage(f"large server, {name}: start"):
            try:
                server = stack.enter_context(serve(folder, *_FLAGS, *flags, log=log))
            except ServerDied:
                raise build_start_error(log) from None
        rows = {}
        for number, (arm, fields) in enumerate(arms.items()):
            with show_stage(f"large server, {arm}: times", plan.requests) as advance:
                first = 1000 * (number + 1)
                rows[arm] = time_requests(server.url, fields, plan, token_bytes, first, advance)
        return rows


def time_requests(
    url: str,
    fields: Mapping[str, object],
    plan: Plan,
    token_bytes: int,
    first: int,
    advance: Advance,
) -> SpeedRow:
    """Time the requests of one arm.

    ``first`` is the number of its first image and text, so that arms share none.
    """
    client = Client(url)

    def send(number: int, image: int) -> Record:
        text = draw_words(QUESTION_WORDS, first + number)
        content = build_content(text, [draw_image_url(first + image)])
        # A special first token would have no text to be timed.
        answer: dict[str, object] = {"ignore_eos": True, "skip_special_tokens": False}
        if fields:
            answer["mm_processor_kwargs"] = {"autoprune": dict(fields)}
        body = build_body(SERVED_NAME, content, tokens=ANSWER_TOKENS, fields=answer)
        record = client.send(body)
        advance()
        if record.error is not None or not record.deltas:
            raise BenchmarkError(f"the large server did not answer: {record.error}")
        return record

    for number in range(2):
        send(number, number)
    alone = [send(number, number) for number in range(10, 10 + plan.alone)]
    numbers = range(100, 100 + plan.together)
    # Pictures are drawn before the clock starts.
    _ = [draw_image_url(first + number) for number in numbers]
    start = time.perf_counter()
    with ThreadPoolExecutor(USERS) as pool:
        together = list(pool.map(lambda number: send(number, number), numbers))
    seconds = time.perf_counter() - start
    by_question: list[list[Record]] = [[] for _ in range(QUESTIONS)]
    for image in range(300, 300 + plan.images):
        for question in range(QUESTIONS):
            by_question[question].append(send(image + 100 * question, image))
    tokens = alone[0].prompt_tokens or 0
    return SpeedRow(
        prompt_tokens=tokens,
        kv_bytes=tokens * token_bytes,
        alone=_first_tokens(alone),
        together=_first_tokens(together),
        requests_per_second=plan.together / seconds,
        questions=tuple(map(_first_tokens, by_question)),
    )


@lru_cache(maxsize=64)
def draw_image_url(seed: int) -> str:
    """A picture as a PNG data URL, as chat clients send it."""
    return encode_picture(draw_picture(seed, 640, 480))


def _first_tokens(records: Sequence[Record]) -> Spread:
    return spread([1000 * (record.deltas[0] - record.started) for record in records])
