"""Time to first token: a pruned image request against a text prompt of as many tokens.

"Beyond the vision tower" is measured on a second question about an image: the features of the
vision tower are cached, everything else is not (upload, PNG, image processor, hash, transfer to the
worker, selection, prefill).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Literal

from benchmarks.common import BenchmarkError
from benchmarks.common.client import Client
from benchmarks.common.metrics import stage_seconds
from benchmarks.common.progress import log_progress
from benchmarks.common.report import (
    Claim,
    Section,
    Table,
    format_excess,
    format_milliseconds,
    format_spread,
)
from benchmarks.common.request_record import Record
from benchmarks.common.shapes import write_clip, write_llava
from benchmarks.cost.overhead.settings import (
    BUDGET,
    QUESTION,
    STATE,
    Settings,
    build_request,
    draw_words,
    image_url,
)
from benchmarks.cost.overhead.ttft_parts import measure_parts
from benchmarks.server import Server, serve
from vllm_autoprune.ops.dtype import choose_dtype
from vllm_autoprune.statistics import (
    Spread,
    at_most,
    difference_of_medians,
    ratio_of_medians,
    spread,
)

Kind = Literal["text", "seen", "new", "full"]
KINDS: Mapping[Kind, str] = {
    "text": "text prompt of as many tokens",
    "seen": "pruned, image seen before, new question",
    "new": "pruned, new image (the vision tower runs)",
    "full": "unpruned, new image (the vision tower runs)",
}
CROWD, SEEN = 16, 4
"""Requests sent together, and images whose features are cached."""

BOUND = 1.05
"""Most that a pruned request may take of the time of a text prompt."""

UNPRUNED = 576


@dataclass(frozen=True)
class Timing:
    """Seconds to first text and end of one request, and its tokens as the server counts them."""

    ttft: float
    total: float
    prompt_tokens: int
    cached_tokens: int

    @classmethod
    def of(cls, record: Record) -> Timing:
        """The timing of an answered request."""
        begin = record.started
        return cls(
            record.deltas[0] - begin,
            record.done - begin,
            record.prompt_tokens or 0,
            record.cached_tokens or 0,
        )


@dataclass
class Arm:
    """All rounds of one kind of request at one concurrency; one row a round."""

    timings: list[list[Timing]] = field(default_factory=list)
    engine: list[dict[str, float]] = field(default_factory=list)

    @property
    def ttft(self) -> list[list[float]]:
        """Seconds to the first token."""
        return [[timing.ttft for timing in row] for row in self.timings]

    @property
    def flat_ttft(self) -> list[float]:
        """The same, without rounds."""
        return [value for row in self.ttft for value in row]

    def to_json(self) -> dict[str, object]:
        """Every value."""
        timings = [[asdict(timing) for timing in row] for row in self.timings]
        return {"requests": timings, "engine": self.engine}


Arms = dict[int, dict[Kind, Arm]]
"""By concurrency and kind."""


@dataclass(frozen=True)
class Run:
    """One server's measurements."""

    name: str
    arms: Arms
    prompt_tokens: int


def plan_rounds(quick: bool) -> Iterator[tuple[int, Kind]]:
    """Concurrency and kind of each round: ABBA at each concurrency, then the other kinds."""
    pairs = {1: 4, CROWD: 1} if quick else {1: 16, CROWD: 2}
    for concurrency, number in pairs.items():
        for i in range(number):
            order: tuple[Kind, Kind] = ("text", "seen") if i % 2 == 0 else ("seen", "text")
            yield from ((concurrency, kind) for kind in order)
    yield from ((1, kind) for kind in ("new", "full"))


