"""Time to first token, and processor time, of the first and of further questions on an image.

Every arm has a server of its own; or the pruned arms are settings of requests to one server, which
takes less memory. The arms are asked the same question one after another, in an order that rotates
from question to question, so that drift of the machine affects all of them alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import sleep

from benchmarks.common import BenchmarkError, StrictModel
from benchmarks.common.client import Client
from benchmarks.common.progress import log_progress
from benchmarks.common.report import Claim, Section, Table, format_excess, format_spread
from benchmarks.cost.efficiency.models import Model
from benchmarks.cost.overhead.settings import build_request, draw_words, image_url
from benchmarks.cost.questions.arms import SPLIT, STOCK, TODAY
from benchmarks.load.arms import Arm
from benchmarks.server import POLLING, Server, serve
from vllm_autoprune.statistics import at_most, ratio_of_medians, spread

WORDS = 16
"""Words in a question, each of which is one token."""

LIKE_STOCK, LIKE_TODAY = 1.15, 1.03
"""Most that another question may take of stock's, and the first one of today's."""

_WARM_UP = 10_000
"""Number of the image that is not measured."""


@dataclass(frozen=True)
class Target:
    """Where an arm's questions are sent, and what is sent with them.

    Targets that share a server show pictures of their own (``seed``), because the output of the
    vision tower is cached for all of them.
    """

    server: Server
    pruning: Mapping[str, object] = field(default_factory=dict)
    seed: int = 0


class Answer(StrictModel):
    """One question: seconds at the client, processor seconds of API server and worker, tokens."""

    ttft: float
    processor: float
    prompt_tokens: int
    cached_tokens: int


class Measured(StrictModel):
    """Answers of one arm, one row an image, and those of one image with many questions."""

    rows: tuple[tuple[Answer, ...], ...]
    many: tuple[Answer, ...] = ()

    def first(self, time: str) -> tuple[float, ...]:
        """Seconds of the first question on each image; ``time`` is ``ttft`` or ``processor``."""
        return tuple(_seconds(row[0], time) for row in self.rows)

    def again(self, time: str) -> tuple[float, ...]:
        """Median seconds of the further questions on each image."""
        return tuple(median(_seconds(one, time) for one in row[1:]) for row in self.rows)


def _seconds(answer: Answer, time: str) -> float:
    return answer.ttft if time == "ttft" else answer.processor


def measure(
    arms: Sequence[Arm],
    model: Model,
    *,
    rounds: int,
    questions: int,
    many: int,
    settings: Mapping[str, Mapping[str, object]],
    logs: Path,
) -> dict[str, Measured]:
    """Ask ``questions`` on each of ``rounds`` images, then ``many`` on one, in every arm.

    ``settings``: of requests to the split's server, for each arm that is served there.
    """
    rows: dict[str, list[tuple[Answer, ...]]] = {}
    long: dict[str, tuple[Answer, ...]] = {}
    with _serve_all(arms, logs) as servers:
        targets = {name: Target(server) for name, server in servers.items()}
        for at, (name, pruning) in enumerate(settings.items()):
            targets[name] = Target(servers[SPLIT], pruning, 1000 * at)
        _ask(targets, model, _WARM_UP, 2)
        for number in range(rounds):
            for name, row in _ask(targets, model, number, questions).items():
                rows.setdefault(name, []).append(row)
            log_progress(f"image {number + 1} of {rounds}")
        if many:
            long = _ask(targets, model, rounds, many)
    return {name: Measured(rows=tuple(own), many=long.get(name, ())) for name, own in rows.items()}


@contextlib.contextmanager
def _serve_all(arms: Sequence[Arm], logs: Path) -> Iterator[dict[str, Server]]:
    logs.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        yield {
            arm.name: stack.enter_context(
                serve(arm.model, *arm.flags, log=logs / f"{arm.name}.log", patience=900)
            )
            for arm in arms
        }


def _ask(
    targets: Mapping[str, Target], model: Model, image: int, questions: int
) -> dict[str, tuple[Answer, ...]]:
    """Answers of every arm to the same questions on one image."""
    answers: dict[str, list[Answer]] = {name: [] for name in targets}
    names = list(targets)
    for number in range(questions):
        text = draw_words(WORDS, 100 * image + number)
        turn = (image + number) % len(names)
        for name in (*names[turn:], *names[:turn]):
            target = targets[name]
            url = image_url(target.seed + image, model.side, model.side)
            answers[name].append(_send(target, text, url))
    return {name: tuple(own) for name, own in answers.items()}


def _send(target: Target, text: str, url: str) -> Answer:
    server = target.server
    sleep(POLLING)
    body = build_request(server.model, text, url, pruning=target.pruning)
    before = server.processor_seconds()
    record = Client(server.url, timeout=900).send(body)
    if record.error is not None:
        raise BenchmarkError(record.error)
    return Answer(
        ttft=record.ttft,
        processor=server.processor_seconds() - before,
        prompt_tokens=record.prompt_tokens or 0,
        cached_tokens=record.cached_tokens or 0,
    )


def build_section(setup: Sequence[str], measured: Mapping[str, Measured], load: str) -> Section:
    """Claims in both times, and the table."""
    return Section(
        name="ttft",
        title="First and further questions on an image",
        setup=[*setup, f"load average of the last minute, before and after: {load}"],
        claims=list(_claims(measured)),
        tables=[_table(measured), _token_table(measured)],
        data={},
    )


def _claims(measured: Mapping[str, Measured]) -> Iterator[Claim]:
    if SPLIT not in measured:
        return
    split = measured[SPLIT]
    for time, name in (("ttft", "time to first token"), ("processor", "processor time")):
        if STOCK in measured:
            ratio = ratio_of_medians(_rows(split.again(time)), _rows(measured[STOCK].again(time)))
            promise = f"another question, {name}: split at most {LIKE_STOCK} of stock"
            yield Claim(promise, format_excess(ratio), at_most(ratio, LIKE_STOCK))
        if TODAY in measured:
            ratio = ratio_of_medians(_rows(split.first(time)), _rows(measured[TODAY].first(time)))
            promise = f"first question, {name}: split at most {LIKE_TODAY} of {TODAY}"
            yield Claim(promise, format_excess(ratio), at_most(ratio, LIKE_TODAY))


def _rows(values: Sequence[float]) -> list[list[float]]:
    return [[value] for value in values]


def _table(measured: Mapping[str, Measured]) -> Table:
    columns = (
        "arm", "first, TTFT ms", "another, TTFT ms", "another / first",
        "first, processor ms", "another, processor ms",
    )  # fmt: skip
    rows = []
    for name, one in measured.items():
        first, again = spread(one.first("ttft")), spread(one.again("ttft"))
        used = (spread(one.first("processor")), spread(one.again("processor")))
        ratio = f"{again.median / first.median:.2f}"
        rows.append((name, *map(format_spread, (first, again)), ratio, *map(format_spread, used)))
    return Table("Medians (quartiles) over images.", columns, rows, "l" + "r" * 5)


def _token_table(measured: Mapping[str, Measured]) -> Table:
    columns = ("arm", "prompt tokens", "cached, first", "cached, another")
    rows = [
        (
            name,
            str(round(median(answer.prompt_tokens for row in one.rows for answer in row))),
            str(round(median(row[0].cached_tokens for row in one.rows))),
            str(round(median(answer.cached_tokens for row in one.rows for answer in row[1:]))),
        )
        for name, one in measured.items()
    ]
    return Table("Tokens, as the server counts them.", columns, rows, "lrrr")
