"""The stop-watch, against a server that emits deltas on a schedule known beforehand."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from statistics import median

import pytest

from benchmarks.load.client import Client
from benchmarks.load.mock import MODEL, PROMPT_TOKENS, Script, due, mock_server
from benchmarks.load.record import Record
from benchmarks.server import free_port

GAPS = (0.010, 0.040, 0.025)


def body(tokens: int = 10, model: str = MODEL) -> bytes:
    return json.dumps({"model": model, "max_tokens": tokens, "stream": True}).encode()


def ask(script: Script, times: int = 1, model: str = MODEL) -> list[Record]:
    with mock_server(script) as server:
        return [Client(server.url).send(body(model=model), index=n) for n in range(times)]


def test_recorded_gaps_are_right_within_3_ms_at_the_median() -> None:
    script = Script(first=0.06, gaps=GAPS)
    with mock_server(script) as server:
        records = [Client(server.url).send(body()) for _ in range(8)]
        emitted = server.emitted
    wanted = due(script, 10)
    gaps = [b - a for a, b in pairwise(wanted)]
    errors = [
        abs(found - gap) for record in records for found, gap in zip(record.gaps, gaps, strict=True)
    ]
    assert median(errors) < 0.003
    # The time to first token also holds the connection, which the mock's schedule does not.
    assert 0 <= median(record.ttft for record in records) - script.first < 0.02
    # Against the moments at which the server really wrote, which its own delays do not blur.
    late = [
        arrived - wrote
        for record, times in zip(records, emitted, strict=True)
        for arrived, wrote in zip(record.deltas, times, strict=True)
    ]
    assert min(late) > 0 and median(late) < 0.003


def test_stamps_are_in_order_and_usage_is_read() -> None:
    (record,) = ask(Script(first=0.02, gaps=(0.005,)))
    assert record.ok and record.text == "0 1 2 3 4 5 6 7 8 9 "
    assert record.connected is not None and record.sent is not None and record.headers is not None
    times = [record.scheduled, record.started, record.connected, record.sent, record.headers]
    times += [*record.deltas, record.done]
    assert times == sorted(times)
    assert (record.prompt_tokens, record.completion_tokens) == (PROMPT_TOKENS, 10)
    assert record.tpot == pytest.approx((record.deltas[-1] - record.deltas[0]) / 9)


def test_latency_counts_from_when_a_request_was_due() -> None:
    now = 100.0
    with mock_server(Script(first=0.01, gaps=(0.001,))) as server:
        record = Client(server.url, clock=lambda: now).send(body(), scheduled=97.5)
    assert record.delay == 2.5 and record.ttft == 2.5 and record.e2e == 2.5


@pytest.mark.parametrize(
    ("script", "model", "told"),
    [
        (Script(status=500), MODEL, "status 500: .*the engine is gone"),
        (Script(), "other", "status 404: .*does not exist"),
        (Script(cut=True), MODEL, "the answer was cut short"),
        (Script(serves=0), MODEL, "no answer: "),
    ],
)
def test_every_failure_is_on_record_in_a_line(script: Script, model: str, told: str) -> None:
    (record,) = ask(script, model=model)
    assert not record.ok
    assert record.error is not None
    assert re.search(told, record.error), record.error


def test_nobody_listening_is_a_record_too() -> None:
    record = Client(f"http://127.0.0.1:{free_port()}").send(body(), index=3)
    assert record.index == 3 and record.error is not None
    assert "no answer: ConnectionRefusedError" in record.error


def test_an_answer_without_usage_is_an_answer_without_counts() -> None:
    (record,) = ask(Script(usage=False, first=0.01, gaps=(0.001,)))
    assert record.ok and record.completion_tokens is None and record.tpot is None
