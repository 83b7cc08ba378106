"""Measurements of the demo: two models, each served stock and pruned, are sent the same requests.

mini-LLaVA is trained, so its answers are compared. The other one is LLaVA-1.5 at half the width,
with four language layers and two of the vision tower, so that prefill takes about the share of a
request that it takes at full size. Its weights are random: answers mean nothing, and costs are
those of any weights.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from benchmarks.common import BenchmarkError
from benchmarks.common.client import EMPTY, Client, Record
from benchmarks.common.report import show_stage
from benchmarks.common.requests import build_body, build_content, draw_picture, encode_picture
from benchmarks.common.shapes import (
    TOKENS,
    count_visual_tokens,
    draw_words,
    read_kv_layout,
    write_llava,
)
from benchmarks.server import ServerDied, serve
from benchmarks.yardsticks.engine import MAX_ANSWER_TOKENS
from benchmarks.yardsticks.examples import LLAVA, Example, png_url
from vllm_autoprune.ops.dtype import Dtype, choose_dtype
from vllm_autoprune.statistics import Spread, spread

Guard = Callable[[], AbstractContextManager[None]]
"""Ends servers that are started within it after Ctrl-C."""
Keep = Literal["full", "random", "resized", "reference", "state"]

USERS = 8
"""Requests at once."""
SERVED_NAME = "llava"
_FLAGS = ("--served-model-name", SERVED_NAME, "--max-model-len", "1024", "--block-size", "32",
          "--enforce-eager")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to serve an image: all of its tokens, or ``budget`` of them."""

    keep: Keep
    budget: int | None = None

    @property
    def label(self) -> str:
        """Short and unique, such as ``reference 8``."""
        return self.keep if self.budget is None else f"{self.keep} {self.budget}"

    @property
    def fields(self) -> dict[str, object]:
        """The pruning fields of a request; none for the stock server."""
        if self.keep == "full":
            return {}
        return {"mm_processor_kwargs": {"autoprune": {"budget": self.budget, "keep": self.keep}}}


FULL = Configuration("full")
KEEPS: tuple[Keep, ...] = ("random", "resized", "reference", "state")
"""Ways to have K tokens: two controls, then the state without its exchanges and with them."""
PRUNED = tuple(Configuration(keep, budget) for budget in (16, 8) for keep in KEEPS)


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


Answers = dict[Configuration, list[Record]]
"""Answers in the order of the examples."""


def measure_answers(settings: Settings, examples: Sequence[Example], guard: Guard) -> Answers:
    """Answers of the stock server, and of the pruned one in every configuration.

    Its last configuration keeps all tokens: a control, which must equal the stock server.
    """
    # A row would profit from the one before it by hits in caches, which look like a fast prefill.
    flags = (*_FLAGS, "--no-enable-prefix-caching", "--dtype", settings.dtype)
    pruning = (
        "--autoprune-state", settings.state, "--autoprune-text-tower", str(settings.text_tower),
        "--autoprune-feature-cache-gb", "0", "--trust-request-mm-kwargs",
    )  # fmt: skip
    everything = Configuration("state", count_visual_tokens(settings.model))
    arms = {"stock": (FULL,), "pruned": (*PRUNED, everything)}
    answers = Answers()
    for name, configurations in arms.items():
        more, log = pruning if name == "pruned" else (), settings.out / f"{name}.log"
        with guard(), _serve(f"mini-LLaVA, {name}", settings.model, (*flags, *more), log) as url:
            answers |= send_questions(url, name, examples, configurations)
    return answers


def send_questions(
    url: str, name: str, examples: Sequence[Example], configurations: Sequence[Configuration]
) -> Answers:
    """Send all questions in every configuration, several at a time.

    Raises :class:`BenchmarkError` where a question is not answered.
    """
    contents = []
    for example in examples:  # encoded once
        image, question = build_content(example.question, [png_url(example.image)])
        contents.append([{**image, "uuid": f"asked-{example.image_id}"}, question])
    client = Client(url, timeout=120.0)

    def ask(content: Sequence[Mapping[str, object]], fields: Mapping[str, object]) -> Record:
        record = client.send(
            build_body(SERVED_NAME, content, tokens=MAX_ANSWER_TOKENS, fields=fields)
        )
        if record.error not in (None, EMPTY):
            broken = record.status in (0, 200)
            what = "stopped answering; its log is in --out" if broken else "refused a question"
            raise BenchmarkError(f"the server {what}: {record.error}")
        return record

    pool, answers = ThreadPoolExecutor(USERS), Answers()
    try:
        total = len(configurations) * len(contents)
        with show_stage(f"mini-LLaVA, {name}: questions", total) as advance:
            for configuration in configurations:
                futures = [pool.submit(ask, content, configuration.fields) for content in contents]
                answers[configuration] = []
                for future in futures:
                    answers[configuration].append(future.result())
                    advance()
    finally:
        # Requests that are still running fail when the server ends, which must not wait for them.
        pool.shutdown(wait=False, cancel_futures=True)
    return answers


