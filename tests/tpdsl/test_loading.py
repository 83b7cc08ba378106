"""Loading of states: files, texts, mappings, limits and rules."""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.tpdsl.samples import (
    DELETE,
    Changes,
    edited,
    refused,
    refused_with,
    sample,
    shipped,
    state,
)
from vllm_autoprune import PruningState, StateError, load_state
from vllm_autoprune.tpdsl.loading import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_PROBLEMS,
    MAX_VALUES,
    RULES,
)


def broken(source: str | Path | dict[str, object]) -> list[tuple[str, str]]:
    """Place and kind of each problem of a refused state."""
    with pytest.raises(StateError) as raised:
        load_state(source)
    return [(problem.where, problem.kind) for problem in raised.value.problems]


def test_a_file_a_text_and_a_name_are_the_same_state(tmp_path: Path) -> None:
    text = json.dumps(shipped("autoprune"))
    file = tmp_path / "s.json"
    file.write_text(text, encoding="utf-8")
    assert load_state(file) == load_state(str(file)) == load_state("\n  " + text)
    assert load_state("autoprune") == load_state(file)


@pytest.mark.parametrize(
    "changes",
    [
        {"/budget": 7, "/schema": "autoprune-state/2"},
        {"/scoring/signals/0/atom": "no_such_atom", "/extra": 1},
        {"/constraints/selector/q_e": 2.0, "/scoring/signals/0/weight": float("inf")},
        {"/scoring/signals/0/weight": float("nan"), "/provenance": {"scores": {"a": 10**400}}},
        {"/name": "\ud800", "/provenance": {"scores": {"\udfff": "\ud800"}}},
        {"/budget": {"atom": "fixed_budget@32", "limit": 16}},
    ],
)
def test_a_mapping_is_refused_as_its_text_is(changes: Changes) -> None:
    data = edited(sample(), changes)
    assert broken(data) == broken(json.dumps(data))


def nested(levels: int) -> object:
    value: object = {}
    for _ in range(levels):
        value = {"a": value}
    return value


CYCLE: dict[str, object] = {}
CYCLE["a"] = CYCLE


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({1, 2}, "syntax"),
        (b"x", "syntax"),
        pytest.param(10**5000, "syntax", id="long"),
        pytest.param(nested(100_000), "depth", id="deep"),
        pytest.param(CYCLE, "syntax", id="cycle"),
        pytest.param([0] * MAX_VALUES, "values", id="many"),
        pytest.param("x" * MAX_BYTES, "size", id="large"),
    ],
)
def test_a_mapping_that_no_text_of_a_state_holds(value: object, kind: str) -> None:
    assert broken({**sample(), "provenance": {"scores": {"a": value}}}) == [("", kind)]


def test_a_file_goes_before_a_shipped_state_and_a_folder_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("autoprune").mkdir()
    assert load_state("autoprune").name == "autoprune"
    Path("autoprune").rmdir()
    Path("autoprune").write_text(json.dumps(edited(sample(), {"/name": "mine"})))
    assert load_state("autoprune").name == "mine"


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(StateError, match="did you mean 'autoprune'") as raised:
        load_state("autoprun")
    (problem,) = raised.value.problems
    assert problem.what == "no such file, and no shipped state of that name"


LONG = "x" * 5000
ABSENT = "no such file, and no shipped state of that name"
URLS = ("https://example.com/state.json", "file:///etc/hostname", "s3://bucket/state.json")


@pytest.mark.parametrize(
    ("source", "what"),
    [
        *((source, ABSENT) for source in ("\0", "\ud800", "missing.json", Path("nowhere"), *URLS)),
        (LONG, "cannot be read (File name too long)"),
        # Text that is not a JSON object is treated as a name.
        (json.dumps([0] * 3000), "cannot be read (File name too long)"),
        *((device, "is no regular file") for device in ("/dev/zero", "/dev/null", "/dev/random")),
    ],
    ids=lambda value: str(value)[:20].encode("unicode_escape").decode(),
)
def test_names_of_nothing_and_of_devices_are_not_opened(
    source: str | Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: object, **__: object) -> NoReturn:
        pytest.fail("something was opened")

    for module, name in ((os, "open"), (socket, "socket"), (socket, "create_connection")):
        monkeypatch.setattr(module, name, opened)
    assert refused(source) == [("", what)]


