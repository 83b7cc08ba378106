"""The streaming client, against a server whose schedule is known beforehand, and its journal."""

from __future__ import annotations

import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from benchmarks.common.client import EMPTY, Client, Journal, Record, parse, read_journal
from benchmarks.common.fake_server import MODEL, PROMPT_TOKENS, Reply, fake_server
from benchmarks.server import free_port
from tests.benchmarks.load.samples import record as make_record

GAPS = (0.010, 0.040, 0.025)


def body(tokens: int = 10, model: str = MODEL) -> bytes:
    return json.dumps({"model": model, "max_tokens": tokens, "stream": True}).encode()


def send(
    reply: Reply, times: int = 1, model: str = MODEL, serves: int | None = None
) -> list[Record]:
    with fake_server(reply, serves=serves) as server:
        return [Client(server.url).send(body(model=model), index=n) for n in range(times)]


def test_recorded_gaps_are_right_within_3_ms() -> None:
    """In the best of 8 answers: a busy machine delays single reads, a wrong clock all."""
    reply = Reply(ttft=0.06, gaps=GAPS)
    with fake_server(reply) as server:
        records = [Client(server.url).send(body()) for _ in range(8)]
        emitted = server.emitted
    gaps = [b - a for a, b in pairwise(reply.times(10))]
    errors = [
        median(abs(measured - gap) for measured, gap in zip(record.gaps, gaps, strict=True))
        for record in records
    ]
    assert min(errors) < 0.003
    # The time to first token also includes connecting, which the schedule of the server does not.
    assert 0 <= min(record.ttft for record in records) - reply.ttft < 0.02
    late = [
        median(arrived - wrote for arrived, wrote in zip(record.deltas, times, strict=True))
        for record, times in zip(records, emitted, strict=True)
    ]
    assert 0 < min(late) < 0.003


def test_stamps_are_in_order_and_usage_is_read() -> None:
    (record,) = send(Reply(ttft=0.02, gaps=(0.005,)))
    assert record.ok and record.text == "0 1 2 3 4 5 6 7 8 9 "
    times = [record.scheduled, record.started, *record.deltas, record.done]
    assert times == sorted(times)
    assert (record.prompt_tokens, record.completion_tokens) == (PROMPT_TOKENS, 10)
    assert record.tpot == pytest.approx((record.deltas[-1] - record.deltas[0]) / 9)


def test_latency_counts_from_when_a_request_was_due() -> None:
    now = 100.0
    with fake_server(Reply(ttft=0.01, gaps=(0.001,))) as server:
        record = Client(server.url, clock=lambda: now).send(body(), scheduled=97.5)
    assert record.delay == 2.5 and record.ttft == 2.5 and record.e2e == 2.5


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
    (record,) = send(reply, model=model)
    assert not record.ok
    assert record.error is not None
    assert re.search(message, record.error), record.error


def test_a_refused_connection_is_recorded() -> None:
    record = Client(f"http://127.0.0.1:{free_port()}").send(body(), index=3)
    assert record.index == 3 and record.error is not None
    assert "no answer: ConnectionRefusedError" in record.error


def test_an_answer_without_usage_has_no_token_counts() -> None:
    (record,) = send(Reply(usage=None, ttft=0.01, gaps=(0.001,)))
    assert record.ok and record.completion_tokens is None and record.tpot is None


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
    content = parse(reads)
    assert (content.deltas, content.text, content.error) == (deltas, text, error)
    counts = (content.prompt_tokens, content.completion_tokens)
    assert counts == ((9, 2) if any(USAGE in piece for _, piece in reads) else (None, None))


def test_records_are_written_when_they_are_added(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "deep" / "records.jsonl")
    journal.add(make_record(1))
    journal.add(make_record(0, error="gone"))
    # Not closed: what a killed process leaves behind.
    assert read_journal(tmp_path / "deep" / "records.jsonl") == [
        make_record(0, error="gone"),
        make_record(1),
    ]
    journal.close()


def test_a_truncated_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(make_record(0).model_dump_json() + "\n" + make_record(1).model_dump_json()[:40])
    assert read_journal(path) == [make_record(0)]


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_disk_is_reported_and_records_stay_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.symlink_to("/dev/full")
    journal = Journal(path)
    for index in range(3):
        journal.add(make_record(index))
    journal.close()
    assert journal.failure is not None and "No space left on device" in journal.failure
    assert [saved.index for saved in journal.records] == [0, 1, 2]


def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    journal = Journal(tmp_path / "file" / "records.jsonl")
    journal.add(make_record(0))
    journal.close()
    assert journal.failure is not None and len(journal.records) == 1
