"""Loading of states: what is loaded, what is refused with place and fix, and at which cost."""

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

from tests.tables import parametrize_from_file
from tests.tpdsl.samples import DELETE, Changes, edited, sample, shipped, state
from vllm_autoprune import PruningState, StateError, load_state
from vllm_autoprune.errors import Problem
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_PROBLEMS,
    MAX_VALUES,
    RULES,
    SMALLEST,
    parse_json,
)

ACCEPTS = jsonschema.Draft202012Validator(PruningState.model_json_schema()).is_valid


def problems(source: str | Path | dict[str, object]) -> tuple[Problem, ...]:
    """Problems of a source that must be refused; each says how to fix it, on a line of its own."""
    with pytest.raises(StateError) as raised:
        load_state(source)
    found = raised.value.problems
    assert found and all(problem.fix for problem in found)
    assert str(raised.value).replace("\n", "").isprintable()
    lines = len(found) + (len(found) > 1)  # several have a heading
    assert len(str(raised.value).splitlines()) == lines <= MAX_PROBLEMS + 2
    return found


def refused(source: str | Path | dict[str, object]) -> list[tuple[str, str]]:
    """(where, what) of each problem."""
    return [(problem.where, problem.what) for problem in problems(source)]


def changed(changes: Changes) -> str:
    return json.dumps(edited(sample(), changes))


def scores(value: object) -> str:
    return changed({"/provenance": {"scores": {"x": value}}})


def test_a_file_a_text_a_name_and_a_mapping_are_the_same_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = json.dumps(shipped("autoprune"))
    file = tmp_path / "s.json"
    file.write_text(text, encoding="utf-8")
    assert load_state(file) == load_state(str(file)) == load_state("\n  " + text)
    assert load_state("autoprune") == load_state(file) == load_state(json.loads(text))
    # A file goes before a shipped state of its name, and a folder does not.
    Path("autoprune").mkdir()
    assert load_state("autoprune").name == "autoprune"
    Path("autoprune").rmdir()
    Path("autoprune").write_text(changed({"/name": "mine"}))
    assert load_state("autoprune").name == "mine"
    # A text is that of one object, and of at most a megabyte, as read and as written out.
    just = text.encode().ljust(MAX_BYTES)
    file.write_bytes(just)
    assert load_state(file) == load_state(just.decode())
    deep = json.loads("[" * 27 + ",".join(["[]"] * 4000) + "]" * 27)
    wide = {"/provenance": {"scores": {"x": deep}, "notes": "x" * 900_000}}
    ((where, what),) = refused(changed(wide))
    assert where == "" and what.startswith("larger than 1048576 bytes when written out")


@parametrize_from_file("field", "written")
def test_a_number_is_one_however_it_is_written(field: str, written: str) -> None:
    text = re.sub(rf'"{field}": [0-9.]+', f'"{field}": {written}', json.dumps(sample()))
    assert f'"{field}": {written}' in text
    assert load_state(text) == load_state(json.loads(text)) == state()
    assert load_state(text).digest == state().digest


# One problem each.

