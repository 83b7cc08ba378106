from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.fuzz.__main__ import main
from tests.fuzz.generator import MUTATIONS, Grammar, Json, Mutation, Place, make_text
from tests.fuzz.judge import Judge
from tests.tpdsl.samples import edited, sample
from vllm_autoprune import PruningState, StateError, load_state
from vllm_autoprune.tpdsl.registry import ATOMS

SCHEMA = PruningState.model_json_schema()


def test_a_sample_of_texts_is_judged_without_a_fault(tmp_path: Path) -> None:
    judge = Judge(tmp_path)
    findings = [judge.look(make_text(1, n)[0], fully=n % 20 == 0) for n in range(400)]
    assert [finding.faults for finding in findings if finding.faults] == []
    # Valid and invalid texts must both be frequent for the sample to be informative.
    assert 60 < sum(finding.accepted for finding in findings) < 300
    assert len({kind for finding in findings for kind in finding.kinds}) >= 10


def test_generated_states_are_mostly_valid_and_have_every_atom() -> None:
    random, grammar = Random(0), Grammar(SCHEMA)
    accepts = jsonschema.Draft202012Validator(SCHEMA).is_valid
    assert sum(accepts(grammar.state(random)) for _ in range(60)) > 40
    text = json.dumps([grammar.state(random) for _ in range(2000)])
    assert [name for name in ATOMS.names() if json.dumps(name) not in text] == []


@pytest.mark.parametrize("mutation", dict.fromkeys(MUTATIONS), ids=lambda each: each.__name__)
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


def raising(error: Exception) -> Callable[..., Any]:
    def load(*_: object) -> Any:
        raise error

    return load


BAD = json.dumps(edited(sample(), {"/reassembly/strength": 2}))
BROKEN: dict[str, tuple[str, Callable[..., Any], str, list[str]]] = {
    "another exception": (
        *("load_state", raising(KeyError("x")), "{}"),
        ["loader raised KeyError: 'x'"],
    ),
    "accepts an invalid state": (
        *("load_state", lambda _: load_state("autoprune"), BAD),
        ["schema refuses it, the loader says yes"],
    ),
    "accepts what is no JSON": (
        *("load_state", lambda _: load_state("autoprune"), "{,"),
        ["text is no JSON, but the loader accepts it"],
    ),
    "refuses a valid state": (
        *("load_state", lambda _: load_state("{}"), json.dumps(sample())),
        ["schema accepts it, the loader says ('version',)"],
    ),
    "an empty message that does not print": (
        *("load_state", raising(StateError("state\x1b[2J", [])), "{,"),
        ["refused without a problem", "message is too long, or does not print"],
    ),
    "a safety check that raises": (
        *("safety_check", raising(RuntimeError("out of memory")), json.dumps(sample())),
        ["after loading: RuntimeError: out of memory"],
    ),
}
"""What is replaced by what, a text, and the faults that are then told."""


@pytest.mark.parametrize("case", BROKEN)
def test_faults_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    name, replacement, text, faults = BROKEN[case]
    monkeypatch.setattr(f"tests.fuzz.judge.{name}", replacement)
    assert Judge(tmp_path).look(text, fully=True).faults[: len(faults)] == faults


@pytest.mark.parametrize(
    ("text", "kind"), [("[", "syntax"), (b"\xff\xfe{\0}\0", "encoding"), ("{}", "version")]
)
def test_refusals_are_no_faults(tmp_path: Path, text: str | bytes, kind: str) -> None:
    finding = Judge(tmp_path).look(text, fully=True)
    assert not finding.accepted and finding.kinds == (kind,) and not finding.faults


def test_the_command_judges_texts_and_counts_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--count", "20", "--seed", "3"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("0 faults")
    texts = [make_text(3, index)[0] for index in range(6)]
    assert texts == [make_text(3, index)[0] for index in range(6)] and len(set(texts)) == 6
