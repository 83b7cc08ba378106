"""Descriptions of atoms: they say what a call's parameters make of its atom."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.tpdsl.samples import shipped
from vllm_autoprune.cli.description import list_parts
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.registry import ATOMS, AtomCall
from vllm_autoprune.tpdsl.state import PruningState

BOUNDS = {"r_min", "limit"}
"""Parameters that may be null and then follow from others, which makes an atom no other one."""
OFF = {"strength": 0.0, "margin": 2.0, "weight": 0.0, "beta": 0.0}
"""Parameter -> value with which the atom, or a part of it, does nothing."""


def make(name: str, **values: object) -> AtomCall:
    """A call whose rows change, if it is of reassembly, with other ``values``."""
    fields = ATOMS[name].call.parameters()
    changing = {"strength": 0.5} if ATOMS[name].group == "reassembly" else {}
    changing |= {"margin": 0.5} if ATOMS[name].group == "reassembly" else {}
    used = {name: value for name, value in changing.items() if name in fields}
    return ATOMS[name].call.model_validate({"atom": name, **used, **values})


def list_kinds(name: str) -> Iterator[tuple[str, list[object]]]:
    """Parameters of an atom that choose between kinds of it, each with one value of each kind."""
    schema: dict[str, Any] = ATOMS[name].call.model_json_schema()["properties"]
    for parameter, field in schema.items():
        if parameter in BOUNDS or parameter == "atom":
            continue
        if "enum" in field:
            yield parameter, field["enum"]
        elif field.get("type") == "boolean":
            yield parameter, [False, True]
        elif "anyOf" in field:
            yield parameter, [None, field["anyOf"][0]["minimum"]]
    if "p" in schema:  # of a norm: two kinds under one range of numbers
        yield "p", [1, 2]


CASES = [
    pytest.param(name, parameter, values, id=f"{name}-{parameter}")
    for name in ATOMS
    for parameter, values in list_kinds(name)
]


@pytest.mark.parametrize(("name", "parameter", "values"), CASES)
def test_each_kind_of_an_atom_is_described_as_it_is(
    name: str, parameter: str, values: list[object]
) -> None:
    calls = [make(name, **{parameter: value}) for value in values]
    sentences = [ATOMS.describe(call) for call in calls]
    assert len(set(sentences)) == len(values)
    assert all(sentence[-1] == "." and len(sentence) < 200 for sentence in sentences)
    if ATOMS[name].group == "scoring" and parameter not in ("sign", "reduce"):
        # Names of maps; a relevance of any sign has one name.
        assert len({call.title for call in calls}) == len(values)  # type: ignore[attr-defined]


def test_the_kinds_of_every_group_are_tried() -> None:
    tried = {case.values[0] for case in CASES}
    groups = {ATOMS[str(name)].group for name in tried}
    without = {"budget_control", "safety_checks"}
    assert groups == {atom.group for atom in ATOMS.values()} - without
    assert len(CASES) > 20


@pytest.mark.parametrize("name", ATOMS)
def test_a_call_that_does_nothing_says_so(name: str) -> None:
    fields = ATOMS[name].call.parameters()
    for parameter, value in OFF.items():
        if parameter in fields and ATOMS[name].group in (
            "reassembly",
            "token_source_base_policy",
            "score_fusion",
        ):
            off = make(name, **{parameter: value})
            assert ATOMS.describe(off) != ATOMS.describe(make(name))


@pytest.mark.parametrize("name", ATOMS)
def test_only_a_call_that_reads_the_question_is_said_to(name: str) -> None:
    calls = [make(name)]
    for parameter, values in list_kinds(name):
        calls += [make(name, **{parameter: value}) for value in values]
    for call in calls:
        text = ATOMS.describe(call).replace("reads no question", "")
        reads = ATOMS[name].needs_of(call) & {"instruction", "words"}
        if not reads and ATOMS[name].group == "scoring":
            assert "instruction" not in text and "question" not in text


def test_a_shipped_state_is_shown_as_its_parameters_make_it() -> None:
    state = PruningState.model_validate(shipped("autoprune"))
    parts = list_parts(materialize(state))
    texts = " ".join(part.doc for field in parts.values() for part in field)
    for words in (
        "reads no question",
        "reads no attention",
        "Exponential fall",
        "all other tokens",
        "four neighbours",
        "(1 + cosine) / 2",
        "whatever is gained",
        "by place and likeness",
    ):
        assert words in texts, words