SINGLE: list[tuple[Changes, str, str, str]] = [
    ({"/scoring/signals/1/atom": "atention_proxy_saliency"}, "/scoring/signals/1/atom",
     'unknown atom "atention_proxy_saliency"', "did you mean 'attention_proxy_saliency'?"),
    ({"/base_policy/name": "zzz"}, "/base_policy/name", 'unknown name "zzz"',
     f"use one of: {', '.join([*BASE_POLICIES][:24])}"),
    # An atom of another group is as invalid here as one that does not exist, and no typo.
    ({"/reassembly/atom": "pairwise_cosine_kernel"}, "/reassembly/atom", "unknown atom",
     "that is one of similarity_kernel, this field takes another group; "),
    ({"/scoring/kernel/atom": DELETE}, "/scoring/kernel", "has no 'atom'", 'add "atom": "..."'),
    ({"/zzz": 1}, "/zzz", "not a known field", "remove it or correct its name"),
    ({"/a~1b": 1}, "/a~01b", "not a known field", "remove it"),
    ({"/scoring/signals/1/temprature": 1}, "/scoring/signals/1/temprature",
     "not a known field of 'attention_proxy_saliency'", "did you mean 'temperature'?"),
    ({"/provenance": DELETE, "/provenence": {}}, "/provenence", "not a known field",
     "did you mean 'provenance'?"),
    ({"/reassembly/strength": 1.01}, "/reassembly/strength", "1.01 is refused",
     "input should be less than or equal to 1"),
    ({"/constraints/pool/0/pool_ratio": 17}, "/constraints/pool/0/pool_ratio", "17 is refused",
     "input should be less than or equal to 16, or null"),
    *(({place: value}, place, f"{text} is refused", "") for place, value, text in (
        ("/scoring/signals/0/sign", "±", '"±"'),
        ("/scoring/signals/0/weight", True, "true"),
        ("/constraints/selector/q_e", 2.5, "2.5"),
        ("/scoring/signals", [], "[]"),
        ("/scoring", None, "null"),
        ("/safety/0", 5, "5"),
        ("/$schema", "x" * 2049, f'"{"x" * 57}..."'),
    )),
    ({"/budget": "fixed_budget@32"}, "/budget", '"fixed_budget@32" is refused',
     "should be an object"),
    ({"/safety/1": "deterministic"}, "/safety", '[{"atom": "preserve_budget"}, "determ',
     "list deterministic once"),
    ({"/budget": {"atom": "ratio_budget", "ceiling": 64, "limit": 63}}, "/budget/limit",
     "K = 64 is above the limit of the state, 63", "use K = 63 or less, or a larger limit"),
    ({"/budget": {"atom": "ratio_budget", "floor": 4}, "/constraints/selector/r_min": 5},
     "/constraints/selector/r_min", "r_min = 5 reference tokens cannot be kept of K = 4",
     "set it to null, which means K - q_e, or use a larger K"),
    *(({"/provenance": {"seed": seed}}, "/provenance/seed", "", "") for seed in (0.5, 2**63)),
    ({"/provenance": {"notes": ["a"] * 99}}, "/provenance/notes", '["a", "a"', ""),
    *(({"/core": {"share": 0.5, "policy": {"name": name}}}, "/core/policy/name",
       f"base policy {name!r} reads the question", "use one of: ")
      for name, policy in BASE_POLICIES.items() if policy.core is None),
    ({"/core": {"share": 0.5, "policy": {"name": "mmtok", "params": {"words": True}}}},
     "/core/policy/params/words", "true is refused", ""),
]  # fmt: skip
"""Changes to the sample; place of the only problem, and how what it says and its fix begin."""


@pytest.mark.parametrize(("changes", "where", "what", "fix"), SINGLE)
def test_a_problem_has_its_place_and_its_fix_and_the_schema_refuses_the_same(
    changes: Changes, where: str, what: str, fix: str
) -> None:
    data = edited(sample(), changes)
    (problem,) = problems(json.dumps(data))
    assert problem.where == where and problem.what.startswith(what)
    assert problem.fix.startswith(fix) and len(problem.what) < 100
    assert ACCEPTS(data) == (problem.kind in RULES)


