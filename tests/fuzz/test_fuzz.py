from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.fuzz.__main__ import main
from tests.fuzz.generator import MUTATIONS, Grammar, Json, Mutation, Place, make_text
from tests.fuzz.judge import Finding, Judge, plain, quick
from tests.tpdsl.samples import edited, sample
from vllm_autoprune import PruningState, StateError, load_state
from vllm_autoprune.tpdsl.registry import ATOMS

SCHEMA = PruningState.model_json_schema()


def test_a_sample_of_texts_is_judged_without_a_fault(tmp_path: Path) -> None:
    judge = Judge(tmp_path)
    findings = [judge.look(make_text(1, index)[0]) for index in range(400)]
    assert [finding.faults for finding in findings if finding.faults] == []
    # Valid and invalid texts must both be frequent for the sample to be informative.
    assert 60 < sum(finding.accepted for finding in findings) < 300
    assert len({kind for finding in findings for kind in finding.kinds}) >= 10


class TestGrammar:
    def test_generated_states_are_valid_under_the_schema(self) -> None:
        random, grammar, accepts = Random(0), Grammar(SCHEMA), plain(SCHEMA)
        drawn = [grammar.state(random) for _ in range(60)]
        assert sum(accepts(state) for state in drawn) > 40

    def test_every_atom_is_drawn(self) -> None:
        random, grammar = Random(0), Grammar(SCHEMA)
        text = json.dumps([grammar.state(random) for _ in range(2000)])
        assert [name for name in ATOMS.names() if json.dumps(name) not in text] == []


@pytest.mark.parametrize("mutation", dict.fromkeys(MUTATIONS), ids=lambda made: made.__name__)
def test_every_mutation_changes_states(mutation: Mutation) -> None:
    random, changed = Random(0), 0
    for _ in range(20):
        state = edited(sample(), {})
        before = repr(state)
        mutation(state, random)
        changed += repr(state) != before
        mutation(state, random)
    assert changed >= 10
    mutation({}, random)


def breakable(state: Json) -> Iterator[tuple[str, Place]]:
    """Places at which every wrong value must be reported: pointer, container and key."""

    def below(value: Any, where: str) -> Iterator[tuple[str, Place]]:
        for key in value if isinstance(value, dict) else range(len(value)):
            at = f"{where}/{key}"
            # A wrong version ends validation, scores accept any value, and with a wrong name the
            # fields beside it are not validated.
            if at not in ("/schema", "/provenance/scores") and key not in ("atom", "name"):
                yield at, (value, key)
                if isinstance(value[key], dict | list):
                    yield from below(value[key], at)

    return below(state, "")


def inside(where: str, other: str) -> bool:
    """True for a pointer to the same place, or to one within it."""
    return f"{where}/".startswith(f"{other}/")


def test_all_problems_are_reported_at_their_pointers() -> None:
    random, grammar = Random(0), Grammar(SCHEMA)
    for _ in range(150):
        state = grammar.state(random)
        places, broken = list(breakable(state)), list[str]()
        for where, (container, key) in random.sample(places, min(12, len(places))):
            if not any(inside(where, other) or inside(other, where) for other in broken):
                container[key] = {"wrong": 1}
                broken.append(where)
        with pytest.raises(StateError) as raised:
            load_state(json.dumps(state))
        report = {problem.where for problem in raised.value.problems}
        # An object in place of an object is reported at its fields.
        assert [b for b in broken if not {b, f"{b}/wrong"} & report] == []


class TestJudge:
    def look(self, tmp_path: Path, text: str | bytes) -> Finding:
        return Judge(tmp_path).look(text, fully=True)

    def test_a_valid_state(self, tmp_path: Path) -> None:
        actual = self.look(tmp_path, json.dumps(sample()))
        assert actual.accepted and actual.valid and not actual.faults and not actual.broken
        assert "mean_residual" in actual.atoms

    @pytest.mark.parametrize(
        ("text", "kind"), [("[", "syntax"), (b"\xff\xfe{\0}\0", "encoding"), ("{}", "version")]
    )
    def test_a_refusal(self, tmp_path: Path, text: str | bytes, kind: str) -> None:
        actual = self.look(tmp_path, text)
        assert not actual.accepted and actual.kinds == (kind,) and not actual.faults

    def test_other_exceptions_of_the_loader_are_faults(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(_: object) -> PruningState:
            raise KeyError("x")

        monkeypatch.setattr("tests.fuzz.judge.load_state", broken)
        assert self.look(tmp_path, "{}").faults == ["loader raised KeyError: 'x'"]

    def test_loader_accepting_invalid_states_is_a_fault(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tests.fuzz.judge.load_state", lambda _: load_state("autoprune"))
        bad = json.dumps(edited(sample(), {"/reassembly/strength": 2}))
        assert self.look(tmp_path, bad).faults[0] == "schema refuses it, the loader says yes"
        assert self.look(tmp_path, "{,").faults[0] == "text is no JSON, but the loader accepts it"

    def test_loader_refusing_valid_states_is_a_fault(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def strict(_: object) -> PruningState:
            return load_state("{}")

        monkeypatch.setattr("tests.fuzz.judge.load_state", strict)
        actual = self.look(tmp_path, json.dumps(sample()))
        assert actual.faults == ["schema accepts it, the loader says ('version',)"]

    def test_empty_message_is_a_fault(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def silent(_: object) -> PruningState:
            raise StateError("state\x1b[2J", [])

        monkeypatch.setattr("tests.fuzz.judge.load_state", silent)
        assert len(self.look(tmp_path, "{,").faults) == 2

    def test_exception_of_the_safety_check_is_a_fault(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def raises(*_: object) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr("tests.fuzz.judge.safety_check", raises)
        actual = self.look(tmp_path, json.dumps(sample()))
        assert actual.faults == ["after loading: RuntimeError: out of memory"]


def test_quick_schema_verdict_equals_the_full_one() -> None:
    quickly, plainly, seen = quick(SCHEMA), plain(SCHEMA), set()
    for index in range(150):
        content, _ = make_text(2, index)
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            continue
        if len(content) < 20_000:
            assert quickly(value) == plainly(value)
            seen.add(plainly(value))
    assert seen == {True, False}


def test_the_command_judges_texts_and_counts_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--count", "20", "--seed", "3"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("0 faults")
    texts = [make_text(3, index)[0] for index in range(6)]
    assert texts == [make_text(3, index)[0] for index in range(6)] and len(set(texts)) == 6
