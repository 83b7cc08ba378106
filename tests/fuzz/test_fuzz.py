from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.fuzz import campaign as campaign_module
from tests.fuzz.__main__ import main, report
from tests.fuzz.campaign import Campaign, Run
from tests.fuzz.grammar import Grammar, Json
from tests.fuzz.judge import Finding, Judge
from tests.fuzz.mutate import MUTATIONS, Mutation, Place
from tests.fuzz.schema import plain, quick
from tests.fuzz.tally import Tally
from tests.tpdsl.samples import edited, sample
from vllm_autoprune import PruningState, StateError, load_state
from vllm_autoprune.tpdsl.registry import ATOMS

SCHEMA = PruningState.model_json_schema()


def test_a_sample_of_texts_is_judged_without_a_fault(tmp_path: Path) -> None:
    campaign, judge, tally = Campaign(seed=1, count=400, full_every=10**9), Judge(tmp_path), Tally()
    for index in range(campaign.count):
        content, _ = campaign.text(index)
        tally.add(index, judge.look(content), fully=False)
    assert tally.faults == []
    # Valid and invalid texts must both be frequent for the sample to be informative.
    assert tally.accepted > 60 and tally.texts - tally.accepted > 100
    assert len(tally.refused) >= 10


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
    campaign = Campaign(seed=2, count=150, full_every=10**9)
    quickly, plainly, seen = quick(SCHEMA), plain(SCHEMA), set()
    for index in range(campaign.count):
        content, _ = campaign.text(index)
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            continue
        if len(content) < 20_000:
            assert quickly(value) == plainly(value)
            seen.add(plainly(value))
    assert seen == {True, False}


class TestRun:
    def campaign(self, count: int = 6) -> Campaign:
        return Campaign(seed=3, count=count, full_every=10**9)

    def quietly(self, _: Tally) -> None:
        """Report no progress."""

    def test_text_is_determined_by_its_index(self) -> None:
        texts = [self.campaign().text(index)[0] for index in range(6)]
        assert texts == [self.campaign(99).text(index)[0] for index in range(6)]
        assert len(set(texts)) == 6

    def test_blocks_add_up_and_are_resumed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(campaign_module, "BLOCK", 2)
        whole = Run(self.campaign(), tmp_path / "a.jsonl", jobs=2).run(self.quietly)
        assert whole.texts == 6 and whole.faults == []
        Run(self.campaign(4), tmp_path / "b.jsonl").run(self.quietly)
        resumed = Run(self.campaign(), tmp_path / "b.jsonl")
        assert resumed.tally.texts == 4
        assert resumed.run(self.quietly).refused == whole.refused

    def test_journal_of_another_language_is_refused(self, tmp_path: Path) -> None:
        Run(self.campaign(), tmp_path / "a.jsonl").run(self.quietly)
        other = Campaign(seed=4, count=6, full_every=10**9)
        assert Run(self.campaign(), tmp_path / "a.jsonl").tally.texts == 6
        assert Run(other, tmp_path / "a.jsonl").tally.texts == 0

    def test_crashed_process_is_a_fault_and_the_run_continues(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = Campaign.text

        def deadly(campaign: Campaign, index: int) -> tuple[str | bytes, list[str]]:
            if index == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return text(campaign, index)

        monkeypatch.setattr(Campaign, "text", deadly)
        tally = Run(self.campaign(), tmp_path / "a.jsonl").run(self.quietly)
        assert tally.texts == 6
        assert tally.faults == [(2, f"crash: exit code {-signal.SIGKILL}")]
        assert "1 crashes" in report(tally, 500)

    def test_hanging_process_is_a_fault_and_the_run_continues(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = Campaign.text

        def slow(campaign: Campaign, index: int) -> tuple[str | bytes, list[str]]:
            if index == 2:
                signal.pause()
            return text(campaign, index)

        monkeypatch.setattr(Campaign, "text", slow)
        monkeypatch.setattr(campaign_module, "PATIENCE", 3.0)
        tally = Run(self.campaign(), tmp_path / "a.jsonl").run(self.quietly)
        assert tally.texts == 6 and tally.faults == [(2, "crash: hangs")]


def test_the_command_counts_and_shows_one_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = ["--journal", str(tmp_path / "j.jsonl")]
    assert main(["--count", "20", "--seed", "5", *journal]) == 0
    printed = capsys.readouterr().out
    assert "20 texts: " in printed and "0 crashes or hangs, 0 unknown exceptions" in printed
    assert main(["--only", "7", "--seed", "5"]) == 0
    assert "made by: " in capsys.readouterr().out
