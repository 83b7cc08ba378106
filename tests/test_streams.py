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
from benchmarks.common.fake_server import fake_server
from benchmarks.common.requests import build_body, build_content
from benchmarks.server import serve
from benchmarks.yardsticks.examples import LLAVA, draw_examples, png_url
from vllm_autoprune.stream import EMPTY, parse_stream, read_message

Figures = tuple[int, int, str, int | None, int | None, str | None]
"""Deltas, those of thoughts before the answer, text, prompt and completion tokens, error."""


def choice(delta: object, finish: str | None = None, **more: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish, **more}]}


def say(*texts: str, finish: str | None = None) -> list[Any]:
    return [choice({"content": text}, finish) for text in texts]


def stream(*events: Any, newline: str = "\n", head: str = "data: ", done: bool = True) -> bytes:
    """Server-sent events of JSON objects and of text."""
    data = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return "".join(f"{head}{text}{newline * 2}" for text in [*data, *["[DONE]"] * done]).encode()


ROLE = choice({"role": "assistant", "content": ""})
STOP, LENGTH = choice({}, "stop"), choice({}, "length")
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
ANSWER = {"choices": [{"message": {"role": "assistant", "content": "Hi"}}], "usage": COUNTS}
PLAIN = stream(*HI, STOP, USAGE)

