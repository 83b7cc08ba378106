"""The streaming client, against a server whose schedule is known beforehand."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from statistics import median

import pytest

from benchmarks.common.client import (
    EMPTY,
    Client,
    Record,
    parse_stream,
)
from benchmarks.common.fake_server import MODEL, Reply, fake_server
from benchmarks.server import free_port


def body(model: str = MODEL) -> bytes:
    return json.dumps({"model": model, "max_tokens": 10, "stream": True}).encode()


def send(reply: Reply, model: str = MODEL) -> Record:
    with fake_server(reply) as server:
        return Client(server.url).send(body(model))


def test_recorded_gaps_are_right_within_3_ms() -> None:
    """In the best of 8 answers: a busy machine delays single reads, a wrong clock all."""
    reply = Reply(ttft=0.06, gaps=(0.010, 0.040, 0.025))
    with fake_server(reply) as server:
        records = [Client(server.url).send(body()) for _ in range(8)]
    gaps = [b - a for a, b in pairwise(reply.times(10))]
    errors = [
        median(abs(measured - gap) for measured, gap in zip(record.gaps, gaps, strict=True))
        for record in records
    ]
    assert min(errors) < 0.003
    # The time to first token also includes connecting, which the schedule of the server does not.
    assert 0 <= min(record.ttft for record in records) - reply.ttft < 0.02


def test_stamps_are_in_order_and_usage_is_read() -> None:
    record = send(Reply(ttft=0.02, gaps=(0.005,)))
    assert record.ok and record.text == "0 1 2 3 4 5 6 7 8 9 "
    times = [record.scheduled, record.started, *record.deltas, record.done]
    assert times == sorted(times)
    assert (record.prompt_tokens, record.completion_tokens) == (600, 10)
    assert record.tpot == pytest.approx((record.deltas[-1] - record.deltas[0]) / 9)
    without_usage = send(Reply(usage=None, ttft=0.01, gaps=(0.001,)))
    assert without_usage.ok and without_usage.completion_tokens is without_usage.tpot is None


def test_latency_counts_from_when_a_request_was_due() -> None:
    with fake_server(Reply(ttft=0.01, gaps=(0.001,))) as server:
        record = Client(server.url, clock=lambda: 100.0).send(body(), scheduled=97.5, index=3)
    assert record.index == 3 and record.delay == record.ttft == record.e2e == 2.5


@pytest.mark.parametrize(
    ("reply", "model", "message"),
    [
        (Reply(status=500), MODEL, "status 500: .*the engine is gone"),
        (Reply(), "other", "status 404: .*does not exist"),
        (Reply(drop=True), MODEL, "no answer: "),
        (Reply(cut=True), MODEL, "the answer was cut short"),
    ],
)
def test_every_failure_is_recorded_in_one_line(reply: Reply, model: str, message: str) -> None:
    record = send(reply, model)
    assert not record.ok and re.search(message, str(record.error))


def test_a_refused_connection_is_recorded() -> None:
    record = Client(f"http://127.0.0.1:{free_port()}").send(body())
    assert "no answer: ConnectionRefusedError" in str(record.error)


def event(**chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def delta(**fields: str) -> bytes:
    return event(choices=[{"index": 0, "delta": fields}])


ROLE, A, B = delta(role="assistant", content=""), delta(content="a"), delta(content="b")
USAGE = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 2})
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("reads", "deltas", "text", "error"),
    [
        # The chunk that only names the role is no first token.
        ([(1.0, ROLE), (2.0, A), (3.0, B), (4.0, USAGE), (5.0, DONE)], (2.0, 3.0), "ab", None),
        # An event that is cut in two has the time of its last byte; two in one read have one time.
        *([[(1.0, A[:cut]), (2.0, A[cut:] + DONE)], (2.0,), "a", None] for cut in range(1, 60, 9)),
        ([(1.0, ROLE + A + B), (2.0, USAGE + DONE)], (1.0, 1.0), "ab", None),
        # Comments, and line ends of the other kind.
        ([(1.0, b": ping\r\n\r\n" + A.replace(b"\n", b"\r\n") + DONE)], (1.0,), "a", None),
        ([(1.0, A)], (1.0,), "a", "the answer was cut short: the stream ended without [DONE]"),
        ([(1.0, DONE)], (), "", EMPTY),
        ([(1.0, event(error={"message": "engine is dead"}))], (), "", "engine is dead"),
        ([(1.0, b"data: {oops\n\n")], (), "", "an event is not a JSON object: {oops"),
        ([(1.0, b"data: [1]\n\n")], (), "", "an event is not a JSON object: [1]"),
    ],
)
def test_a_stream_is_parsed(
    reads: list[tuple[float, bytes]], deltas: tuple[float, ...], text: str, error: str | None
) -> None:
    usage = (9, 2) if any(USAGE in piece for _, piece in reads) else (None, None)
    assert tuple(parse_stream(reads).values()) == (deltas, text, *usage, error)