class BodyWriter:
    """Writes request bodies of each kind, no two of them equal."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._questions = count(1)
        self._images = count(SEEN)

    def bodies(self, kind: Kind, number: int) -> list[bytes]:
        """``number`` requests that are sent together."""
        return [self._body(kind, position) for position in range(number)]

    def _body(self, kind: Kind, position: int) -> bytes:
        question = next(self._questions)
        if kind == "text":
            return build_request(self._model, draw_words(BUDGET + QUESTION, question))
        url = image_url(position % SEEN if kind == "seen" else next(self._images))
        budget = UNPRUNED if kind == "full" else None
        return build_request(self._model, draw_words(QUESTION, question), url, budget=budget)


def measure(settings: Settings) -> Section:
    """Servers with and without a text tower, and the parts of a request outside a server."""
    llava = write_llava(settings.out / f"llava-{settings.layers}-layers", settings.layers)
    clip = write_clip(settings.out / "clip")
    runs = [measure_server(settings, llava, tower) for tower in (clip, None)]
    return build_section(settings.layers, runs, measure_parts(llava, clip, settings.quick))


def measure_server(settings: Settings, llava: Path, tower: Path | None) -> Run:
    """Serve the shape pruned and send all kinds of requests, interleaved."""
    name = "without text tower" if tower is None else "with text tower"
    flags = [
        "--load-format", "dummy", "--enforce-eager",
        "--max-model-len", "2048", "--block-size", "32",
        "--enable-prompt-tokens-details", "--trust-request-mm-kwargs",
        "--autoprune-state", STATE, "--autoprune-budget", str(BUDGET),
        # Large enough for all images of a run, so that none is encoded a second time.
        "--autoprune-feature-cache-gb", "1",
    ]  # fmt: skip
    if tower is not None:
        flags += ["--autoprune-text-tower", str(tower)]
    log = settings.log(f"ttft {name}".replace(" ", "-"))
    log_progress(f"ttft {name}: start the server")
    with serve(llava, *flags, env={"VLLM_CPU_KVCACHE_SPACE": "2"}, log=log, patience=600) as server:
        return Run(name, *_send_rounds(server, settings.quick, name))


def _send_rounds(server: Server, quick: bool, name: str) -> tuple[Arms, int]:
    writer, arms, client = BodyWriter(server.model), Arms(), Client(server.url)
    log_progress(f"ttft {name}: warm up")
    # One by one first, so that the features of every image are cached; then shapes and allocators.
    for body in writer.bodies("seen", SEEN):
        client.send_together([body])
    client.send_together(writer.bodies("seen", CROWD))
    for kind in ("text", "seen"):
        client.send_together(writer.bodies(kind, 1))
    for concurrency, kind in plan_rounds(quick):
        bodies = writer.bodies(kind, concurrency)
        before = stage_seconds(server.get("/metrics"))
        timings = [Timing.of(record) for record in client.send_together(bodies)]
        after = stage_seconds(server.get("/metrics"))
        arm = arms.setdefault(concurrency, {}).setdefault(kind, Arm())
        arm.timings.append(timings)
        arm.engine.append({s: (after[s] - before[s]) / concurrency for s in after})
        longest = max(timing.ttft for timing in timings)
        log_progress(f"ttft {name}: {concurrency:2d} x {kind}: {1000 * longest:.0f} ms")
    return arms, check_prompts(arms)


def check_prompts(arms: Arms) -> int:
    """The prompt length that text and pruned requests share.

    Raises :class:`BenchmarkError` where lengths differ, or the prefix cache was hit.
    """
    timings = [
        (kind, timing)
        for kinds in arms.values()
        for kind, arm in kinds.items()
        for row in arm.timings
        for timing in row
    ]
    lengths = {timing.prompt_tokens for kind, timing in timings if kind != "full"}
    if len(lengths) != 1:
        raise BenchmarkError(f"prompts differ in length: {sorted(lengths)}")
    cached = sum(timing.cached_tokens > 0 for _, timing in timings)
    if cached:
        raise BenchmarkError(f"prefix cache: {cached} requests found tokens in it")
    return lengths.pop()


def build_section(layers: int, runs: Sequence[Run], parts: Mapping[str, Spread]) -> Section:
    """Claims and figures of all measured servers."""
    lengths = sorted({run.prompt_tokens for run in runs})
    return Section(
        name="ttft",
        title="Time to first token",
        setup=[
            f"LLaVA-1.5-7B's true widths, dummy weights, {choose_dtype()}, eager; vision tower at "
            f"its full depth (CLIP-L/14-336, 24 layers), language model {layers} of 32 layers deep",
            f"state `{STATE}`, K = {BUDGET} of 576; PNG of 640 x 480; questions of {QUESTION} "
            f"words; prompts of {', '.join(map(str, lengths))} tokens, text prompts of as many",
            "one server at a time, both kinds in alternating order; no request found a token in "
            "the prefix cache; medians, and 95 % intervals by bootstrap over rounds",
        ],
        claims=[claim for run in runs for claim in build_claims(run)],
        tables=[
            *(_build_times_table(run) for run in runs),
            *(_build_stage_table(run) for run in runs),
            _build_parts_table(parts),
        ],
        data={
            "layers": layers,
            "runs": {
                run.name: {
                    str(c): {kind: arm.to_json() for kind, arm in kinds.items()}
                    for c, kinds in run.arms.items()
                }
                for run in runs
            },
            "parts": {name: asdict(of) for name, of in parts.items()},
        },
    )


def build_claims(run: Run) -> list[Claim]:
    """At most 5 % more than a text prompt, at each concurrency."""
    claims = []
    for concurrency, kinds in run.arms.items():
        seen, text = kinds["seen"].ttft, kinds["text"].ttft
        ratio = ratio_of_medians(seen, text)
        promise = (
            f"{run.name}, concurrency {concurrency}: TTFT beyond the vision tower at most "
            "5 % over a text prompt of as many tokens"
        )
        extra = format_milliseconds(difference_of_medians(seen, text))
        claims.append(Claim(promise, f"{format_excess(ratio)}; {extra}", at_most(ratio, BOUND)))
    return claims


def _build_times_table(run: Run) -> Table:
    rows = [
        (
            str(concurrency),
            KINDS[kind],
            format_spread(spread(arm.flat_ttft)),
            str(len(arm.flat_ttft)),
        )
        for concurrency, kinds in run.arms.items()
        for kind, arm in kinds.items()
    ]
    columns = ("concurrency", "request", "TTFT, ms: median (quartiles)", "requests")
    return Table(f"Relevance {run.name}.", columns, rows)


def _build_stage_table(run: Run) -> Table:
    """Time in the engine and outside of it (HTTP, image, transfer), one request at a time."""
    rows = []
    for kind, arm in run.arms[1].items():
        whole = median(arm.flat_ttft)
        queue, prefill = (median(row[s] for row in arm.engine) for s in ("queue", "prefill"))
        figures = (whole - queue - prefill, queue, prefill)
        rows.append((KINDS[kind], *map(_format_milliseconds, figures)))
    columns = ("request", "outside the engine, ms", "queue, ms", "selection and prefill, ms")
    return Table(f"Where the time goes, {run.name}, one request at a time.", columns, rows)


def _format_milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f}" if seconds >= 1 else f"{1000 * seconds:.1f}"


def _build_parts_table(parts: Mapping[str, Spread]) -> Table:
    rows = [(name, format_spread(of)) for name, of in parts.items()]
    caption = "The same work outside a server, one image, in as many threads."
    return Table(caption, ("part", "ms: median (quartiles)"), rows)
