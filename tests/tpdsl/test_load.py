from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.tpdsl.samples import DELETE, edited, shipped
from vllm_autoprune import StateError, load_state
from vllm_autoprune.tpdsl.load import MAX_BYTES, shipped_states


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

    @pytest.mark.parametrize("source", ["\0", "missing.json", "a/b/c.json", Path("nowhere")])
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

        monkeypatch.setattr(Path, "read_text", denied)
        assert refused(file) == [("", "cannot be read (Permission denied)")]

    def test_a_folder_that_may_not_be_searched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def denied(_: Path) -> NoReturn:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "is_file", denied)
        assert refused("folder/s.json") == [("", "cannot be read (Permission denied)")]

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

    def test_too_large(self, tmp_path: Path) -> None:
        content = json.dumps(shipped()).encode()
        just = content + b" " * (MAX_BYTES - len(content))
        (tmp_path / "just.json").write_bytes(just)
        assert load_state(tmp_path / "just.json").name == "autoprune"
        assert self.in_file(tmp_path, just + b" ") == [("", "larger than 1048576 bytes")]

    @pytest.mark.parametrize(
        ("content", "what"),
        [
            ("", "not JSON: Expecting value at line 1 col 1"),
            ("schema: autoprune", "not JSON: Expecting value at line 1 col 1"),
            ("[]", "a state is a JSON object, not a list"),
            ("null", "a state is a JSON object, not a NoneType"),
            ('"{}"', "a state is a JSON object, not a str"),
            ('{"schema": 1,}', "not JSON: "),
            ('{"schema": 1} {}', "not JSON: Extra data at line 1 col 15"),
            ('{"a": NaN}', "not JSON: NaN is not a JSON number"),
            ('{"a": -Infinity}', "not JSON: -Infinity is not a JSON number"),
            ('{"a": ' + "9" * 5000 + "}", "not JSON: Exceeds the limit"),
            ('{"a": 1, "b": {"c": 1, "c": 2}}', "key 'c' occurs twice in one object"),
            ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "not JSON: nested too deeply"),
            ('{"a":' * 100_000 + "1" + "}" * 100_000, "not JSON: nested too deeply"),
        ],
    )
    def test_what_is_not_one_json_object(self, tmp_path: Path, content: str, what: str) -> None:
        ((where, said),) = self.in_file(tmp_path, content.encode())
        assert where == "" and said.startswith(what)

    @pytest.mark.parametrize("depth", [100, 300, 700, 950])
    def test_deep_nesting_that_json_still_reads(self, depth: int) -> None:
        deep = json.loads("[" * depth + "]" * depth)
        assert refused_with({"/reassembly/strength": deep})[0][0] == "/reassembly/strength"


class TestVersion:
    @pytest.mark.parametrize(
        ("version", "said"),
        [
            (DELETE, "missing"),
            (None, "missing"),
            ("autoprune-state/2", "'autoprune-state/2' is not known"),
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
                "unknown atom 'attention_proxy_salience'",
            ),
            ({"/base_policy/name": "cdprune"}, "/base_policy/name", "unknown name 'cdprune'"),
            ({"/budget/atom": "fixed_budget@33"}, "/budget/atom", "unknown atom 'fixed_budget@33'"),
            ({"/budget/atom": 32}, "/budget/atom", "unknown atom '32'"),
            # An atom of another group is as unknown here as one that does not exist.
            ({"/reassembly/atom": "pairwise_cosine_kernel"}, "/reassembly/atom", "unknown atom"),
            ({"/safety/1": "mean_residual"}, "/safety/1", "unknown atom 'mean_residual'"),
            ({"/safety/1": {"atom": "x"}}, "/safety/1/atom", "unknown atom 'x'"),
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
            ({"/scoring/signals/0/sign": "±"}, "/scoring/signals/0/sign", "'±' is refused"),
            ({"/scoring/signals/0/weight": "0.4"}, "/scoring/signals/0/weight", "'0.4' is refused"),
            ({"/scoring/signals/0/weight": True}, "/scoring/signals/0/weight", "True is refused"),
            ({"/constraints/selector/q_e": True}, "/constraints/selector/q_e", "True is refused"),
            ({"/constraints/selector/q_e": 2.0}, "/constraints/selector/q_e", "2.0 is refused"),
            ({"/constraints/selector/q_e": "2"}, "/constraints/selector/q_e", "'2' is refused"),
            ({"/constraints/selector/r_min": -1}, "/constraints/selector/r_min", "-1 is refused"),
            ({"/base_policy/params/theta": 1}, "/base_policy/params/theta", "1 is refused"),
            ({"/scoring/signals": []}, "/scoring/signals", "[] is refused"),
            ({"/scoring/signals": {}}, "/scoring/signals", "{} is refused"),
            ({"/scoring/signals": "all"}, "/scoring/signals", "'all' is refused"),
            ({"/scoring": None}, "/scoring", "None is refused"),
            ({"/budget": "fixed_budget@32"}, "/budget", "'fixed_budget@32' is refused"),
            ({"/safety/0": 5}, "/safety/0", "5 is refused"),
            ({"/name": 7}, "/name", "7 is refused"),
            ({"/name": "\ud800"}, "/name", "'\\ud800' is refused"),
            ({"/provenance": {"seed": 0.5}}, "/provenance/seed", "0.5 is refused"),
            ({"/provenance": {"notes": ["a"] * 99}}, "/provenance/notes", "['a', 'a'"),
        ],
    )
    def test_one_problem_is_told_with_its_place(
        self, changes: dict[str, object], where: str, what: str
    ) -> None:
        ((found, said),) = refused_with(changes)
        assert found == where and said.startswith(what)
        assert len(said) < 100

    @pytest.mark.parametrize("pointer", ["/provenance", "/reassembly/strength"])
    def test_a_number_too_large_for_a_float(self, pointer: str) -> None:
        value: object = {"scores": {"gqa": 12321}} if pointer == "/provenance" else 12321
        text = json.dumps(edited(shipped(), {pointer: value})).replace("12321", "1e999")
        ((where, what),) = refused(text)
        assert where in ("/provenance/scores/gqa", "/reassembly/strength")
        assert what == "inf is refused"

    @pytest.mark.parametrize(
        ("changes", "mend"),
        [
            (
                {"/scoring/signals/1/atom": "atention_proxy_saliency"},
                "did you mean 'attention_proxy_saliency'?",
            ),
            ({"/safety/0": "preserve_bugdet"}, "did you mean 'preserve_budget'?"),
            ({"/base_policy/name": "zzz"}, "use one of: cdpruner, divprune"),
            ({"/reassembly/strength": 2}, "input should be less than or equal to 0.5"),
            ({"/scoring/kernel/atom": DELETE}, 'add "atom": "..."'),
        ],
    )
    def test_each_problem_says_how_to_mend_it(self, changes: dict[str, object], mend: str) -> None:
        assert mended(changes) == mend

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
