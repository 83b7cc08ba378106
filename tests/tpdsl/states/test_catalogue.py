from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from pydantic import ValidationError

from vllm_autoprune.tpdsl.atoms.reassembly import RECIPES
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.reference import (
    CORE_POLICIES,
    PLACES,
    list_parameters,
    render_page,
    render_proposer_text,
)
from vllm_autoprune.tpdsl.registry import ATOMS, AtomCall
from vllm_autoprune.tpdsl.state import Core

BY_CALL = [(name, p) for name in ATOMS.names() for p in list_parameters(ATOMS[name].call)]


def test_every_atom_has_exactly_one_place_in_a_state() -> None:
    assert Counter(name for place in PLACES for name in place.names) == Counter(ATOMS.names())


def test_the_page_has_one_row_an_atom_and_counts_them() -> None:
    rows = re.findall(
        r"^\| `([^`]+)` \| (?:printed|listed|extension) ", render_page(), re.MULTILINE
    )
    assert Counter(rows) == Counter(ATOMS.names())
    sizes = re.findall(
        r"^\| \[\w+\]\(#(\w+)\) \| \w+ \| (\d+) \| (\d+) ", render_page(), re.MULTILINE
    )
    assert [int(size) for _, size, _ in sizes] == [6, 10, 10, 2, 3, 6, 9, 81, 4]
    assert sum(int(ours) for _, _, ours in sizes) == len(ATOMS) - 131


def test_prompt_names_every_atom_and_parameter() -> None:
    report = render_proposer_text()
    names = set(BASE_POLICIES) | {name for name in ATOMS.names() if name not in RECIPES}
    assert all(f"- {name}: " in report for name in names)
    assert all(place.pointer in report for place in PLACES)
    for name, parameter in BY_CALL:
        assert f"{parameter.name} = {parameter.default} ({parameter.values}: " in report, name


def test_prompt_explains_the_names_of_the_81_reassemblies() -> None:
    report = render_proposer_text()
    levels = [recipe.cell.split(".") for recipe in RECIPES.values()]
    for axis in zip(*levels, strict=True):
        assert all(f"{level}: " in report for level in axis)
    for name, recipe in RECIPES.items():
        assert name == f"reassemble/{recipe.cell}" or f"- {name} is {recipe.cell}\n" in report


@pytest.mark.parametrize("name", ATOMS.names())
def test_stated_ranges_and_defaults_are_those_of_the_call(name: str) -> None:
    """Both ends of a stated range are accepted, a step beyond is not."""
    call = ATOMS[name].call
    for parameter in list_parameters(call):
        assert accepts(call, parameter.name, json.loads(parameter.default))
        actual = re.match(r"(integer|number) (\S+)(?: to (\S+))?( or null)?$", parameter.values)
        if actual is None:
            continue
        least, most = float(actual[2]), float(actual[3] or actual[2])
        for value, inside in ((least, True), (most, True), (least - 1, False), (most + 1, False)):
            given = int(value) if actual[1] == "integer" else value
            assert accepts(call, parameter.name, given) is inside, (parameter, given)
        assert accepts(call, parameter.name, None) is bool(actual[4])


def accepts(call: type[AtomCall], name: str, value: object) -> bool:
    try:
        atom = call.model_json_schema()["properties"]["atom"]["const"]
        call.model_validate_json(json.dumps({"atom": atom, name: value}))
    except ValidationError:
        return False
    return True


def test_page_and_prompt_describe_the_core_as_an_extension() -> None:
    page, prompt = render_page(), render_proposer_text()
    for name, field in Core.model_fields.items():
        assert f"| `{name}` |" in page.partition("## core")[2]
        assert f"- {name} = " in prompt.partition("core (/core), an extension")[2]
        assert str(field.description) in page and str(field.description) in prompt
    assert "## core\n\nExtension" in page
    readers = {"cdpruner", "dart", "fastv", "pyramiddrop", "sparsevlm", "trim"}
    assert set(CORE_POLICIES) == set(BASE_POLICIES) - readers
    assert "/core" not in render_proposer_text(("scoring", "constraints", "reassembly"))
    assert "/core" in render_proposer_text(("scoring", "core"))