STREAMS: dict[str, tuple[bytes, Figures]] = {
    "plain": (PLAIN, RIGHT),
    # Framing.
    "CRLF": (stream(*HI, STOP, USAGE, newline="\r\n"), RIGHT),
    "CR": (stream(*HI, STOP, USAGE, newline="\r"), RIGHT),
    "no space": (stream(*HI, STOP, USAGE, head="data:"), RIGHT),
    "named events": (stream(*HI, STOP, USAGE, head="event: chunk\nid: 7\nretry: 9\ndata: "), RIGHT),
    "comments": (stream(*HI, STOP, USAGE, head=": WAITING\n\ndata: "), RIGHT),
    "comments without an empty line": (stream(*HI, STOP, USAGE, head=":\ndata: "), RIGHT),
    "a byte order mark": (b"\xef\xbb\xbf" + PLAIN, RIGHT),
    "single line ends": (PLAIN.replace(b"\n\n", b"\n"), RIGHT),
    "JSON over several lines": (
        stream(json.dumps(HI[1], indent=1).replace("\n", "\ndata: "), HI[2], STOP, USAGE),
        RIGHT,
    ),
    "a lone line of data": (b"data\n\n" + PLAIN, RIGHT),
    "empty events": (stream(*HI, "", STOP, " ", USAGE), RIGHT),
    "the last line end is missing": (PLAIN.rstrip(), RIGHT),
    "line separators in the text": (
        stream(*say("\u2028", "\x85\x0c"), STOP).replace(b"\\u2028", "\u2028".encode()),
        (2, 0, "\u2028\x85\x0c", None, None, None),
    ),
    "half a surrogate pair": (stream(*say("a\ud83d")), (1, 0, "a?", None, None, None)),
    "no UTF-8": (stream(*say("X")).replace(b"X", b"\xff"), (1, 0, "\ufffd", None, None, None)),
    # The end.
    "no [DONE] after a reason to finish": (stream(*HI, STOP, done=False), UNCOUNTED),
    "no [DONE] after the usage": (stream(*HI, USAGE, done=False), RIGHT),
    "a reason with the last text": (stream(ROLE, *say("Hi", finish="length"), done=False),
                                    (1, 0, "Hi", None, None, None)),
    "[DONE] with spaces": (stream(*HI, "[DONE] ", done=False), UNCOUNTED),
    "cut between events": (stream(*HI, done=False), (*UNCOUNTED[:5], CUT)),
    "cut in an event": (stream(*HI, done=False) + b'data: {"choi', (*UNCOUNTED[:5], CUT)),
    "cut in the first event": (b'data: {"choi', (0, 0, "", None, None, CUT)),
    "nothing": (b"", (0, 0, "", None, None, CUT)),
    "comments alone": (b": ping\n\n: ping\n\n", (0, 0, "", None, None, CUT)),
    "[DONE] alone": (stream(), (0, 0, "", None, None, EMPTY)),
    "no token but the end": (stream(ROLE, STOP, USAGE), (0, 0, "", 40, 2, EMPTY)),
    # Thoughts.
    "thoughts of vLLM": (stream(ROLE, *think("reasoning"), *HI, STOP, USAGE),
                         (4, 2, "Hi", 40, 2, None)),
    "thoughts of others": (stream(*think("reasoning_content"), *HI, STOP, USAGE),
                           (4, 2, "Hi", 40, 2, None)),
    "thoughts in both fields": (
        stream(choice({"reasoning": "hm", "reasoning_content": "hm"}), *HI),
        (3, 1, "Hi", None, None, None),
    ),
    "thoughts alone": (stream(ROLE, *think("reasoning"), LENGTH, USAGE), (2, 2, "", 40, 2, None)),
    "thoughts as parts": (
        stream(*parts({"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}), *HI),
        (3, 1, "Hi", None, None, None),
    ),
    "a thought and text at once": (stream(choice({"reasoning": "hm", "content": "H"}), *say("i")),
                                   UNCOUNTED),
    "a thought after text": (stream(*say("H"), *think("reasoning"), *say("i")),
                             (4, 0, "Hi", None, None, None)),
    "empty thoughts": (stream(choice({"reasoning": "", "content": None}), *HI), UNCOUNTED),
    "thoughts null": (stream(*say("H", "i"), choice({"reasoning": None})), UNCOUNTED),
    # Usage.
    "usage with the last text": (stream(*say("H"), {**say("i")[0], "usage": COUNTS}), RIGHT),
    "usage in every chunk": (
        stream(*({**event, "usage": {"prompt_tokens": 40, "completion_tokens": n}}
                 for n, event in enumerate(HI))),
        RIGHT,
    ),
    "usage before the text": (stream({"choices": [], "usage": COUNTS}, *HI), RIGHT),
    "usage null but at the end": (stream(*({**e, "usage": None} for e in HI), USAGE), RIGHT),
    "usage null at the end": (stream(USAGE, *HI, {"choices": [], "usage": None}), RIGHT),
    "usage as text": (stream(*HI, {"usage": {"prompt_tokens": "40", "completion_tokens": "2"}}),
                      RIGHT),
    "usage as fractions": (stream(*HI, {"usage": {n: float(c) for n, c in COUNTS.items()}}), RIGHT),
    "usage in the choice": (stream(*HI, choice({}, "stop", usage=COUNTS)), RIGHT),
    "usage without a count": (stream(*HI, {"usage": {"prompt_tokens": 40}}),
                              (2, 0, "Hi", 40, None, None)),
    "usage of other things": (
        stream(*HI, {"usage": {"prompt_tokens": None, "completion_tokens": {"text": 2}}}),
        UNCOUNTED,
    ),
    "usage that is no number": (stream(*HI, {"usage": {"prompt_tokens": "many"}}), UNCOUNTED),
    "usage that is not finite": (stream(*HI, {"usage": {"prompt_tokens": float("inf"),
                                                        "completion_tokens": float("nan")}}),
                                 UNCOUNTED),
    "usage as a word": (stream(*HI, {"choices": [], "usage": "2"}), UNCOUNTED),
    "no usage": (stream(*HI, STOP), UNCOUNTED),
    # Content and choices.
    "content null": (stream(choice({"role": "assistant", "content": None}), *say("H", "i")),
                     UNCOUNTED),
    "content as parts": (
        stream(*parts({"type": "text", "text": "H"}), *parts("i", {"type": "image"}, None)),
        UNCOUNTED,
    ),
    "content as one part": (stream(choice({"content": {"text": "Hi"}})),
                            (1, 0, "Hi", None, None, None)),
    "content as a number": (stream(choice({"content": 7}), *HI), UNCOUNTED),
    "delta missing": (stream({"choices": [{"index": 0}]}, *HI), UNCOUNTED),
    "delta null": (stream(choice(None), *HI), UNCOUNTED),
    "delta as text": (stream(choice("H"), *HI), UNCOUNTED),
    "choices null": (stream({"choices": None}, *HI, {"choices": None, "usage": COUNTS}), RIGHT),
    "choices empty": (stream({"choices": [], "prompt_filter_results": []}, *HI), UNCOUNTED),
    "choices of other things": (stream({"choices": 3}, {"choices": [None, 4]}, *HI), UNCOUNTED),
    "two choices": (
        stream({"choices": [{"index": n, "delta": {"content": t}} for n, t in enumerate("Hx")]},
               {"choices": [{"index": 1, "delta": {"content": "y"}}]}, *say("i")),
        (3, 0, "Hi", None, None, None),
    ),
    "a tool call": (stream(ROLE, choice({"tool_calls": CALL}), choice({}, "tool_calls"), USAGE),
                    (1, 0, "", 40, 2, None)),
    "thoughts, then a tool call": (
        stream(*think("reasoning"), choice({"tool_calls": CALL}), choice({}, "tool_calls")),
        (3, 2, "", None, None, None),
    ),
    "no tool called": (stream(choice({"tool_calls": []}), *HI), UNCOUNTED),
    "a refusal": (stream(ROLE, choice({"refusal": "No."}), STOP), (1, 0, "No.", None, None, None)),
    "a message in the stream": (stream({"choices": [{"message": {"content": "Hi"}}]}, USAGE),
                                (1, 0, "Hi", 40, 2, None)),
    "a message behind the deltas": (stream(*HI, ANSWER), RIGHT),
    # What went wrong at the server, or before it.
    "an error": (stream(*HI, {"error": {"message": "out of\nmemory", "code": 500}}),
                 (*UNCOUNTED[:5], "out of memory")),
    "an error as text": (stream({"error": "overloaded"}, done=False),
                         (0, 0, "", None, None, "overloaded")),
    "an error without a message": (stream({"error": {"code": 9}}),
                                   (0, 0, "", None, None, "{'code': 9}")),
    "an error's message null": (stream({"error": {"message": None, "code": 9}}),
                                (0, 0, "", None, None, "{'message': None, 'code': 9}")),
    "an error null": (stream(*({**e, "error": None} for e in HI)), UNCOUNTED),
    "an error of vLLM": (stream({"object": "error", "message": "too long", "code": 400}),
                         (0, 0, "", None, None, "too long")),
    "an error of FastAPI": (stream({"detail": "Not Found"}), (0, 0, "", None, None, "Not Found")),
    "two errors": (stream({"error": "A"}, {"error": "B"}), (0, 0, "", None, None, "A")),
    "an error with control characters": (stream({"error": "\ud83da\x1b[2Jb\0\u2028c"}),
                                         (0, 0, "", None, None, "a [2Jb c")),
    "an error of spaces": (stream({"error": " "}),
                           (0, 0, "", None, None, "an error without text")),
    "given up": (stream(*HI, choice({}, "error")),
                 (*UNCOUNTED[:5], "the server ended the answer: error")),
    "text for an event": (stream(*HI, "upstream timed out", done=False),
                          (*UNCOUNTED[:5], "an event is not a JSON object: upstream timed out")),
    "a list for an event": (stream("[1]"),
                            (0, 0, "", None, None, "an event is not a JSON object: [1]")),
    "JSON too deep": (stream("[" * 99_999), (0, 0, "", None, None, "an event is not a JSON")),
    "a number too long": (stream('{"created": ' + "9" * 9999 + "}"),
                          (0, 0, "", None, None, "an event is not a JSON object")),
    "content too deep": (stream('{"choices": [{"delta": {"content": ' + "[" * 900 + "]" * 900
                                + "}}]}", *HI), UNCOUNTED),
    "text behind the stream": (stream(*HI, done=False) + b"upstream timed out\n",
                               (*UNCOUNTED[:5], f"{CUT}, after: upstream timed out")),
    "a whole answer": (json.dumps(ANSWER).encode(),
                       (1, 0, "Hi", 40, 2, f"{NO_STREAM}, so that its first token cannot be")),
    "a whole answer in lines": (json.dumps(ANSWER, indent=1).encode(),
                                (1, 0, "Hi", 40, 2, NO_STREAM)),
    "an error instead of a stream": (b'{"error": {"message": "no such model"}}',
                                     (0, 0, "", None, None, "no such model")),
    "a page": (b"<html>\n<title>Sign in</title>", (0, 0, "", None, None,
               f"{NO_STREAM}: <html> <title>Sign in</title>")),
    "compressed": (b"\x1f\x8b\x08\x00\xff\xfe", (0, 0, "", None, None, NO_STREAM)),
}  # fmt: skip


def assert_read(figures: Figures, expected: Figures) -> None:
    assert figures[:5] == expected[:5]
    error, wanted = figures[5], expected[5]
    assert (error is None) is (wanted is None) and (error or "").startswith(wanted or "")
    assert "\n" not in (error or "") and len(error or "") <= 200


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_read(name: str) -> None:
    """In one piece, byte by byte, and seven bytes at a time."""
    body, expected = STREAMS[name]
    for size in (len(body) or 1, 1, 7):
        reads = [(float(at), body[at : at + size]) for at in range(0, len(body), size)]
        answer = parse_stream(reads)
        assert_read((len(answer.deltas), *answer[1:]), expected)
        assert all(earlier <= later for earlier, later in pairwise(answer.deltas))


def test_every_stream_is_recorded_by_the_client_once() -> None:
    """Over HTTP, whatever the answer is: a load test counts failures and sends nothing again."""
    bodies = iter([body for body, _ in STREAMS.values()])
    headers = {"Content-Type": "text/event-stream", "Retry-After": "1"}
    with fake_server(lambda request: (200, next(bodies), headers), model=None) as server:
        for _, expected in STREAMS.values():
            record = Client(server.url).send(b"{}")
            counts = (record.prompt_tokens, record.completion_tokens)
            figures = (len(record.deltas), record.thoughts, record.text, *counts, record.error)
            assert_read(figures, expected)
            record.model_dump_json()
        assert len(server.requests) == len(STREAMS)
        server.respond = lambda request: (429, b"busy", headers)
        assert Client(server.url).send(b"{}").error == "status 429: busy"
        assert len(server.requests) == len(STREAMS) + 1


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=5),
    thoughts=st.integers(0, 3),
    newline=st.sampled_from(["\n", "\r\n", "\r"]),
    head=st.sampled_from(["data: ", "data:", ": ping\ndata: ", "event: message\ndata: "]),
    unicode=st.booleans(),
    sizes=st.lists(st.integers(0, 40), max_size=30),
)
def test_no_cut_changes_what_is_read(
    texts: list[str], thoughts: int, newline: str, head: str, unicode: bool, sizes: list[int]
) -> None:
    fields = ["reasoning"] * thoughts + ["content"] * len(texts)
    chunks = [choice({f: t}) for f, t in zip(fields, ["hm"] * thoughts + texts, strict=True)]
    events = [json.dumps(chunk, ensure_ascii=unicode) for chunk in chunks]
    body = stream(*events, STOP, newline=newline, head=head.replace("\n", newline))
    places = [0, *accumulate(sizes), len(body)]
    reads = [(float(low), body[low:high]) for low, high in pairwise(places)]
    answer = parse_stream(reads)
    assert answer[1:] == (thoughts, "".join(texts)[:400], None, None, answer.error)
    assert answer.error == (None if events else EMPTY)
    # An event arrives with the byte that ends its line.
    ends, end = [], 0
    for event in events:
        end = body.index(event.encode(), end) + len(event.encode())
        ends.append(max(low for low, piece in reads if low <= end and piece))
    assert [*answer.deltas] == ends


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=3),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["choices", "delta", "message", "content", "text", "type", "reasoning", "usage",
             "error", "index", "finish_reason", "prompt_tokens", "tool_calls", "refusal"]
        ),
        inner,
        max_size=4,
    ),
)  # fmt: skip


