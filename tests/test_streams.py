"""The reader of streamed answers: what servers and proxies send, and what is read of it."""

from __future__ import annotations

import json
import shutil
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.client import Client
from benchmarks.common.requests import build_body, build_content
from benchmarks.server import serve
from benchmarks.yardsticks.examples import LLAVA, draw_examples
from tests.fake_server import fake_server
from tests.json_values import json_values
from vllm_autoprune.stream import EMPTY, parse_stream

Figures = tuple[int, int, str, int | None, int | None, str | None]
"""Deltas, those of thoughts before the answer, text, prompt and completion tokens, error."""


def choice(delta: object, finish: str | None = None, **more: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish, **more}]}


def say(*texts: str, finish: str | None = None) -> list[Any]:
    return [choice({"content": text}, finish) for text in texts]


def stream(
    *events: Any, newline: str = "\n", head: str = "data: ", done: bool = True
) -> bytes:
    """Server-sent events of JSON objects and of text."""
    data = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return "".join(
        f"{head}{text}{newline * 2}" for text in [*data, *["[DONE]"] * done]
    ).encode()


ROLE = choice({"role": "assistant", "content": ""})
STOP = choice({}, "stop")
COUNTS = {"prompt_tokens": 40, "completion_tokens": 2}
USAGE = {"choices": [], "usage": COUNTS}
HI = [ROLE, *say("H", "i")]
RIGHT = (2, 0, "Hi", 40, 2, None)
UNCOUNTED = (2, 0, "Hi", None, None, None)
CUT = "the answer was cut short: the stream ended without [DONE]"
NO_STREAM = "the answer is not a stream"


def think(field: str) -> list[Any]:
    return [choice({field: "hm"}), choice({field: " so"})]


def parts(*content: object) -> list[Any]:
    return [choice({"content": list(content)})]


CALL = [{"index": 0, "function": {"name": "zoom", "arguments": "{}"}}]
ANSWER = {
    "choices": [{"message": {"role": "assistant", "content": "Hi"}}],
    "usage": COUNTS,
}
PLAIN = stream(*HI, STOP, USAGE)

