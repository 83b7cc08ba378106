from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tpdsl.samples import edited, refused, sample, state
from vllm_autoprune import load_state
from vllm_autoprune.tpdsl.json_text import MAX_BYTES, MAX_DEPTH, MAX_VALUES


def in_file(tmp_path: Path, content: bytes) -> list[tuple[str, str]]:
    file = tmp_path / "s.json"
    file.write_bytes(content)
    return refused(file)


def test_not_utf8(tmp_path: Path) -> None:
    content = json.dumps(sample()).encode().replace(b"sample", b"s\xfcmple", 1)
    ((where, what),) = in_file(tmp_path, content)
    assert where == "" and what.startswith("not UTF-8 text (invalid start byte at byte ")


@pytest.mark.parametrize(
    "encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]
)
def test_wide_encodings_are_recognised(tmp_path: Path, encoding: str) -> None:
    actual = in_file(tmp_path, json.dumps(sample()).encode(encoding))
    assert actual == [("", "not UTF-8 text (it looks like UTF-16 or UTF-32)")]


def test_a_byte_order_mark(tmp_path: Path) -> None:
    text = json.dumps(sample())
    expected = [("", "begins with a byte order mark")]
    assert in_file(tmp_path, text.encode("utf-8-sig")) == expected
    assert refused(f"\ufeff{text}") == expected


def test_too_large(tmp_path: Path) -> None:
    content = json.dumps(sample()).encode()
    just = content + b" " * (MAX_BYTES - len(content))
    (tmp_path / "just.json").write_bytes(just)
    assert load_state(tmp_path / "just.json").name == "sample"
    assert load_state(just.decode()).name == "sample"
    assert in_file(tmp_path, just + b" ") == [("", "larger than 1048576 bytes")]
    assert refused(just.decode() + " ") == [("", "larger than 1048576 bytes")]


def test_a_text_is_measured_in_bytes() -> None:
    long = edited(sample(), {"/provenance": {"notes": "\U0001f999" * (MAX_BYTES // 4)}})
    text = json.dumps(long, ensure_ascii=False)
    assert len(text) < MAX_BYTES
    assert refused(text) == [("", "larger than 1048576 bytes")]


def test_too_large_in_canonical_form() -> None:
    # Lists deep in lists, each on its own indented line, take more to write than they hold.
    deep = json.loads("[" * 27 + ",".join(["[]"] * 4000) + "]" * 27)
    long = edited(sample(), {"/provenance": {"scores": {"x": deep}, "notes": "x" * 900_000}})
    ((where, what),) = refused(json.dumps(long))
    assert where == "" and what.startswith("larger than 1048576 bytes when written out")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("schema: autoprune", "not JSON: Expecting value at line 1 col 1"),
        ("[]", "a state is a JSON object, not []"),
        ("null", "a state is a JSON object, not null"),
        ('"{}"', 'a state is a JSON object, not "{}"'),
        ("NaN", "NaN is not a JSON number"),
        ("-1e999", "-1e999 is larger than any 64-bit float"),
        ("7", "a state is a JSON object, not 7"),
        ('{"schema": 1,}', "not JSON: "),
        ('{"schema": 1} {}', "not JSON: Extra data at line 1 col 15"),
        ("{'a': 1}", "not JSON: "),
        ('{"a": 1} // so', "not JSON: "),
        ('{"a": 01}', "not JSON: "),
        ('{"a": "\n"}', "not JSON: "),
        ('{"a": "\0"}', "not JSON: "),
        ("\0\1\2\3", "not UTF-8 text (it looks like UTF-16 or UTF-32)"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply: 100001 levels"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply: 100000 levels"),
        ("[" * MAX_BYTES, "nested too deeply: 1048576 levels"),
        ('{"a": [' + "0," * 500_000 + "0]}", "about 500003 values"),
    ],
    ids=lambda value: value[:24],
)
def test_texts_that_are_not_one_json_object(tmp_path: Path, content: str, what: str) -> None:
    actual = in_file(tmp_path, content.encode())
    assert actual[0][0] == "" and actual[0][1].startswith(what)
    if content.startswith("{"):
        assert refused(content) == actual


def test_limits_on_depth_and_count_are_inclusive() -> None:
    deep = json.loads("[" * (MAX_DEPTH - 3) + "]" * (MAX_DEPTH - 3))
    many = [0] * (MAX_VALUES - 200)
    changed = edited(sample(), {"/provenance": {"scores": {"deep": deep, "many": many}}})
    assert load_state(json.dumps(changed)).provenance.scores["deep"] == deep
    changed["provenance"]["scores"]["deep"] = [deep]
    assert refused(json.dumps(changed))[0][1].startswith("nested too deeply: 33 levels")


def test_brackets_and_commas_in_strings_are_not_counted() -> None:
    odd = '[{,\\"' * 20_000
    changed = edited(sample(), {"/provenance": {"notes": odd, "scores": {odd: "\\"}}})
    assert load_state(json.dumps(changed)).provenance.notes == odd


def test_numbers_beyond_float_range_are_reported_at_their_pointers() -> None:
    changed = edited(
        sample(),
        {
            "/reassembly/strength": 10**310,
            "/provenance": {"scores": {"a/b": [float("nan"), 123454321]}, "seed": 543212345},
            "/scoring/signals/0/weight": float("-inf"),
        },
    )
    text = json.dumps(changed).replace("123454321", "-1e400").replace("543212345", "9" * 5000)
    assert refused(text) == [
        ("/scoring/signals/0/weight", "-Infinity is not a JSON number"),
        ("/reassembly/strength", "10000000000000000... is larger than any 64-bit float"),
        ("/provenance/scores/a~1b/0", "NaN is not a JSON number"),
        ("/provenance/scores/a~1b/1", "-1e400 is larger than any 64-bit float"),
        ("/provenance/seed", "99999999999999999... is larger than any 64-bit float"),
    ]


def test_duplicate_keys_are_reported_with_all_other_problems() -> None:
    text = json.dumps(edited(sample(), {"/reassembly/strength": 7}))
    text = text.replace('"scoring": {', '"name": "n", "scoring": {"kernel": 1, "kernel": 2, ')
    assert refused(text) == [
        ("/name", 'key "name" occurs twice in one object'),
        ("/scoring/kernel", 'key "kernel" occurs twice in one object'),
        ("/reassembly/strength", "7 is refused"),
    ]


@pytest.mark.parametrize("escaped", [True, False])
def test_lone_surrogates_are_refused(escaped: bool) -> None:
    changed = edited(
        sample(),
        {"/name": "\ud800", "/provenance": {"scores": {"\udfff": 1, "ok": ["\udc00x"]}}},
    )
    assert refused(json.dumps(changed, ensure_ascii=escaped)) == [
        ("/name", r'"\ud800" holds half of a surrogate pair'),
        (r"/provenance/scores/\udfff", r'key "\udfff" holds half of a surrogate pair'),
        ("/provenance/scores/ok/0", r'"\udc00x" holds half of a surrogate pair'),
    ]
    assert load_state(json.dumps(edited(sample(), {"/name": "\U0001f999"}))).name == "\U0001f999"


@pytest.mark.parametrize("whole", ["2.0", "2e0", "0.2e1", "200E-2"])
def test_a_whole_number_is_one_however_it_is_written(whole: str) -> None:
    text = json.dumps(sample()).replace('"q_e": 2', f'"q_e": {whole}')
    assert whole in text and load_state(text) == state()


def test_minus_zero_is_zero() -> None:
    text = json.dumps(sample()).replace('"strength": 0.0', '"strength": -0.0')
    assert "-0.0" in text and load_state(text).digest == state().digest
