"""Time to first token: a pruned image request against a text prompt of as many tokens.

Knows nothing about how a model folder is made, nor about statistics.

"Beyond the vision tower" is a further question on an image that was seen before: the tower's
features are there, and everything else is paid for (upload, PNG, image processor, hash,
transfer to the worker, selection, prefill).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Literal

from benchmarks.overhead.content import body, image_url, words
from benchmarks.overhead.measure import RequestFailed, Stamps, stages, together
from benchmarks.overhead.setting import STATE, Setting, progress
from benchmarks.server import Server, serve

Kind = Literal["text", "seen", "new", "full"]
KINDS: Mapping[Kind, str] = {
    "text": "text prompt of as many tokens",
    "seen": "pruned, image seen before, new question",
    "new": "pruned, new image (the vision tower runs)",
    "full": "unpruned, new image (the vision tower runs)",
}
BUDGET, QUESTION = 64, 24
"""K, and words in a question, each of which is one token."""

CROWD, SEEN = 16, 4
"""Requests sent together, and images that are asked about again and again."""

UNPRUNED = 576


@dataclass
class Arm:
    """All rounds of one kind at one concurrency; one row a round."""

    stamps: list[list[Stamps]] = field(default_factory=list)
    engine: list[dict[str, float]] = field(default_factory=list)

    @property
    def ttft(self) -> list[list[float]]:
        """Seconds to the first token."""
        return [[stamp.ttft for stamp in row] for row in self.stamps]

    def plain(self) -> dict[str, object]:
        """As JSON."""
        stamps = [[asdict(stamp) for stamp in row] for row in self.stamps]
        return {"requests": stamps, "engine": self.engine}


Arms = dict[int, dict[Kind, Arm]]
"""By concurrency and kind."""


@dataclass(frozen=True)
class Run:
    """One server's measurements."""

    name: str
    arms: Arms
    prompt_tokens: int


def rounds(quick: bool) -> Iterator[tuple[int, Kind]]:
    """What is sent, in order: ABBA at each concurrency, and a few requests of the other kinds."""
    pairs = {1: 4, CROWD: 1} if quick else {1: 16, CROWD: 2}
    for concurrency, number in pairs.items():
        for i in range(number):
            order: tuple[Kind, Kind] = ("text", "seen") if i % 2 == 0 else ("seen", "text")
            yield from ((concurrency, kind) for kind in order)
    yield from ((1, kind) for kind in ("new", "full"))


class Writer:
    """Bodies of each kind, none of them ever twice; SEEN images are seen before the clock."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._questions = count(1)
        self._images = count(SEEN)

    def bodies(self, kind: Kind, number: int) -> list[bytes]:
        """``number`` requests to be sent together."""
        return [self._body(kind, position) for position in range(number)]

    def _body(self, kind: Kind, position: int) -> bytes:
        question = next(self._questions)
        if kind == "text":
            return body(self._model, words(BUDGET + QUESTION, question))
        url = image_url(position % SEEN if kind == "seen" else next(self._images))
        budget = UNPRUNED if kind == "full" else None
        return body(self._model, words(QUESTION, question), url, budget=budget)


def measure(setting: Setting, llava: Path, tower: Path | None) -> Run:
    """Serve the shape pruned and send it everything, interleaved."""
    name = "without text tower" if tower is None else "with text tower"
    flags = [
        "--load-format", "dummy", "--enforce-eager", "--dtype", "bfloat16",
        "--max-model-len", "2048", "--block-size", "32",
        "--enable-prompt-tokens-details", "--trust-request-mm-kwargs",
        "--autoprune-state", STATE, "--autoprune-budget", str(BUDGET),
        # All images of a run are kept, so that no seen image has to be encoded again.
        "--autoprune-feature-cache-gb", "1",
    ]  # fmt: skip
    if tower is not None:
        flags += ["--autoprune-text-tower", str(tower)]
    log = setting.log(f"ttft {name}".replace(" ", "-"))
    progress(f"ttft {name}: start the server")
    with serve(llava, *flags, env={"VLLM_CPU_KVCACHE_SPACE": "2"}, log=log, patience=600) as server:
        return Run(name, *_ask(server, setting.quick, name))


def _ask(server: Server, quick: bool, name: str) -> tuple[Arms, int]:
    writer, arms = Writer(server.model), Arms()
    progress(f"ttft {name}: warm up")
    # One by one first, so that every image has been seen for sure; then shapes and allocators.
    for one in writer.bodies("seen", SEEN):
        together(server.url, [one])
    together(server.url, writer.bodies("seen", CROWD))
    for kind in ("text", "seen"):
        together(server.url, writer.bodies(kind, 1))
    for concurrency, kind in rounds(quick):
        bodies = writer.bodies(kind, concurrency)
        before = stages(server.get("/metrics"))
        stamps = together(server.url, bodies)
        after = stages(server.get("/metrics"))
        arm = arms.setdefault(concurrency, {}).setdefault(kind, Arm())
        arm.stamps.append(stamps)
        arm.engine.append({s: (after[s] - before[s]) / concurrency for s in after})
        longest = max(stamp.ttft for stamp in stamps)
        progress(f"ttft {name}: {concurrency:2d} x {kind}: {1000 * longest:.0f} ms")
    return arms, guard(arms)


def guard(arms: Arms) -> int:
    """The prompt length that text and pruned requests share; raises where a cache helped."""
    lengths: dict[bool, set[int]] = {True: set(), False: set()}
    _each(arms, lambda kind, stamp: lengths[kind == "full"].add(stamp.prompt_tokens))
    if len(lengths[False]) != 1:
        raise RequestFailed(f"prompts differ in length: {sorted(lengths[False])}")
    cached: list[int] = []
    _each(arms, lambda _, stamp: cached.append(stamp.cached_tokens))
    if any(cached):
        raise RequestFailed(f"prefix cache: {sum(map(bool, cached))} requests found tokens in it")
    return lengths[False].pop()


def _each(arms: Arms, look: Callable[[Kind, Stamps], object]) -> None:
    for kinds in arms.values():
        for kind, arm in kinds.items():
            for row in arm.stamps:
                for stamp in row:
                    look(kind, stamp)