ABSENT = "no such file, and no shipped state of that name"
NESTED = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
WIDE = "not UTF-8 text (it looks like UTF-16 or UTF-32)"
TEXTS: list[tuple[str | bytes, str]] = [
    ("", "is empty"),
    ("schema: autoprune", "not JSON: Expecting value at line 1 col 1"),
    ("[]", "a state is a JSON object, not []"),
    ("NaN", "NaN is not a JSON number"),
    ("-1e999", "-1e999 is larger than any 64-bit float"),
    ('{"schema": 1,}', "not JSON: "),
    ('{"schema": 1} {}', "not JSON: Extra data at line 1 col 15"),
    ('{"a": "\n"}', "not JSON: "),
    ("\0\1\2\3", WIDE),
    (NESTED, "nested too deeply: 100001 levels"),
    ("[" * MAX_BYTES, "nested too deeply: 1048576 levels"),
    ('{"a": [' + "0," * 500_000 + "0]}", "about 500003 values"),
    (changed({}).ljust(MAX_BYTES + 1), "larger than 1048576 bytes"),
    # A text is measured in bytes.
    (
        changed({"/provenance": {"notes": "@"}}).replace(
            "@", "\U0001f999" * (MAX_BYTES // 4)
        ),
        "larger than 1048576 bytes",
    ),
    (
        changed({}).encode().replace(b"sample", b"s\xfcmple", 1),
        "not UTF-8 text (invalid",
    ),
    (changed({}).encode("utf-8-sig"), "begins with a byte order mark"),
    *(
        (changed({}).encode(name), WIDE)
        for name in (
            "utf-16",
            "utf-16-le",
            "utf-16-be",
            "utf-32",
            "utf-32-le",
            "utf-32-be",
        )
    ),
]


@pytest.mark.parametrize(("content", "what"), TEXTS, ids=map(str, range(len(TEXTS))))
def test_texts_that_are_not_one_json_object(
    tmp_path: Path, content: str | bytes, what: str
) -> None:
    file = tmp_path / "s.json"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    found = refused(file)
    assert found[0][0] == "" and found[0][1].startswith(what)
    if isinstance(content, str) and content.startswith("{"):
        assert refused(content) == found


@pytest.mark.parametrize(
    ("source", "what"),
    [
        *(
            (source, ABSENT)
            for source in (
                "\0",
                "\ud800",
                Path("nowhere"),
                "file:///etc/hostname",
                "s3://bucket/state.json",
            )
        ),
        ("", "is empty, as where a variable is not set"),
        (" \n", "is empty, as where a variable is not set"),
        ("\x1b[2J\nstate ok: 0 problem(s)\u202e", ABSENT),
        ("x" * 5000, "cannot be read (File name too long)"),
        # Text that is not a JSON object is treated as a name.
        (json.dumps([0] * 3000), "cannot be read (File name too long)"),
        *(
            (device, "is no regular file")
            for device in ("/dev/zero", "/dev/null", "/dev/random")
        ),
    ],
    ids=lambda value: str(value)[:20].encode("unicode_escape").decode(),
)
def test_names_of_nothing_and_of_devices_are_not_opened(
    source: str | Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: object, **__: object) -> NoReturn:
        pytest.fail("something was opened")

    for module, name in (
        (os, "open"),
        (socket, "socket"),
        (socket, "create_connection"),
    ):
        monkeypatch.setattr(module, name, opened)
    assert refused(source) == [("", what)]


def test_files_that_are_none_that_change_or_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe.json"
    link = tmp_path / "link.json"
    os.mkfifo(pipe)
    link.symlink_to(link.name)
    assert refused(tmp_path) == [("", "is a folder")]
    assert refused(pipe) == [("", "is no regular file")]
    assert refused(link) == [("", "cannot be read (Too many levels of symbolic links)")]
    # It reports size 0, like a file that grows.
    ((where, what),) = refused("/proc/version")
    assert where == "" and what.startswith("not JSON")
    (nearest,) = problems("autoprun")
    assert nearest.what == ABSENT and nearest.fix == "did you mean 'autoprune'?"
    file = tmp_path / "s.json"
    opened = os.open
    file.write_text("{}")

    def denied(*_: object, **__: object) -> NoReturn:
        raise PermissionError(13, "Permission denied")

    def swapped(path: Path, flags: int) -> int:
        file.unlink()
        os.mkfifo(file)
        return opened(path, flags)

    monkeypatch.setattr(os, "open", denied)
    assert refused(file) == [("", "cannot be read (Permission denied)")]
    monkeypatch.setattr(os, "open", swapped)
    assert refused(file) == [("", "is no regular file")]


def test_whole_numbers_are_integers_up_to_64_bits() -> None:
    numbers = [parse_json(text) for text in ("2.0", "-0.0", "2.5", "9e18", "1e19")]
    assert [type(number) for number in numbers] == [int, int, float, int, float]


def test_another_schema_version_is_refused_for_that_alone() -> None:
    # Other fields are not validated, because they may be valid in another version.
    for version, status in (
        (DELETE, "missing"),
        ("autoprune/2", '"autoprune/2" is not known'),
    ):
        ((where, what),) = refused(
            changed({"/schema": version, "/budget": 7, "/zzz": 1})
        )
        assert where == "/schema" and what.startswith(
            f"schema version {status}; this version reads"
        )


def test_all_problems_are_reported_together() -> None:
    many: Changes = {
        "/base_policy/name": "nobody",
        "/budget/limit": 0,
        "/scoring/signals/0/weight": 9,
        "/scoring/signals/1/atom": "unheard_of",
        "/scoring/signals/2/sigma": 0,
        "/scoring/kernel": DELETE,
        "/constraints/selector/q_e": "many",
        "/reassembly/power": 1,
        "/safety/3": "pray",
        "/extra": [],
    }
    assert [where for where, _ in refused(changed(many))] == [*many]
    # A list of bad items is not also called too short.
    bad = changed({"/scoring/signals": [{"atom": "x"}, {"atom": "y"}]})
    places = [where for where, _ in refused(bad)]
    assert places == ["/scoring/signals/0/atom", "/scoring/signals/1/atom"]


@pytest.mark.parametrize(
    ("part", "name"),
    [
        *(("", name) for name in SMALLEST if name not in ("schema", "name")),
        *(("scoring", name) for name in ("signals", "kernel", "fusion")),
        *(("constraints", name) for name in ("pool", "selector")),
    ],
)
def test_what_is_missing_is_told_with_the_smallest_state(part: str, name: str) -> None:
    """The fix, written into what is left of it, makes the smallest state whole again."""
    assert load_state(SMALLEST).name == "mine"
    document = json.loads(json.dumps(SMALLEST))
    inside = document[part] if part else document
    value = inside.pop(name)
    with pytest.raises(StateError) as caught:
        load_state(document)
    problem, *advice = caught.value.problems
    assert problem.where == f"/{part}/{name}".replace("//", "/")
    assert re.fullmatch("required but missing: .*[^.]", problem.what)
    assert json.loads("{" + problem.fix.removeprefix("add ") + "}") == {name: value}
    smallest = [json.loads(p.fix.partition(": ")[2]) for p in advice]
    assert smallest == ([] if part else [SMALLEST])


def test_omitted_problems_are_counted_and_an_empty_state_lacks_its_version() -> None:
    found = refused(changed({f"/extra{i}": 0 for i in range(1000)}))
    assert len(found) == MAX_PROBLEMS + 1
    assert found[-1] == ("", f"{1000 - MAX_PROBLEMS} more problems")
    assert refused("{}")[0][0] == "/schema"
    assert len(refused('{"schema": "autoprune-state/1", "name": null}')) >= 7
    assert refused(changed({"/name": "\x1b[2J\u202e" * 40}))[0][0] == "/name"


def test_limits_are_inclusive_and_brackets_in_strings_are_not_counted() -> None:
    deep = json.loads("[" * (MAX_DEPTH - 3) + "]" * (MAX_DEPTH - 3))
    many = [0] * (MAX_VALUES - 200)
    odd = '[{,\\"' * 20_000
    provenance = {"notes": odd, "scores": {odd: "\\", "deep": deep, "many": many}}
    loaded = load_state(changed({"/provenance": provenance})).provenance
    assert loaded.scores["deep"] == deep and loaded.notes == odd
    provenance["scores"] = {"deep": [deep]}
    ((where, what),) = refused(changed({"/provenance": provenance}))
    assert where == "" and what.startswith("nested too deeply: 33 levels")


CYCLE: dict[str, object] = {}
CYCLE["a"] = CYCLE
DEEP: dict[str, object] = {}
for _ in range(100_000):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (b"x", "syntax"),
        pytest.param(DEEP, "depth", id="deep"),
        pytest.param(CYCLE, "syntax", id="cycle"),
        ("\ud800", "surrogate"),
    ],
)
def test_a_mapping_is_refused_as_its_text_is(value: object, kind: str) -> None:
    (problem,) = problems({**sample(), "provenance": {"scores": {"a": value}}})
    assert problem.kind == kind