@given(events=st.lists(JSON.map(json.dumps) | st.text(max_size=9), max_size=4), raw=st.binary())
def test_whatever_a_server_sends_is_read_or_said_in_one_line(events: list[str], raw: bytes) -> None:
    body = stream(*events) + raw
    for reads in ([(0.0, body)], [(0.0, raw), (1.0, body)], [(0.0, raw)]):
        answer = parse_stream(reads)
        json.dumps(answer._asdict()).encode()
        assert answer.error is None or (answer.error.strip() and answer.error.isprintable())
        assert 0 <= answer.thoughts <= len(answer.deltas)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": "yes", "reasoning": "hm"}, ("yes", "hm")),
        ({"content": None, "reasoning_content": "hm"}, ("", "hm")),
        ({"content": [{"type": "reasoning", "text": "hm"}, "y", {"text": "es"}]}, ("yes", "hm")),
        ({"content": "", "refusal": "No."}, ("No.", "")),
        ({"reasoning": {"text": "hm"}, "content": [None, 3]}, ("", "hm")),
        ({}, ("", "")),
    ],
)
def test_an_answer_and_its_thoughts_are_told_apart(
    message: dict[str, object], expected: tuple[str, str]
) -> None:
    assert read_message(message) == expected


@pytest.mark.engine
@pytest.mark.timeout(500)
def test_thoughts_of_a_real_server_are_read(tmp_path: Path) -> None:
    """mini-LLaVA with a tokenizer that takes the end of its answer for that of its thoughts."""
    shutil.copytree(LLAVA, model := tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (model / name).read_text().replace("</s>", "</think>").replace("<unk>", "<think>")
        (model / name).write_text(text)
    example = draw_examples("test", 1)[1]
    content = build_content(example.question, [png_url(example.image)])
    fields = {"ignore_eos": True, "skip_special_tokens": False}
    limits = ("--enforce-eager", "--max-model-len", "1024", "--block-size", "32")
    with serve(model, *limits, "--reasoning-parser", "deepseek_r1") as server:
        bodies = [build_body(str(model), content, tokens=n, fields=fields) for n in (8, 1)]
        record, cut = map(Client(server.url).send, bodies)
    assert record.ok and record.text.strip() and record.completion_tokens == 8
    assert 0 < record.thoughts < len(record.deltas)
    assert record.ttfat is not None and record.ttfat > record.ttft
    assert cut.ok and cut.thoughts == len(cut.deltas) == 1 and cut.ttfat is None
