from __future__ import annotations

import json
import os
import socket
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.tpdsl.samples import DELETE, edited, shipped
from vllm_autoprune import StateError, load_state
from vllm_autoprune.tpdsl.atom import ATOMS
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.load import MAX_TOLD, shipped_states
from vllm_autoprune.tpdsl.text import MAX_BYTES, MAX_DEPTH, MAX_VALUES


def refused(source: str | Path) -> list[tuple[str, str]]:
    """Where and what, of every problem for which the state is refused."""
    with pytest.raises(StateError) as raised:
        load_state(source)
    assert raised.value.problems and all(p.mend for p in raised.value.problems)
    return [(problem.where, problem.what) for problem in raised.value.problems]


def refused_with(changes: dict[str, object]) -> list[tuple[str, str]]:
    return refused(json.dumps(edited(shipped(), changes)))


def mended(changes: dict[str, object]) -> str:
    """The advice given for the one problem of a changed state."""
    with pytest.raises(StateError) as raised:
        load_state(json.dumps(edited(shipped(), changes)))
    (problem,) = raised.value.problems
    return problem.mend


class TestSources:
    def test_a_file_a_text_and_a_name_are_the_same_state(self, tmp_path: Path) -> None:
        text = json.dumps(shipped())
        file = tmp_path / "s.json"
        file.write_text(text, encoding="utf-8")
        assert load_state(file) == load_state(str(file)) == load_state("\n  " + text)
        assert load_state("autoprune") == load_state(file)

    def test_a_file_goes_before_a_shipped_state_and_a_folder_does_not(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("autoprune").mkdir()
        assert load_state("autoprune").name == "autoprune"
        Path("autoprune").rmdir()
        Path("autoprune").write_text(json.dumps(edited(shipped(), {"/name": "mine"})))
        assert load_state("autoprune").name == "mine"

    def test_every_shipped_state_loads_under_its_name(self) -> None:
        assert "autoprune" in shipped_states()
        assert all(load_state(name).name == name for name in shipped_states())

    def test_a_name_nobody_ships_is_answered_with_the_nearest(self) -> None:
        with pytest.raises(StateError, match="did you mean 'autoprune'") as raised:
            load_state("autoprun")
        (problem,) = raised.value.problems
        assert problem.what == "no such file, and no shipped state of that name"

    @pytest.mark.parametrize(
        "source", ["\0", "\ud800", "missing.json", "a/b/c.json", Path("nowhere")]
    )
    def test_what_is_not_there(self, source: str | Path) -> None:
        assert refused(source) == [("", "no such file, and no shipped state of that name")]

    def test_a_name_too_long_for_the_file_system(self) -> None:
        assert refused("x" * 5000) == [("", "cannot be read (File name too long)")]
        # Text that is not an object is not taken for a state, so it ends here too.
        assert refused(json.dumps([0] * 3000)) == [("", "cannot be read (File name too long)")]

    def test_a_folder(self, tmp_path: Path) -> None:
        assert refused(tmp_path) == [("", "is a folder")]

    def test_a_file_that_may_not_be_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "s.json"
        file.write_text("{}")

        def denied(*_: object, **__: object) -> NoReturn:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "open", denied)
        assert refused(file) == [("", "cannot be read (Permission denied)")]

    def test_a_folder_that_may_not_be_searched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = Path.stat

        def denied(path: Path, **options: bool) -> os.stat_result:
            if path.name == "s.json":
                raise PermissionError(13, "Permission denied")
            return asked(path, **options)

        monkeypatch.setattr(Path, "stat", denied)
        assert refused("folder/s.json") == [("", "cannot be read (Permission denied)")]

    def test_a_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "s.json")
        assert refused(tmp_path / "s.json") == [("", "is a pipe")]

    def test_a_socket(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)  # the path of a socket may not be long
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("s.json")
            assert refused("s.json") == [("", "is a socket")]

    @pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/random"])
    def test_a_device_is_not_opened(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "open", lambda *_: pytest.fail("a device was opened"))
        assert refused(device) == [("", "is a device")]

    def test_a_file_that_turns_into_a_pipe_before_it_is_opened(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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

    def test_a_link_in_a_circle(self, tmp_path: Path) -> None:
        (tmp_path / "s.json").symlink_to("s.json")
        ((where, what),) = refused(tmp_path / "s.json")
        assert where == "" and what == "cannot be read (Too many levels of symbolic links)"

    def test_a_file_whose_size_is_a_lie(self) -> None:
        # As long as it likes to be, and 0 by its own account: a file that grows is like this.
        assert os.stat("/proc/self/maps").st_size == 0
        ((where, what),) = refused("/proc/self/maps")
        assert where == "" and what.startswith("not JSON")

    def test_a_file_that_grows_while_it_is_read(self, tmp_path: Path) -> None:
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
    def test_a_url_is_a_name_and_is_not_opened(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def opened(*_: object, **__: object) -> NoReturn:
            pytest.fail("a connection was opened")

        monkeypatch.setattr(socket, "socket", opened)
        monkeypatch.setattr(socket, "create_connection", opened)
        assert refused(url) == [("", "no such file, and no shipped state of that name")]

    def test_a_url_inside_a_state_is_text(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(socket, "socket", lambda *_: pytest.fail("a connection was opened"))
        url = "https://example.com/policy.json"
        changed = edited(shipped(), {"/provenance": {"found_by": url}, "/name": url})
        assert load_state(json.dumps(changed)).provenance.found_by == url
        assert refused_with({"/base_policy": {"name": url}})[0][0] == "/base_policy/name"


class TestText:
    def in_file(self, tmp_path: Path, content: bytes) -> list[tuple[str, str]]:
        file = tmp_path / "s.json"
        file.write_bytes(content)
        return refused(file)

    def test_not_utf8(self, tmp_path: Path) -> None:
        content = json.dumps(shipped()).encode().replace(b"autoprune", b"autopr\xfcne", 1)
        ((where, what),) = self.in_file(tmp_path, content)
        assert where == "" and what.startswith("not UTF-8 text (invalid start byte at byte ")

    @pytest.mark.parametrize(
        "encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]
    )
    def test_wide_encodings_are_recognised(self, tmp_path: Path, encoding: str) -> None:
        found = self.in_file(tmp_path, json.dumps(shipped()).encode(encoding))
        assert found == [("", "not UTF-8 text (it looks like UTF-16 or UTF-32)")]

    def test_a_byte_order_mark(self, tmp_path: Path) -> None:
        text = json.dumps(shipped())
        expected = [("", "begins with a byte order mark")]
        assert self.in_file(tmp_path, text.encode("utf-8-sig")) == expected
        assert refused(f"\ufeff{text}") == expected

    def test_too_large(self, tmp_path: Path) -> None:
        content = json.dumps(shipped()).encode()
        just = content + b" " * (MAX_BYTES - len(content))
        (tmp_path / "just.json").write_bytes(just)
        assert load_state(tmp_path / "just.json").name == "autoprune"
        assert load_state(just.decode()).name == "autoprune"
        assert self.in_file(tmp_path, just + b" ") == [("", "larger than 1048576 bytes")]
        assert refused(just.decode() + " ") == [("", "larger than 1048576 bytes")]

    def test_a_text_is_measured_in_bytes(self) -> None:
        long = edited(shipped(), {"/provenance": {"notes": "\U0001f999" * (MAX_BYTES // 4)}})
        text = json.dumps(long, ensure_ascii=False)
        assert len(text) < MAX_BYTES
        assert refused(text) == [("", "larger than 1048576 bytes")]

    def test_too_large_once_it_is_written_out(self) -> None:
        # Lists deep in lists, each on its own indented line, take more to write than they hold.
        deep = json.loads("[" * 27 + ",".join(["[]"] * 4000) + "]" * 27)
        long = edited(shipped(), {"/provenance": {"scores": {"x": deep}, "notes": "x" * 900_000}})
        ((where, what),) = refused(json.dumps(long))
        assert where == "" and what.startswith("larger than 1048576 bytes when it is written out")

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
    def test_what_is_not_one_json_object(self, tmp_path: Path, content: str, what: str) -> None:
        found = self.in_file(tmp_path, content.encode())
        assert found[0][0] == "" and found[0][1].startswith(what)
        if content.startswith("{"):
            assert refused(content) == found

    def test_as_deep_and_as_many_as_may_be(self) -> None:
        deep = json.loads("[" * (MAX_DEPTH - 3) + "]" * (MAX_DEPTH - 3))
        many = [0] * (MAX_VALUES - 200)
        changed = edited(shipped(), {"/provenance": {"scores": {"deep": deep, "many": many}}})
        assert load_state(json.dumps(changed)).provenance.scores["deep"] == deep
        changed["provenance"]["scores"]["deep"] = [deep]
        assert refused(json.dumps(changed))[0][1].startswith("nested too deeply: 33 levels")

    def test_brackets_and_commas_in_strings_count_for_nothing(self) -> None:
        odd = '[{,\\"' * 20_000
        changed = edited(shipped(), {"/provenance": {"notes": odd, "scores": {odd: "\\"}}})
        assert load_state(json.dumps(changed)).provenance.notes == odd

    def test_numbers_that_no_float_holds_are_told_with_their_places(self) -> None:
        changed = edited(
            shipped(),
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

    def test_keys_that_occur_twice_are_told_with_their_places_and_all_else(self) -> None:
        text = json.dumps(edited(shipped(), {"/reassembly/strength": 7}))
        text = text.replace('"scoring": {', '"name": "n", "scoring": {"kernel": 1, "kernel": 2, ')
        assert refused(text) == [
            ("/name", 'key "name" occurs twice in one object'),
            ("/scoring/kernel", 'key "kernel" occurs twice in one object'),
            ("/reassembly/strength", "7 is refused"),
        ]

    @pytest.mark.parametrize("escaped", [True, False])
    def test_halves_of_characters_are_refused_wherever_they_are(self, escaped: bool) -> None:
        changed = edited(
            shipped(),
            {"/name": "\ud800", "/provenance": {"scores": {"\udfff": 1, "ok": ["\udc00x"]}}},
        )
        assert refused(json.dumps(changed, ensure_ascii=escaped)) == [
            ("/name", r'"\ud800" holds half of a surrogate pair'),
            (r"/provenance/scores/\udfff", r'key "\udfff" holds half of a surrogate pair'),
            ("/provenance/scores/ok/0", r'"\udc00x" holds half of a surrogate pair'),
        ]
        assert (
            load_state(json.dumps(edited(shipped(), {"/name": "\U0001f999"}))).name == "\U0001f999"
        )

    @pytest.mark.parametrize("whole", ["2.0", "2e0", "0.2e1", "200E-2"])
    def test_a_whole_number_is_one_however_it_is_written(self, whole: str) -> None:
        text = json.dumps(shipped()).replace('"q_e": 2', f'"q_e": {whole}')
        assert whole in text and load_state(text) == load_state("autoprune")

    def test_minus_zero_is_zero(self) -> None:
        text = json.dumps(shipped()).replace('"strength": 0.0', '"strength": -0.0')
        assert "-0.0" in text and load_state(text).digest == load_state("autoprune").digest


HOSTILE = {
    "unknown fields": "{" + ",".join(f'"a{i}":0' for i in range(MAX_VALUES - 9)) + "}",
    "unknown atoms": json.dumps(
        edited(shipped(), {"/safety": [f"{i}preserve_bugdet" for i in range(MAX_VALUES - 99)]})
    ),
    "unknown signals": json.dumps(
        edited(shipped(), {"/scoring/signals": [{"atom": f"{i}_proxy"} for i in range(3000)]})
    ),
    "keys that occur twice": "{" + '"a":0,' * (MAX_VALUES - 9) + '"b":1}',
    "a long name": json.dumps(edited(shipped(), {"/reassembly/atom": "mean_residual" * 80_000})),
    "a long key": json.dumps(edited(shipped(), {"/reassembly/" + "strength" * 100_000: 1})),
    "a long list": json.dumps(edited(shipped(), {"/reassembly": list(range(9000))})),
    "a long number": json.dumps(shipped()).replace('"q_e": 2', '"q_e": ' + "7" * 1_000_000),
    "a long fraction": json.dumps(shipped()).replace('"q_e": 2', '"q_e": 0.' + "7" * 1_000_000),
    "quotes": '{"' * 500_000,
    "backslashes": '{"' + "\\" * 1_000_000,
    "pairs of brackets": '{"a": [' + "[]," * 340_000 + "[]]}",
    "objects in objects": '{"a":' * 200_000,
    "too much": "{" + " " * (2 * MAX_BYTES) + "}",
}


class TestHostile:
    @pytest.mark.parametrize("text", [pytest.param(t, id=name) for name, t in HOSTILE.items()])
    def test_it_costs_less_than_a_second_and_little_memory(self, text: str) -> None:
        text = text.replace('{"a0"', '{"schema":"autoprune-state/1","a0"')
        begun = time.process_time()
        with pytest.raises(StateError) as raised:
            load_state(text)
        assert time.process_time() - begun < 1.0
        assert len(raised.value.problems) <= MAX_TOLD + 1 and len(str(raised.value)) < 32_000
        assert str(raised.value).replace("\n", "").isprintable()
        tracemalloc.start()
        try:
            refused(text)
            assert tracemalloc.get_traced_memory()[1] < 48 * MAX_BYTES
        finally:
            tracemalloc.stop()

    def test_what_is_left_out_is_counted(self) -> None:
        found = refused_with({f"/extra{i}": 0 for i in range(1000)})
        assert len(found) == MAX_TOLD + 1
        assert found[-1] == ("", f"{1000 - MAX_TOLD} more problem(s)")

    def test_nothing_that_a_terminal_obeys_is_repeated(self) -> None:
        bad = "\x1b[2J\nstate ok: 0 problem(s)\u202e"
        with pytest.raises(StateError) as raised:
            load_state(json.dumps(edited(shipped(), {"/reassembly/atom": bad, f"/{bad}": bad})))
        assert len(str(raised.value).splitlines()) == 1 + len(raised.value.problems) == 3
        assert str(raised.value).replace("\n", "").isprintable()
        with pytest.raises(StateError) as raised:
            load_state(bad)
        assert len(str(raised.value).splitlines()) == 2


class TestVersion:
    @pytest.mark.parametrize(
        ("version", "said"),
        [
            (DELETE, "missing"),
            (None, "missing"),
            ("autoprune-state/2", '"autoprune-state/2" is not known'),
            (1, "1 is not known"),
            ([], r"[] is not known"),
        ],
    )
    def test_another_version_is_refused_with_the_one_that_is_read(
        self, version: object, said: str
    ) -> None:
        # The rest is not looked at: in another version it may well be right.
        found = refused_with({"/schema": version, "/budget": 7, "/zzz": 1})
        assert found == [
            ("/schema", f"schema version {said}; this version reads 'autoprune-state/1'")
        ]


class TestFields:
    @pytest.mark.parametrize(
        ("changes", "where", "what"),
        [
            (
                {"/scoring/signals/1/atom": "attention_proxy_salience"},
                "/scoring/signals/1/atom",
                'unknown atom "attention_proxy_salience"',
            ),
            ({"/base_policy/name": "cdprune"}, "/base_policy/name", 'unknown name "cdprune"'),
            ({"/budget/atom": "fixed_budget@33"}, "/budget/atom", 'unknown atom "fixed_budget@33"'),
            ({"/budget/atom": 32}, "/budget/atom", "unknown atom 32"),
            # An atom of another group is as unknown here as one that does not exist.
            ({"/reassembly/atom": "pairwise_cosine_kernel"}, "/reassembly/atom", "unknown atom"),
            ({"/safety/1": "mean_residual"}, "/safety/1", 'unknown atom "mean_residual"'),
            ({"/safety/1": {"atom": "x"}}, "/safety/1/atom", 'unknown atom "x"'),
            ({"/scoring/kernel/atom": DELETE}, "/scoring/kernel", "has no 'atom'"),
            ({"/budget": DELETE}, "/budget", "required but missing"),
            ({"/name": "budget", "/budget": DELETE}, "/budget", "required but missing"),
            ({"/scoring/fusion": DELETE}, "/scoring/fusion", "required but missing"),
            ({"/colour": 1}, "/colour", "not a known field"),
            ({"/a~1b": 1}, "/a~01b", "not a known field"),
            (
                {"/scoring/signals/2/radius": 1},
                "/scoring/signals/2/radius",
                "not a known field of 'spatial_centrality_prior'",
            ),
            ({"/reassembly/strength": 0.51}, "/reassembly/strength", "0.51 is refused"),
            ({"/scoring/signals/0/sign": "±"}, "/scoring/signals/0/sign", '"±" is refused'),
            ({"/scoring/signals/0/weight": "0.4"}, "/scoring/signals/0/weight", '"0.4" is refused'),
            ({"/scoring/signals/0/weight": True}, "/scoring/signals/0/weight", "true is refused"),
            ({"/constraints/selector/q_e": True}, "/constraints/selector/q_e", "true is refused"),
            ({"/constraints/selector/q_e": "2"}, "/constraints/selector/q_e", '"2" is refused'),
            ({"/constraints/selector/r_min": -1}, "/constraints/selector/r_min", "-1 is refused"),
            ({"/base_policy/params/theta": 1}, "/base_policy/params/theta", "1 is refused"),
            ({"/scoring/signals": []}, "/scoring/signals", "[] is refused"),
            ({"/scoring/signals": {}}, "/scoring/signals", "{} is refused"),
            ({"/scoring/signals": "all"}, "/scoring/signals", '"all" is refused'),
            ({"/scoring": None}, "/scoring", "null is refused"),
            ({"/budget": "fixed_budget@32"}, "/budget", '"fixed_budget@32" is refused'),
            ({"/safety/0": 5}, "/safety/0", "5 is refused"),
            ({"/name": 7}, "/name", "7 is refused"),
            ({"/name": "x" * 129}, "/name", f'"{"x" * 57}..." is refused'),
            ({"/$schema": 7}, "/$schema", "7 is refused"),
            ({"/safety/1": "deterministic"}, "/safety", '[{"atom": "preserve_budget"}, "determ'),
            ({"/budget/limit": 31}, "/budget/limit", "limit 31 is below the state's own K = 32"),
            (
                {"/constraints/selector/r_min": 33},
                "/constraints/selector/r_min",
                "r_min = 33 reference tokens cannot be kept of K = 32",
            ),
            ({"/provenance": {"seed": 0.5}}, "/provenance/seed", "0.5 is refused"),
            ({"/provenance": {"notes": ["a"] * 99}}, "/provenance/notes", '["a", "a"'),
        ],
    )
    def test_one_problem_is_told_with_its_place(
        self, changes: dict[str, object], where: str, what: str
    ) -> None:
        ((found, said),) = refused_with(changes)
        assert found == where and said.startswith(what)
        assert len(said) < 100

    @pytest.mark.parametrize(
        ("changes", "mend"),
        [
            (
                {"/scoring/signals/1/atom": "atention_proxy_saliency"},
                "did you mean 'attention_proxy_saliency'?",
            ),
            ({"/safety/0": "preserve_bugdet"}, "did you mean 'preserve_budget'?"),
            ({"/safety/0": "PRESERVE_BUDGET"}, "did you mean 'preserve_budget'?"),
            ({"/base_policy/name": "zzz"}, f"use one of: {', '.join(BASE_POLICIES)}"),
            (
                {"/reassembly/atom": "pairwise_cosine_kernal"},
                f"use one of: {', '.join(ATOMS.names('reassembly')[:12])}",
            ),
            ({"/budget/atom": 7}, "name it in a string"),
            ({"/reassembly/strength": 2}, "input should be less than or equal to 0.5"),
            ({"/scoring/kernel/atom": DELETE}, 'add "atom": "..."'),
            ({"/scoring/signals/0/wieght": 1}, "remove it: 'weight' is there already"),
            (
                {"/scoring/signals/1/temperature": DELETE, "/scoring/signals/1/temprature": 1},
                "did you mean 'temperature'?",
            ),
            ({"/budget/limit": DELETE, "/budget/Limit": 64}, "did you mean 'limit'?"),
            ({"/scoring/fussion": 1}, "remove it: 'fusion' is there already"),
            ({"/provenance": {"note": ""}}, "did you mean 'notes'?"),
            (
                {"/base_policy/params/theta": DELETE, "/base_policy/params/teta": 0.5},
                "did you mean 'theta'?",
            ),
            ({"/base_policy/parms": {}}, "remove it: 'params' is there already"),
            ({"/zzz": 1}, "remove it or correct its name"),
            ({"/provenance": DELETE, "/provenence": {}}, "did you mean 'provenance'?"),
            ({"/budget/limit": 31}, "write 32 or more, or null for no limit"),
            (
                {"/constraints/selector/r_min": 33},
                "write 32 or less, or null, which means K - q_e",
            ),
            ({"/safety/1": "deterministic"}, "list deterministic once"),
        ],
    )
    def test_each_problem_says_how_to_mend_it(self, changes: dict[str, object], mend: str) -> None:
        assert mended(changes) == mend or mended(changes).startswith(f"{mend}, ...")

    def test_an_atom_of_another_group_is_told_apart_from_a_typo(self) -> None:
        said = mended({"/reassembly/atom": "pairwise_cosine_kernel"})
        assert said.startswith("that is one of similarity_kernel, this field takes another group; ")

    def test_rules_about_two_fields_are_told_along_with_everything_else(self) -> None:
        found = refused_with(
            {
                "/name": 7,
                "/budget/limit": 16,
                "/constraints/selector/r_min": 100,
                "/constraints/pool": [],
            }
        )
        assert [where for where, _ in found] == [
            "/name",
            "/constraints/pool",
            "/budget/limit",
            "/constraints/selector/r_min",
        ]

    def test_a_rule_is_left_alone_where_what_it_reads_is_wrong(self) -> None:
        found = refused_with({"/budget/limit": 0, "/constraints/selector/r_min": -1})
        assert [where for where, _ in found] == ["/budget/limit", "/constraints/selector/r_min"]

    def test_all_problems_are_told_at_once(self) -> None:
        found = refused_with(
            {
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
        )
        assert [where for where, _ in found] == [
            "/base_policy/name",
            "/budget/limit",
            "/scoring/signals/0/weight",
            "/scoring/signals/1/atom",
            "/scoring/signals/2/sigma",
            "/scoring/kernel",
            "/constraints/selector/q_e",
            "/reassembly/power",
            "/safety/3",
            "/extra",
        ]

    def test_a_list_of_bad_items_is_not_also_called_too_short(self) -> None:
        found = refused_with({"/scoring/signals": [{"atom": "x"}, {"atom": "y"}]})
        assert [where for where, _ in found] == [
            "/scoring/signals/0/atom",
            "/scoring/signals/1/atom",
        ]

    @pytest.mark.parametrize("data", [{}, {"a": 1}, {"name": None}])
    def test_hardly_anything(self, data: dict[str, Any]) -> None:
        assert refused(json.dumps(data))[0][0] == "/schema"
        rest = {"schema": "autoprune-state/1", **data}
        assert len(refused(json.dumps(rest))) >= 7
