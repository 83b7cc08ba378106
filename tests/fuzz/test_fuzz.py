"""The loader on generated states, and what its judge tells of a loader that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.fuzz.__main__ import judge, main
from tests.fuzz.generator import (
    MUTATIONS,
    REQUEST_KINDS,
    Place,
    draw_request,
    draw_state,
    draw_text,
    mutate_at_random_place,
    state_schema,
)
from tests.tpdsl.samples import edited, sample
from vllm_autoprune import StateError, load_state
from vllm_autoprune.tpdsl.registry import ATOMS


def test_a_sample_of_texts_is_judged_without_a_fault(tmp_path: Path) -> None:
    findings = [judge(draw_text(1, n)[0], tmp_path / "s", fully=n % 20 == 0) for n in range(400)]
    assert [finding.faults for finding in findings if finding.faults] == []
    # Valid and invalid texts must both be frequent for the sample to be informative.
    assert 60 < sum(finding.state is not None for finding in findings) < 300
    assert len({kind for finding in findings for kind in finding.kinds}) >= 10


def test_drawn_states_are_mostly_valid_and_have_every_atom() -> None:
    states = [draw_state(Random(number)) for number in range(2000)]
    accepts = jsonschema.Draft202012Validator(state_schema()).is_valid
    assert sum(map(accepts, states[:60])) > 40
    text = json.dumps(states)
    assert [name for name in ATOMS.names() if json.dumps(name) not in text] == []


@pytest.mark.parametrize("mutation", dict.fromkeys(MUTATIONS))
def test_every_mutation_changes_states(mutation: str) -> None:
    random, changed = Random(0), 0
    for _ in range(20):
        state = edited(sample(), {})
        mutate_at_random_place(mutation, state, random)
        changed += repr(state) != repr(sample())
    assert changed >= 10
    mutate_at_random_place(mutation, {}, random)


def test_every_kind_of_request_is_drawn_and_repeated_by_its_seed() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "text", "text": "a"}]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    requests, again = (
        [draw_request([body], Random(f"0/{n}"), ("m", "adapter")) for n in range(150)]
        for _ in range(2)
    )
    assert [request.content for request in requests] == [request.content for request in again]
    assert {request.kind for request in requests} - {"spoilt"} == set(REQUEST_KINDS)


def breakable(value: Any, where: str = "") -> Iterator[tuple[str, Place]]:
    """Places at which every wrong value must be reported: pointer, container and key."""
    for key in value if isinstance(value, dict) else range(len(value)):
        at = f"{where}/{key}"
        # A wrong version ends validation, scores accept any value, and with a wrong name the
        # fields beside it are not validated.
        if at not in ("/schema", "/provenance/scores") and key not in ("atom", "name"):
            yield at, (value, key)
            if isinstance(value[key], dict | list):
                yield from breakable(value[key], at)


def test_all_problems_are_reported_at_their_pointers() -> None:
    random = Random(0)
    for _ in range(150):
        state = draw_state(random)
        places, broken = list(breakable(state)), list[str]()
        for where, (container, key) in random.sample(places, min(12, len(places))):
            nested = (f"{where}/".startswith(f"{other}/") for other in broken)
            if not any(nested) and not any(f"{b}/".startswith(f"{where}/") for b in broken):
                container[key] = {"wrong": 1}
                broken.append(where)
        with pytest.raises(StateError) as raised:
            load_state(json.dumps(state))
        reported = {problem.where for problem in raised.value.problems}
        # An object in place of an object is reported at its fields.
        assert [b for b in broken if not {b, f"{b}/wrong"} & reported] == []


def raising(error: Exception) -> Callable[..., Any]:
    def load(*_: object) -> Any:
        raise error

    return load


SHIPPED = load_state("autoprune")
BAD = json.dumps(edited(sample(), {"/reassembly/strength": 2}))
FAULTS: dict[str, tuple[str, Callable[..., Any], str, list[str]]] = {
    "another exception": (
        *("load_state", raising(KeyError("x")), "{}"),
        ["loader raised KeyError: 'x'"],
    ),
    "accepts an invalid state": (
        *("load_state", lambda _: SHIPPED, BAD),
        ["schema refuses it, the loader says yes"],
    ),
    "accepts what is no JSON": (
        *("load_state", lambda _: SHIPPED, "{,"),
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
"""What is replaced by what, a text, and the faults that are then reported."""


@pytest.mark.parametrize("case", FAULTS)
def test_faults_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    name, replacement, text, faults = FAULTS[case]
    monkeypatch.setattr(f"tests.fuzz.__main__.{name}", replacement)
    assert judge(text, tmp_path / "state.json", fully=True).faults[: len(faults)] == faults


@pytest.mark.parametrize(
    ("text", "kind"), [("[", "syntax"), (b"\xff\xfe{\0}\0", "encoding"), ("{}", "version")]
)
def test_refusals_are_no_faults(tmp_path: Path, text: str | bytes, kind: str) -> None:
    finding = judge(text, tmp_path / "state.json", fully=True)
    assert finding.state is None and finding.kinds == (kind,) and not finding.faults


def test_the_command_judges_texts_and_counts_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--count", "20", "--seed", "3"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("0 faults")
    texts: list[object] = [draw_text(3, index)[0] for index in range(6)]
    assert texts == [draw_text(3, index)[0] for index in range(6)] and len({*map(repr, texts)}) == 6