# Texts that are meant to take long, or much memory.

HOSTILE = {
    "unknown fields": '{"schema":"autoprune-state/1",'
    + ",".join(f'"a{i}":0' for i in range(MAX_VALUES - 9))
    + "}",
    "unknown signals": changed(
        {"/scoring/signals": [{"atom": f"{i}_proxy"} for i in range(3000)]}
    ),
    "keys that occur twice": "{" + '"a":0,' * (MAX_VALUES - 9) + '"b":1}',
    "a long name": changed({"/reassembly/atom": "mean_residual" * 80_000}),
    "a long key": changed({"/reassembly/" + "strength" * 100_000: 1}),
    "a long number": changed({}).replace('"q_e": 2', '"q_e": ' + "7" * 1_000_000),
    "pairs of brackets": '{"a": [' + "[]," * 340_000 + "[]]}",
}


@pytest.mark.parametrize(
    "text", [pytest.param(t, id=name) for name, t in HOSTILE.items()]
)
def test_it_costs_less_than_a_second_and_little_memory(text: str) -> None:
    def seconds() -> float:
        """Processor time of this thread to refuse the text, without garbage collection."""
        gc.collect()
        gc.disable()
        begun = time.thread_time()
        try:
            problems(text)
            return time.thread_time() - begun
        finally:
            gc.enable()

    # A busy host and garbage of other tests only ever add time: one quick attempt of five will do.
    assert any(seconds() < 1.0 for _ in range(5))
    assert sum(len(str(problem)) for problem in problems(text)) < 32_000
    tracemalloc.start()
    try:
        problems(text)
        assert tracemalloc.get_traced_memory()[1] < 48 * MAX_BYTES
    finally:
        tracemalloc.stop()


