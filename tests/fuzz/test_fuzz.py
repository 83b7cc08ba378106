"""The loader on generated states, and a negative control of its judge."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.fuzz.__main__ import FAULT, judge, main
from tests.fuzz.generator import REQUEST_KINDS, draw_request, draw_state, draw_text
from tests.tpdsl.samples import edited, sample
from vllm_autoprune import StateError, load_state
from vllm_autoprune.tpdsl.registry import ATOMS


def test_a_sample_of_texts_is_judged_without_a_fault(tmp_path: Path) -> None:
    judged = [judge(draw_text(1, n)[0], tmp_path / "s", fully=n % 20 == 0) for n in range(400)]
    counts = Counter(outcome for outcomes in judged for outcome in outcomes)
    assert [outcome for outcome in counts if outcome.startswith(FAULT)] == []
    # Valid and invalid texts must both be frequent for the sample to be informative.
    assert 60 < counts["accepted"] < 300
    assert sum(outcome.startswith("refused") for outcome in counts) >= 10


def test_drawn_states_have_every_atom() -> None:
    text = json.dumps([draw_state(Random(number)) for number in range(2000)])
    assert [name for name in ATOMS.names() if json.dumps(name) not in text] == []


def test_every_kind_of_request_is_drawn_and_repeated_by_its_seed() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "text", "text": "a"}]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    requests, again = (
        [draw_request([body], Random(f"0/{n}"), ("m", "adapter")) for n in range(150)]
        for _ in range(2)
    )
    assert [request.content for request in requests] == [request.content for request in again]
    assert {request.kind for request in requests} - {"spoilt"} == set(REQUEST_KINDS)


def breakable(value: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Places at which every wrong value must be reported: pointer, container and key."""
    for key in value if isinstance(value, dict) else range(len(value)):
        at = f"{where}/{key}"
        # A wrong version ends validation, scores accept any value, and with a wrong name the
        # fields beside it are not validated.
        if at not in ("/schema", "/provenance/scores") and key not in ("atom", "name"):
            yield at, value, key
            if isinstance(value[key], dict | list):
                yield from breakable(value[key], at)


def test_all_problems_are_reported_at_their_pointers() -> None:
    random = Random(0)
    for _ in range(150):
        state = draw_state(random)
        places, broken = list(breakable(state)), list[str]()
        for where, container, key in random.sample(places, min(12, len(places))):
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
FAULTS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "KeyError: 'x'": ("load_state", raising(KeyError("x")), "{}"),
    "schema refuses it, the loader accepts it": ("load_state", lambda _: SHIPPED, BAD),
    "text is no JSON, but the loader accepts it": ("load_state", lambda _: SHIPPED, "{,"),
    "schema accepts it, the loader refuses it for ['version']": (
        *("load_state", lambda _: load_state("{}"), json.dumps(sample())),
    ),
    "message is too long, or does not print": (
        *("load_state", raising(StateError("state\x1b[2J", [])), "{,"),
    ),
    "RuntimeError: out of memory": (
        *("safety_check", raising(RuntimeError("out of memory")), json.dumps(sample())),
    ),
}
"""A fault that is reported, where a function is replaced by another one, of a text."""


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    name, replacement, text = FAULTS[fault]
    monkeypatch.setattr(f"tests.fuzz.__main__.{name}", replacement)
    assert FAULT + fault in judge(text, tmp_path / "state.json", fully=True)


def test_the_command_judges_texts_and_counts_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--count", "20", "--seed", "3"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("0 faults")