STREAMS: dict[str, tuple[bytes, Figures]] = {
    # Framing.
    "named events": (
        stream(*HI, STOP, USAGE, head="event: chunk\nid: 7\nretry: 9\ndata: "),
        RIGHT,
    ),
    "a byte order mark": (b"\xef\xbb\xbf" + PLAIN, RIGHT),
    "single line ends": (PLAIN.replace(b"\n\n", b"\n"), RIGHT),
    "JSON over several lines": (
        stream(
            json.dumps(HI[1], indent=1).replace("\n", "\ndata: "), HI[2], STOP, USAGE
        ),
        RIGHT,
    ),
    "the last line end is missing": (PLAIN.rstrip(), RIGHT),
    "line separators in the text": (
        stream(*say("\u2028", "\x85\x0c"), STOP).replace(b"\\u2028", "\u2028".encode()),
        (2, 0, "\u2028\x85\x0c", None, None, None),
    ),
    "no UTF-8": (
        stream(*say("X\ud83d")).replace(b"X", b"\xff"),
        (1, 0, "\ufffd?", None, None, None),
    ),
    # The end.
    "no [DONE] after the usage": (stream(*HI, USAGE, done=False), RIGHT),
    "cut between events": (stream(*HI, done=False), (*UNCOUNTED[:5], CUT)),
    "cut in an event": (
        stream(*HI, done=False) + b'data: {"choi',
        (*UNCOUNTED[:5], CUT),
    ),
    "nothing": (b"", (0, 0, "", None, None, CUT)),
    "no token but the end": (stream(ROLE, STOP, USAGE), (0, 0, "", 40, 2, EMPTY)),
    # Thoughts.
    "thoughts of vLLM": (
        stream(ROLE, *think("reasoning"), *HI, STOP, USAGE),
        (4, 2, "Hi", 40, 2, None),
    ),
    "thoughts as parts": (
        stream(
            *parts({"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}),
            *HI,
        ),
        (3, 1, "Hi", None, None, None),
    ),
    "a thought after text": (
        stream(*say("H"), *think("reasoning"), *say("i")),
        (4, 0, "Hi", None, None, None),
    ),
    # Usage.
    "usage with the last text": (
        stream(*say("H"), {**say("i")[0], "usage": COUNTS}),
        RIGHT,
    ),
    "usage null but at the end": (
        stream(*({**e, "usage": None} for e in HI), USAGE),
        RIGHT,
    ),
    "usage as text": (
        stream(*HI, {"usage": {"prompt_tokens": "40", "completion_tokens": "2"}}),
        RIGHT,
    ),
    "usage in the choice": (stream(*HI, choice({}, "stop", usage=COUNTS)), RIGHT),
    "usage that is no number": (
        stream(
            *HI, {"usage": {"prompt_tokens": "many", "completion_tokens": float("inf")}}
        ),
        UNCOUNTED,
    ),
    # Content and choices.
    "content as parts": (
        stream(
            *parts({"type": "text", "text": "H"}), *parts("i", {"type": "image"}, None)
        ),
        UNCOUNTED,
    ),
    "delta of another kind": (
        stream(choice(None), choice("H"), choice({"content": 7}), *HI),
        UNCOUNTED,
    ),
    "two choices": (
        stream(
            {
                "choices": [
                    {"index": n, "delta": {"content": t}} for n, t in enumerate("Hx")
                ]
            },
            {"choices": [{"index": 1, "delta": {"content": "y"}}]},
            *say("i"),
        ),
        (3, 0, "Hi", None, None, None),
    ),
    "thoughts, then a tool call": (
        stream(
            *think("reasoning"), choice({"tool_calls": CALL}), choice({}, "tool_calls")
        ),
        (3, 2, "", None, None, None),
    ),
    "a refusal": (
        stream(ROLE, choice({"refusal": "No."}), STOP),
        (1, 0, "No.", None, None, None),
    ),
    "a message behind the deltas": (stream(*HI, ANSWER), RIGHT),
    # What went wrong at the server, or before it.
    "an error": (
        stream(*HI, {"error": {"message": "out of\nmemory", "code": 500}}),
        (*UNCOUNTED[:5], "out of memory"),
    ),
    "an error null": (stream(*({**e, "error": None} for e in HI)), UNCOUNTED),
    "an error of vLLM": (
        stream({"object": "error", "message": "too long", "code": 400}),
        (0, 0, "", None, None, "too long"),
    ),
    "given up": (
        stream(*HI, choice({}, "error")),
        (*UNCOUNTED[:5], "the server ended the answer: error"),
    ),
    "text for an event": (
        stream(*HI, "upstream timed out", done=False),
        (*UNCOUNTED[:5], "an event is not a JSON object: upstream timed out"),
    ),
    "JSON too deep": (
        stream("[" * 99_999),
        (0, 0, "", None, None, "an event is not a JSON"),
    ),
    "content too deep": (
        stream(
            '{"choices": [{"delta": {"content": ' + "[" * 900 + "]" * 900 + "}}]}", *HI
        ),
        UNCOUNTED,
    ),
    "a whole answer": (
        json.dumps(ANSWER, indent=1).encode(),
        (1, 0, "Hi", 40, 2, f"{NO_STREAM}, so that its first token cannot be"),
    ),
    "an error instead of a stream": (
        b'{"error": {"message": "no such model"}}',
        (0, 0, "", None, None, "no such model"),
    ),
    "a page": (
        b"<html>\n<title>Sign in</title>",
        (0, 0, "", None, None, f"{NO_STREAM}: <html> <title>Sign in</title>"),
    ),
}


def assert_read(figures: Figures, expected: Figures) -> None:
    assert figures[:5] == expected[:5]
    error = figures[5]
    wanted = expected[5]
    assert (error is None) is (wanted is None) and (error or "").startswith(
        wanted or ""
    )
    assert "\n" not in (error or "") and len(error or "") <= 200


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_read(name: str) -> None:
    """In one piece, byte by byte, and seven bytes at a time."""
    body, expected = STREAMS[name]
    for size in (len(body) or 1, 1, 7):
        reads = [(float(at), body[at : at + size]) for at in range(0, len(body), size)]
        answer = parse_stream(reads)
        assert_read(
            (len(answer.deltas), *list(answer.model_dump().values())[1:]), expected
        )
        assert all(earlier <= later for earlier, later in pairwise(answer.deltas))


def test_a_stream_is_recorded_by_the_client_once() -> None:
    """Over HTTP, whatever the answer is: a load test counts failures and sends nothing again."""
    names = ("named events", "cut in an event", "thoughts of vLLM", "nothing", "a page")
    bodies = iter([STREAMS[name][0] for name in names])
    headers = {"Content-Type": "text/event-stream", "Retry-After": "1"}
    with fake_server(
        lambda request: (200, next(bodies), headers), model=None
    ) as server:
        for name in names:
            record = Client(server.url).send(b"{}")
            counts = (record.prompt_tokens, record.completion_tokens)
            figures = (
                len(record.deltas),
                record.thoughts,
                record.text,
                *counts,
                record.error,
            )
            assert_read(figures, STREAMS[name][1])
        server.respond = lambda request: (429, b"busy", headers)
        assert Client(server.url).send(b"{}").error == "status 429: busy"
        assert len(server.requests) == len(names) + 1


@given(
    texts=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=5
    ),
    thoughts=st.integers(0, 3),
    newline=st.sampled_from(["\n", "\r\n", "\r"]),
    head=st.sampled_from(
        ["data: ", "data:", ": ping\ndata: ", "event: message\ndata: "]
    ),
    unicode=st.booleans(),
    sizes=st.lists(st.integers(0, 40), max_size=30),
)
def test_no_cut_changes_what_is_read(
    texts: list[str],
    thoughts: int,
    newline: str,
    head: str,
    unicode: bool,
    sizes: list[int],
) -> None:
    fields = ["reasoning"] * thoughts + ["content"] * len(texts)
    chunks = [
        choice({f: t}) for f, t in zip(fields, ["hm"] * thoughts + texts, strict=True)
    ]
    events = [json.dumps(chunk, ensure_ascii=unicode) for chunk in chunks]
    body = stream(*events, STOP, newline=newline, head=head.replace("\n", newline))
    places = [0, *accumulate(sizes), len(body)]
    reads = [(float(low), body[low:high]) for low, high in pairwise(places)]
    answer = parse_stream(reads)
    assert (answer.thoughts, answer.text) == (thoughts, "".join(texts)[:400])
    assert answer.prompt_tokens is answer.completion_tokens is None
    assert answer.error == (None if events else EMPTY)
    # An event arrives with the byte that ends its line.
    ends = []
    end = 0
    for event in events:
        end = body.index(event.encode(), end) + len(event.encode())
        ends.append(max(low for low, piece in reads if low <= end and piece))
    assert [*answer.deltas] == ends


EVENTS = json_values(
    "choices delta message content text type reasoning usage error index "
    "finish_reason prompt_tokens tool_calls refusal"
)


@given(events=st.lists(EVENTS | st.text(max_size=9), max_size=4), raw=st.binary())
def test_whatever_a_server_sends_is_read_or_said_in_one_line(
    events: list[str], raw: bytes
) -> None:
    body = stream(*events) + raw
    for reads in ([(0.0, body)], [(0.0, raw), (1.0, body)], [(0.0, raw)]):
        answer = parse_stream(reads)
        answer.model_dump_json().encode()
        assert answer.error is None or (
            answer.error.strip() and answer.error.isprintable()
        )
        assert 0 <= answer.thoughts <= len(answer.deltas)


@pytest.mark.engine
def test_thoughts_of_a_real_server_are_read(tmp_path: Path) -> None:
    """mini-LLaVA with a tokenizer that takes the end of its answer for that of its thoughts."""
    shutil.copytree(LLAVA, model := tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (
            (model / name)
            .read_text()
            .replace("</s>", "</think>")
            .replace("<unk>", "<think>")
        )
        (model / name).write_text(text)
    example = draw_examples("test", 1)[1]
    content = build_content(example.question, [example.png_url])
    fields = {"ignore_eos": True, "skip_special_tokens": False}
    limits = ("--enforce-eager", "--max-model-len", "1024", "--block-size", "32")
    with serve(model, *limits, "--reasoning-parser", "deepseek_r1") as server:
        bodies = [
            build_body(str(model), content, tokens=n, fields=fields) for n in (8, 1)
        ]
        record, cut = map(Client(server.url).send, bodies)
    assert record.ok and record.text.strip() and record.completion_tokens == 8
    assert 0 < record.thoughts < len(record.deltas)
    assert record.ttfat is not None and record.ttfat > record.ttft
    assert cut.ok and cut.thoughts == len(cut.deltas) == 1 and cut.ttfat is None