def test_every_rule_is_documented_and_alone_refuses_what_the_schema_accepts(
    tmp_path: Path,
) -> None:
    r_min = "/constraints/selector/r_min"
    # For each rule that no schema expresses a minimal breach, which the schema accepts.
    breaches: dict[str, Callable[[], str]] = {
        "size": lambda: scores(1).ljust(MAX_BYTES + 1),
        "syntax": lambda: scores(float("nan")),
        "duplicate_key": lambda: scores(1).replace('"x": 1', '"x": 1, "x": 1'),
        "surrogate": lambda: scores("\ud800"),
        "number": lambda: scores(1).replace('"x": 1', '"x": 1e309'),
        "depth": lambda: scores(
            json.loads("[" * (MAX_DEPTH - 2) + "]" * (MAX_DEPTH - 2))
        ),
        "values": lambda: scores([0] * MAX_VALUES),
        "limit_below_budget": lambda: changed({"/budget/limit": 31}),
        "r_min_above_budget": lambda: changed({r_min: 33}),
    }
    for kind, breach in breaches.items():
        assert ACCEPTS(json.loads(breach()))
        assert {problem.kind for problem in problems(breach())} == {kind}
    (tmp_path / "marked.json").write_text(changed({}), encoding="utf-8-sig")
    kinds = [problems(path)[0].kind for path in (tmp_path / "marked.json", tmp_path)]
    assert kinds == ["encoding", "file"] and set(RULES) == {*breaches, *kinds}
    page = (Path(__file__).resolve().parents[2] / "docs/states.md").read_text(
        encoding="utf-8"
    )
    rules = page.partition("<!-- rules -->")[2].partition("<!-- /rules -->")[0]
    assert tuple(re.findall(r"^\| `(.+)` \|", rules, flags=re.MULTILINE)) == RULES
    limits = (
        f"{MAX_BYTES} bytes",
        f"nested at most {MAX_DEPTH} deep",
        f"{MAX_VALUES} values",
    )
    assert all(limit in page for limit in limits)
