"""Server-sent events, however reads happen to cut them."""

from __future__ import annotations

import json

import pytest

from benchmarks.load.stream import parse


def event(**chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def delta(**said: str) -> bytes:
    return event(choices=[{"index": 0, "delta": said}])


ROLE, A, B = delta(role="assistant", content=""), delta(content="a"), delta(content="b")
USAGE = event(
    choices=[],
    usage={
        "prompt_tokens": 9,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 4},
    },
)
DONE = b"data: [DONE]\n\n"


def test_the_chunk_that_only_names_the_role_is_no_first_token() -> None:
    found = parse([(1.0, ROLE), (2.0, A), (3.0, B), (4.0, USAGE), (5.0, DONE)])
    assert found.deltas == (2.0, 3.0) and found.text == "ab"
    assert (found.prompt_tokens, found.completion_tokens, found.cached_tokens) == (9, 2, 4)
    assert found.finished and found.error is None


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_an_event_cut_in_two_has_the_time_of_its_last_byte(cut: int) -> None:
    assert parse([(1.0, A[:cut]), (2.0, A[cut:])]).deltas == (2.0,)


def test_two_events_in_one_read_have_one_time() -> None:
    assert parse([(1.0, ROLE + A + B), (2.0, USAGE + DONE)]).deltas == (1.0, 1.0)


def test_line_ends_of_windows_and_comments_are_understood() -> None:
    found = parse([(1.0, b": ping\r\n\r\n" + A.replace(b"\n", b"\r\n"))])
    assert found.deltas == (1.0,) and found.text == "a"


def test_a_stream_without_its_end_or_usage_says_so() -> None:
    found = parse([(1.0, A)])
    assert not found.finished and found.completion_tokens is None


def test_errors_in_the_stream_are_told() -> None:
    assert parse([(1.0, event(error={"message": "engine is dead"}))]).error == "engine is dead"
    assert "not JSON" in (parse([(1.0, b"data: {oops\n\n")]).error or "")
    assert "no object" in (parse([(1.0, b"data: [1]\n\n")]).error or "")