WIDTH = 2048
_LAYERS, _TOWER_LAYERS, _STATE, _BUDGET = 4, 2, "cdpruner", 64
QUESTIONS = 3
"""Questions about one image."""
ANSWER_TOKENS, _QUESTION_WORDS = 4, 16


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of requests of one arm; ``images`` are asked about several times."""

    alone: int = 6
    together: int = 24
    images: int = 4

    @property
    def requests(self) -> int:
        """Number of all requests, including two that warm the server up."""
        return 2 + self.alone + self.together + self.images * QUESTIONS


@dataclass(frozen=True, slots=True)
class _SpeedRow:
    """What one way to serve an image costs; milliseconds.

    ``questions`` are times to first token of the first, second and third about one image.
    """

    prompt_tokens: int
    kv_bytes: int
    alone: Spread
    together: Spread
    requests_per_second: float
    questions: tuple[Spread, ...]


@dataclass(frozen=True, slots=True)
class Speed:
    """All of the comparison."""

    stock: _SpeedRow
    resized: _SpeedRow
    pruned: _SpeedRow
    tokens: int = TOKENS
    budget: int = _BUDGET


def measure_speed(out: Path, guard: Guard) -> Speed:
    """Serve the shape stock, then pruned, and time the same requests on both."""
    folder = write_llava(out / "shape", _LAYERS, tower_layers=_TOWER_LAYERS, width=WIDTH)
    token_bytes = read_kv_layout(folder).bytes_per_token
    flags = (*_FLAGS, "--load-format", "dummy", "--max-num-seqs", "16")
    pruning = ("--autoprune-state", _STATE, "--autoprune-budget", str(_BUDGET),
               "--autoprune-requests", "budget")  # fmt: skip

    arms: dict[str, dict[str, dict[str, object]]] = {
        "stock": {"stock": {}},
        "pruned": {"pruned": {}, "resized": {"keep": "resized"}},
    }
    rows: dict[str, _SpeedRow] = {}
    for server, requests in arms.items():
        more, log = pruning if server == "pruned" else (), out / f"speed-{server}.log"
        with guard(), _serve(f"large server, {server}", folder, (*flags, *more), log) as url:
            for number, (name, fields) in enumerate(requests.items(), 1):
                rows[name] = _time_requests(url, name, fields, Plan(), token_bytes, 1000 * number)
    return Speed(rows["stock"], rows["resized"], rows["pruned"])


def _time_requests(
    url: str, name: str, fields: Mapping[str, object], plan: Plan, token_bytes: int, start: int
) -> _SpeedRow:
    """Time the requests of one arm.

    ``start`` is the number of its first image and text, so that arms of one server share none.
    """
    client = Client(url)

    def send(number: int, image: int) -> Record:
        text = draw_words(_QUESTION_WORDS, start + number)
        content = build_content(text, [_draw_image_url(start + image)])
        # A special first token would have no text to be timed.
        answer: dict[str, object] = {"ignore_eos": True, "skip_special_tokens": False}
        if fields:
            answer["mm_processor_kwargs"] = {"autoprune": dict(fields)}
        record = client.send(build_body(SERVED_NAME, content, tokens=ANSWER_TOKENS, fields=answer))
        advance()
        if record.error is not None:
            raise BenchmarkError(f"the large server did not answer: {record.error}")
        return record

    with show_stage(f"large server, {name}: times", plan.requests) as advance:
        for number in range(2):
            send(number, number)
        alone = [send(number, number) for number in range(10, 10 + plan.alone)]
        numbers = range(100, 100 + plan.together)
        # Pictures are drawn before the clock starts.
        _ = [_draw_image_url(start + number) for number in numbers]
        begin = time.perf_counter()
        with ThreadPoolExecutor(USERS) as pool:
            together = list(pool.map(lambda number: send(number, number), numbers))
        seconds = time.perf_counter() - begin
        by_question: list[list[Record]] = [[] for _ in range(QUESTIONS)]
        for image in range(300, 300 + plan.images):
            for question in range(QUESTIONS):
                by_question[question].append(send(image + 100 * question, image))
    tokens = alone[0].prompt_tokens or 0
    return _SpeedRow(
        prompt_tokens=tokens,
        kv_bytes=tokens * token_bytes,
        alone=_first_tokens(alone),
        together=_first_tokens(together),
        requests_per_second=plan.together / seconds,
        questions=tuple(map(_first_tokens, by_question)),
    )


@lru_cache(maxsize=64)
def _draw_image_url(seed: int) -> str:
    """A picture as a PNG data URL, as chat clients send it."""
    return encode_picture(draw_picture(seed, 640, 480))


def _first_tokens(records: Sequence[Record]) -> Spread:
    return spread([1000 * record.ttft for record in records])


@contextlib.contextmanager
def _serve(name: str, model: Path, flags: Sequence[str], log: Path) -> Iterator[str]:
    """The address of a server; raises :class:`BenchmarkError` with the reason from its log."""
    with contextlib.ExitStack() as stack:
        with show_stage(f"{name}: start"):
            try:
                server = stack.enter_context(serve(model, *flags, log=log))
            except ServerDied:
                cause = find_root_cause(log.read_text(errors="replace"))
                raise BenchmarkError(f"the server did not start: {cause} (log: {log})") from None
        yield server.url


def find_root_cause(log: str) -> str:
    """The plugin's refusal, else the first error in a log, else its last line.

    Processes pass errors on, so the first one is the cause.
    """
    _, refused, refusal = log.partition("\nvllm-autoprune: ")
    if refused:
        return " ".join(refusal.split())
    error = re.search(r"(?:^|\] )(\w*(?:Error|Exception): .*)$", log, re.MULTILINE)
    return error[1] if error else (log.strip() or "no output").rpartition("\n")[2]