def test_a_folder_a_pipe_and_a_circle_of_links(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe.json", tmp_path / "link.json"
    os.mkfifo(pipe)
    link.symlink_to(link.name)
    assert refused(tmp_path) == [("", "is a folder")]
    assert refused(pipe) == [("", "is no regular file")]
    assert refused(link) == [("", "cannot be read (Too many levels of symbolic links)")]


def test_a_file_that_changes_or_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, opened = tmp_path / "s.json", os.open
    file.write_text("{}")

    def denied(*_: object, **__: object) -> NoReturn:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    assert refused(file) == [("", "cannot be read (Permission denied)")]

    def swapped(path: Path, flags: int) -> int:
        file.unlink()
        os.mkfifo(file)
        return opened(path, flags)

    monkeypatch.setattr(os, "open", swapped)
    assert refused(file) == [("", "is no regular file")]


def test_file_with_a_wrong_reported_size() -> None:
    # It reports size 0 and has no end, like a file that grows.
    assert os.stat("/proc/self/maps").st_size == 0
    ((where, what),) = refused("/proc/self/maps")
    assert where == "" and what.startswith("not JSON")


@pytest.mark.parametrize(
    ("version", "shown"),
    [
        (DELETE, "missing"),
        (None, "missing"),
        ("autoprune-state/2", '"autoprune-state/2" is not known'),
        (1, "1 is not known"),
        ([], r"[] is not known"),
    ],
)
def test_other_schema_version_is_refused(version: object, shown: str) -> None:
    # Other fields are not validated, because they may be valid in another version.
    actual = refused_with({"/schema": version, "/budget": 7, "/zzz": 1})
    assert actual == [
        ("/schema", f"schema version {shown}; this version reads 'autoprune-state/1'")
    ]


def in_file(tmp_path: Path, content: bytes) -> list[tuple[str, str]]:
    file = tmp_path / "s.json"
    file.write_bytes(content)
    return refused(file)


ENCODED = {
    "broken": (
        json.dumps(sample()).encode().replace(b"sample", b"s\xfcmple", 1),
        "not UTF-8 text (invalid"),
    "mark": (json.dumps(sample()).encode("utf-8-sig"), "begins with a byte order mark"),
    **{
        name: (json.dumps(sample()).encode(name), "not UTF-8 text (it looks like UTF-16 or UTF-32)")
        for name in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")
    },
}  # fmt: skip


@pytest.mark.parametrize("encoding", ENCODED)
def test_other_encodings_than_utf_8_are_named(tmp_path: Path, encoding: str) -> None:
    content, expected = ENCODED[encoding]
    ((where, what),) = in_file(tmp_path, content)
    assert where == "" and what.startswith(expected)


def test_at_most_a_megabyte_as_read_and_as_written_out(tmp_path: Path) -> None:
    content = json.dumps(sample()).encode()
    just = content + b" " * (MAX_BYTES - len(content))
    (tmp_path / "just.json").write_bytes(just)
    assert load_state(tmp_path / "just.json") == load_state(just.decode()) == state()
    larger = [("", "larger than 1048576 bytes")]
    assert in_file(tmp_path, just + b" ") == refused(just.decode() + " ") == larger
    # A text is measured in bytes.
    long = edited(sample(), {"/provenance": {"notes": "\U0001f999" * (MAX_BYTES // 4)}})
    assert refused(json.dumps(long, ensure_ascii=False)) == larger
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


@pytest.mark.parametrize(
    ("field", "written"),
    [("q_e", "2.0"), ("q_e", "2e0"), ("q_e", "0.2e1"), ("q_e", "200E-2"), ("strength", "-0.0")],
)
def test_a_number_is_one_however_it_is_written(field: str, written: str) -> None:
    text = re.sub(rf'"{field}": [0-9.]+', f'"{field}": {written}', json.dumps(sample()))
    assert f'"{field}": {written}' in text
    assert load_state(text) == load_state(json.loads(text)) == state()
    assert load_state(text).digest == state().digest


HOSTILE = {
    "unknown fields": "{" + ",".join(f'"a{i}":0' for i in range(MAX_VALUES - 9)) + "}",
    "unknown atoms": json.dumps(
        edited(sample(), {"/safety": [f"{i}preserve_bugdet" for i in range(MAX_VALUES - 99)]})
    ),
    "unknown signals": json.dumps(
        edited(sample(), {"/scoring/signals": [{"atom": f"{i}_proxy"} for i in range(3000)]})
    ),
    "keys that occur twice": "{" + '"a":0,' * (MAX_VALUES - 9) + '"b":1}',
    "a long name": json.dumps(edited(sample(), {"/reassembly/atom": "mean_residual" * 80_000})),
    "a long key": json.dumps(edited(sample(), {"/reassembly/" + "strength" * 100_000: 1})),
    "a long list": json.dumps(edited(sample(), {"/reassembly": list(range(9000))})),
    "a long number": json.dumps(sample()).replace('"q_e": 2', '"q_e": ' + "7" * 1_000_000),
    "a long fraction": json.dumps(sample()).replace('"q_e": 2', '"q_e": 0.' + "7" * 1_000_000),
    "quotes": '{"' * 500_000,
    "backslashes": '{"' + "\\" * 1_000_000,
    "pairs of brackets": '{"a": [' + "[]," * 340_000 + "[]]}",
    "objects in objects": '{"a":' * 200_000,
    "too much": "{" + " " * (2 * MAX_BYTES) + "}",
}


@pytest.mark.parametrize("text", [pytest.param(t, id=name) for name, t in HOSTILE.items()])
def test_it_costs_less_than_a_second_and_little_memory(text: str) -> None:
    text = text.replace('{"a0"', '{"schema":"autoprune-state/1","a0"')
    # A busy host and garbage of other tests only ever add time: one quick attempt of five will do.
    assert any(_seconds(text) < 1.0 for _ in range(5))
    with pytest.raises(StateError) as raised:
        load_state(text)
    assert len(raised.value.problems) <= MAX_PROBLEMS + 1 and len(str(raised.value)) < 32_000
    assert str(raised.value).replace("\n", "").isprintable()
    tracemalloc.start()
    try:
        refused(text)
        assert tracemalloc.get_traced_memory()[1] < 48 * MAX_BYTES
    finally:
        tracemalloc.stop()


def _seconds(text: str) -> float:
    """Processor time of this thread to refuse ``text``, without garbage collection."""
    gc.collect()
    gc.disable()
    begun = time.thread_time()
    try:
        refused(text)
        return time.thread_time() - begun
    finally:
        gc.enable()


def test_omitted_problems_are_counted() -> None:
    actual = refused_with({f"/extra{i}": 0 for i in range(1000)})
    assert len(actual) == MAX_PROBLEMS + 1
    assert actual[-1] == ("", f"{1000 - MAX_PROBLEMS} more problem(s)")


def test_control_characters_are_not_repeated() -> None:
    bad = "\x1b[2J\nstate ok: 0 problem(s)\u202e"
    with pytest.raises(StateError) as raised:
        load_state(json.dumps(edited(sample(), {"/reassembly/atom": bad, f"/{bad}": bad})))
    assert len(str(raised.value).splitlines()) == 1 + len(raised.value.problems) == 3
    assert str(raised.value).replace("\n", "").isprintable()
    with pytest.raises(StateError) as raised:
        load_state(bad)
    assert len(str(raised.value).splitlines()) == 2


ACCEPTS = jsonschema.Draft202012Validator(PruningState.model_json_schema()).is_valid


def scores(value: object) -> str:
    return json.dumps(edited(sample(), {"/provenance": {"scores": {"x": value}}}))


def changed(pointer: str, value: object) -> str:
    return json.dumps(edited(sample(), {pointer: value}))


# For each rule a minimal breach, which the schema accepts.
TEXTS: dict[str, Callable[[], str]] = {
    "size": lambda: scores(1).ljust(MAX_BYTES + 1),
    "syntax": lambda: scores(float("nan")),
    "duplicate_key": lambda: scores(1).replace('"x": 1', '"x": 1, "x": 1'),
    "surrogate": lambda: scores("\ud800"),
    "number": lambda: scores(1).replace('"x": 1', '"x": 1e309'),
    "depth": lambda: scores(json.loads("[" * (MAX_DEPTH - 2) + "]" * (MAX_DEPTH - 2))),
    "values": lambda: scores([0] * MAX_VALUES),
    "limit_below_budget": lambda: changed("/budget/limit", 31),
    "r_min_above_budget": lambda: changed("/constraints/selector/r_min", 33),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_the_schema_accepts_what_only_the_rule_refuses(kind: str) -> None:
    text = TEXTS[kind]()
    assert ACCEPTS(json.loads(text))
    assert {rule for _, rule in broken(text)} == {kind}


def test_every_rule_is_tested_and_documented(tmp_path: Path) -> None:
    (tmp_path / "marked.json").write_text(json.dumps(sample()), encoding="utf-8-sig")
    assert broken(tmp_path / "marked.json") == [("", "encoding")]
    assert broken(tmp_path) == [("", "file")]
    assert set(RULES) == {*TEXTS, "file", "encoding"}
    page = (Path(__file__).resolve().parents[2] / "docs/states.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(.+)` \| (.+) \| (.+) \|$", page, flags=re.MULTILINE)
    assert listed == [(kind, *rule) for kind, rule in RULES.items()]
