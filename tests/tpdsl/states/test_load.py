from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

import pytest

from tests.tpdsl.samples import DELETE, edited, refused, refused_with, sample, shipped
from vllm_autoprune import StateError, load_state
from vllm_autoprune.tpdsl.json_text import MAX_BYTES, MAX_VALUES
from vllm_autoprune.tpdsl.loading import shipped_states


def test_a_file_a_text_and_a_name_are_the_same_state(tmp_path: Path) -> None:
    text = json.dumps(shipped("autoprune"))
    file = tmp_path / "s.json"
    file.write_text(text, encoding="utf-8")
    assert load_state(file) == load_state(str(file)) == load_state("\n  " + text)
    assert load_state("autoprune") == load_state(file)


@pytest.mark.parametrize("name", shipped_states())
def test_a_mapping_is_the_same_state_as_its_text(name: str) -> None:
    text = shipped_states()[name].read_text(encoding="utf-8")
    assert load_state(MappingProxyType(json.loads(text))) == load_state(text)


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
def test_a_mapping_is_refused_as_its_text_is(changes: dict[str, object]) -> None:
    data = edited(sample(), changes)
    with pytest.raises(StateError) as of_text:
        load_state(json.dumps(data))
    with pytest.raises(StateError) as of_mapping:
        load_state(data)
    kinds = [(problem.where, problem.kind) for problem in of_text.value.problems]
    assert [(problem.where, problem.kind) for problem in of_mapping.value.problems] == kinds


def test_numbers_of_a_mapping_are_read_as_in_its_text() -> None:
    data = edited(sample(), {"/constraints/selector/q_e": 2.0, "/scoring/signals/0/weight": 1})
    assert load_state(data) == load_state(json.dumps(data))


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({1, 2}, "set is not a JSON type"),
        (b"x", "bytes is not a JSON type"),
        ({1: 2}, "has a key of type int, not a string"),
        pytest.param(
            10**5000, "an integer of 16610 bits is larger than any 64-bit float", id="int"
        ),
    ],
)
def test_a_mapping_with_a_value_that_no_text_holds(value: object, what: str) -> None:
    data = edited(sample(), {"/provenance": {"scores": {"a": value}}})
    with pytest.raises(StateError) as raised:
        load_state(data)
    problems = [(problem.where, problem.what) for problem in raised.value.problems]
    assert problems == [("/provenance/scores/a", what)]


@pytest.mark.parametrize("kind", ["depth", "cycle", "values", "size"])
def test_a_mapping_without_bounds(kind: str) -> None:
    nested: dict[str, object] = {}
    if kind == "depth":
        for _ in range(100_000):
            nested = {"a": nested}
    elif kind == "cycle":
        nested["a"] = nested
    elif kind == "values":
        nested["a"] = [0] * MAX_VALUES
    else:
        nested["a"] = "x" * MAX_BYTES
    with pytest.raises(StateError) as raised:
        load_state({**sample(), "provenance": {"scores": nested}})
    (problem,) = raised.value.problems
    assert problem.kind == {"cycle": "depth"}.get(kind, kind)


def test_a_file_goes_before_a_shipped_state_and_a_folder_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("autoprune").mkdir()
    assert load_state("autoprune").name == "autoprune"
    Path("autoprune").rmdir()
    Path("autoprune").write_text(json.dumps(edited(sample(), {"/name": "mine"})))
    assert load_state("autoprune").name == "mine"


def test_every_shipped_state_loads_under_its_name() -> None:
    assert "autoprune" in shipped_states()
    assert all(load_state(name).name == name for name in shipped_states())


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(StateError, match="did you mean 'autoprune'") as raised:
        load_state("autoprun")
    (problem,) = raised.value.problems
    assert problem.what == "no such file, and no shipped state of that name"


@pytest.mark.parametrize("source", ["\0", "\ud800", "missing.json", "a/b/c.json", Path("nowhere")])
def test_missing_file(source: str | Path) -> None:
    assert refused(source) == [("", "no such file, and no shipped state of that name")]


def test_a_name_too_long_for_the_file_system() -> None:
    assert refused("x" * 5000) == [("", "cannot be read (File name too long)")]
    # Text that is not a JSON object is treated as a name.
    assert refused(json.dumps([0] * 3000)) == [("", "cannot be read (File name too long)")]


def test_a_folder(tmp_path: Path) -> None:
    assert refused(tmp_path) == [("", "is a folder")]


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "s.json"
    file.write_text("{}")

    def denied(*_: object, **__: object) -> NoReturn:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    assert refused(file) == [("", "cannot be read (Permission denied)")]


def test_a_folder_that_may_not_be_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = Path.stat

    def denied(path: Path, **options: bool) -> os.stat_result:
        if path.name == "s.json":
            raise PermissionError(13, "Permission denied")
        return requested(path, **options)

    monkeypatch.setattr(Path, "stat", denied)
    assert refused("folder/s.json") == [("", "cannot be read (Permission denied)")]


def test_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "s.json")
    assert refused(tmp_path / "s.json") == [("", "is a pipe")]


def test_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket may not be long
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("s.json")
        assert refused("s.json") == [("", "is a socket")]


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/random"])
def test_a_device_is_not_opened(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("a device was opened"))
    assert refused(device) == [("", "is a device")]


def test_a_file_that_turns_into_a_pipe_before_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "s.json"
    file.write_text("{}")
    opened = os.open

    def swapped(path: Path, flags: int) -> int:
        file.unlink()
        os.mkfifo(file)
        return opened(path, flags)

    monkeypatch.setattr(os, "open", swapped)
    assert refused(file) == [("", "is a pipe")]


def test_a_link_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "s.json").symlink_to("s.json")
    ((where, what),) = refused(tmp_path / "s.json")
    assert where == "" and what == "cannot be read (Too many levels of symbolic links)"


def test_file_with_a_wrong_reported_size() -> None:
    # It reports size 0 and has no end, like a file that grows.
    assert os.stat("/proc/self/maps").st_size == 0
    ((where, what),) = refused("/proc/self/maps")
    assert where == "" and what.startswith("not JSON")


def test_a_file_that_grows_while_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_bytes(b" " * MAX_BYTES)
    growing = threading.Event()

    def grow() -> None:
        with file.open("ab") as end:
            while not growing.wait(0.0001):
                end.write(b" " * 4096)
                end.flush()

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        time.sleep(0.01)
        assert refused(file) == [("", f"larger than {MAX_BYTES} bytes")]
    finally:
        growing.set()
        writer.join()


@pytest.mark.parametrize(
    "url", ["https://example.com/state.json", "file:///etc/hostname", "s3://bucket/state.json"]
)
def test_a_url_is_a_name_and_is_not_opened(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: object, **__: object) -> NoReturn:
        pytest.fail("a connection was opened")

    monkeypatch.setattr(socket, "socket", opened)
    monkeypatch.setattr(socket, "create_connection", opened)
    assert refused(url) == [("", "no such file, and no shipped state of that name")]


def test_a_url_inside_a_state_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", lambda *_: pytest.fail("a connection was opened"))
    url = "https://example.com/policy.json"
    changed = edited(sample(), {"/provenance": {"found_by": url}, "/name": url})
    assert load_state(json.dumps(changed)).provenance.found_by == url
    assert refused_with({"/base_policy": {"name": url}})[0][0] == "/base_policy/name"


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
