"""PruningState: round trips, digests, JSON Schema, and the reference that is made of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from pydantic import ValidationError

from tests.tpdsl.samples import DELETE, Json, edited, sample, state
from vllm_autoprune import PruningState, StateError, load_state, materialize
from vllm_autoprune.tpdsl.atoms.reassembly import RECIPES
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import shipped_states
from vllm_autoprune.tpdsl.reference import (
    CORE_POLICIES,
    PLACES,
    list_parameters,
    render_page,
    render_proposer_text,
)
from vllm_autoprune.tpdsl.registry import ATOMS, AtomCall
from vllm_autoprune.tpdsl.state import Core

SCHEMA = PruningState.model_json_schema()

# The state with every parameter that any of its atoms takes written out, defaults or not.
EVERYTHING = edited(
    sample(),
    {
        "/scoring/kernel": {
            "atom": "runtime_conditional_similarity_kernel",
            "theta": None,
            "eps": 1e-6,
        },
        "/constraints/selector": {"atom": "anchor_controlled_pool_dpp_selector", "q_e": 2},
    },
)

# A value other than the default, or than the shipped one, for each parameter.
OTHERWISE: dict[str, object] = {
    "weight": 0.77,
    "sign": "+",
    "reduce": "max",
    "temperature": 2.0,
    "sigma": 0.9,
    "m": 5,
    "radius": 2,
    "theta": 0.5,
    "eps": 1e-4,
    "limit": 640,
    "pool_ratio": 0.75,
    "q_e": 3,
    "r_min": 7,
    "strength": 0.25,
    "repeats": 4,
    "clamp_negative": True,
    "tile_scope": "global",
    "cells": 7,
}


def leaves(value: Any, pointer: str = "") -> Iterator[str]:
    """JSON pointers of every plain value."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            yield from leaves(inner, f"{pointer}/{key}")
    else:
        yield pointer


def integers(schema: Any) -> Iterator[Json]:
    """Yield every subschema of type integer."""
    if isinstance(schema, dict):
        if schema.get("type") == "integer":
            yield schema
        for inner in schema.values():
            yield from integers(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from integers(inner)


def parsed(data: Json) -> PruningState:
    return load_state(json.dumps(data))


def written_out(data: Json) -> Json:
    """The state with every default stated, without what is outside the digest."""
    full = parsed(data).model_dump(mode="json", exclude={"provenance"})
    return full


BEHAVIOUR = [
    (source, pointer)
    for source, data in (("shipped", sample()), ("everything", EVERYTHING))
    for pointer in leaves(written_out(data))
    if pointer not in ("/name", "/schema") and not pointer.endswith(("/atom", "/name"))
]


class TestRoundTrip:
    @pytest.mark.parametrize("name", shipped_states())
    def test_shipped_states_come_back_equal(self, name: str) -> None:
        first = load_state(name)
        again = load_state(first.dumps())
        assert again == first and again.digest == first.digest
        assert again.dumps() == first.dumps()

    def test_provenance_comes_back(self) -> None:
        provenance = {
            "found_by": "search",
            "evaluated_on": "400 questions — naïve split",
            "scores": {"gqa": 0.61, "by": [1, {"k": None}]},
            "seed": 7,
            "notes": "",
        }
        again = load_state(state({"/provenance": provenance}).dumps())
        assert again.provenance.model_dump() == provenance


class TestDigest:
    def test_states_keep_their_digests(self) -> None:
        # Caches and measurements are stored under the digest, so a change here invalidates them.
        # The sample names no parameter that was added since it was written.
        assert load_state("autoprune").digest == (
            "c657e723d27c75e548fd4b7b8b68ea47e2abcccea922dcc7d742adc59d288724"
        )
        assert state().digest == (
            "2233f0520a54703f1c5f07895539f52e9ab2bfdbe4fd2bf8dcc548516794c9a8"
        )

    @pytest.mark.parametrize(
        "changes",
        [
            {"/name": "another"},
            {"/$schema": "./autoprune-state-1.schema.json"},
            {"/provenance": {"found_by": "hand", "scores": {"x": 1}}},
            {"/base_policy": {"name": "cdpruner"}},
            {"/base_policy/params/theta": None},
            {"/budget/limit": None},
            {"/scoring/fusion/eps": 1e-3},
            {"/scoring/signals/0/sign": "auto"},
            {"/constraints/selector": {"atom": "reference_residual_exchange_selector"}},
            {"/reassembly": {"atom": "mean_residual"}},
            {"/safety/0": {"atom": "preserve_budget"}},
            {"/safety/2": {"atom": "deterministic", "repeats": 2}},
        ],
    )
    def test_fields_without_effect_on_behaviour_do_not_change_the_digest(
        self, changes: dict[str, object]
    ) -> None:
        assert state(changes).digest == state().digest

    def test_a_whole_number_is_the_same_weight_as_its_float(self) -> None:
        whole = state({"/scoring/signals/0/weight": 1})
        assert whole.digest == state({"/scoring/signals/0/weight": 1.0}).digest

    @pytest.mark.parametrize(("source", "pointer"), BEHAVIOUR)
    def test_every_parameter_changes_the_digest(self, source: str, pointer: str) -> None:
        full = written_out(sample() if source == "shipped" else EVERYTHING)
        changed = edited(full, {pointer: OTHERWISE[pointer.rpartition("/")[2]]})
        assert parsed(changed).digest != parsed(full).digest

    @pytest.mark.parametrize(
        "changes",
        [
            {"/base_policy": {"name": "divprune"}},
            {"/base_policy": {"name": "divprune", "params": {"tile_scope": "global"}}},
            {"/budget": {"atom": "fixed_budget@64"}},
            {"/scoring/signals/4": DELETE},
            {"/scoring/signals/4": {"atom": "spatial_centrality_prior"}},
            {"/scoring/kernel": {"atom": "runtime_conditional_similarity_kernel"}},
            {"/constraints/pool/1": DELETE},
            {"/constraints/pool": [{"atom": "diversity_pool_builder"}]},
            {"/constraints/selector": {"atom": "anchor_controlled_pool_dpp_selector"}},
            {"/safety/3": DELETE},
        ],
    )
    def test_every_choice_of_atom_changes_the_digest(self, changes: dict[str, object]) -> None:
        assert state(changes).digest != state().digest

    def test_a_changed_copy_has_its_own_digest(self) -> None:
        chosen = state()
        before = chosen.digest
        alone = chosen.without_exchange()
        assert materialize(alone).quota == 0
        assert alone.digest != before and alone.digest == load_state(alone.dumps()).digest
        assert alone != chosen and chosen.digest == before


class TestJsonSchema:
    @pytest.mark.parametrize(
        "changes",
        [
            {"/schema": "autoprune-state/2"},
            {"/schema": DELETE},
            {"/name": ""},
            {"/name": DELETE},
            {"/extra": 1},
            {"/base_policy": {"name": "prunalot"}},
            {"/base_policy/params/theta": 1.5},
            {"/budget": {"atom": "fixed_budget@33"}},
            {"/budget": "fixed_budget@32"},
            {"/budget/limit": 0},
            {"/scoring/signals": []},
            {"/scoring/signals/0/atom": "mean_residual"},
            {"/scoring/signals/0/atom": DELETE},
            {"/scoring/signals/0/weight": -1},
            {"/scoring/signals/0/weight": "0.4"},
            {"/scoring/signals/0/weight": True},
            {"/scoring/signals/0/colour": 1},
            {"/constraints/selector/q_e": 2.5},
            {"/constraints/selector/q_e": "2"},
            {"/constraints/selector/q_e": False},
            {"/constraints/pool/1/pool_ratio": 100},
            {"/reassembly/strength": 1.5},
            {"/safety": ["preserve_bugdet"]},
            {"/safety": []},
            {"/safety": [{"atom": "deterministic", "repeats": 1}]},
            {"/safety": ["deterministic", {"atom": "deterministic", "repeats": 3}]},
            {"/safety": ["deterministic", "deterministic"]},
            {"/provenance": {"seed": "0"}},
            {"/provenance": {"seed": 2**63}},
            {"/provenance": {"seed": 1e300}},
            {"/$schema": None},
            {"/$schema": "x" * 2049},
        ],
    )
    def test_it_refuses_what_the_loader_refuses(self, changes: dict[str, object]) -> None:
        bad = edited(sample(), changes)
        with pytest.raises(StateError):
            parsed(bad)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(SCHEMA).validate(bad)

    @pytest.mark.parametrize(
        "changes",
        [
            {"/$schema": "https://example.com/anything"},
            {"/$schema": ""},
            {"/constraints/selector/q_e": 2.0},
            {"/scoring/signals/0/weight": 4},
            {"/scoring/signals/4": {"atom": "spatial_centrality_prior"}},
            {"/constraints/pool/1": {"atom": "quality_pool_builder"}},
            {"/constraints/selector/q_e": 640},
            {"/safety": ["deterministic"]},
            {"/provenance": {"seed": -(2**63), "scores": {"": 10**300}}},
        ],
    )
    def test_it_accepts_what_the_loader_accepts(self, changes: dict[str, object]) -> None:
        sound = edited(sample(), changes)
        jsonschema.Draft202012Validator(SCHEMA).validate(sound)
        written = parsed(sound).dumps()
        jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(written))
        assert load_state(written) == parsed(sound)

    def test_schema_is_identified_and_described(self) -> None:
        assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
        assert SCHEMA["$id"].startswith("urn:") and SCHEMA["title"] and SCHEMA["description"]
        parts = [SCHEMA, *SCHEMA["$defs"].values()]
        assert all(part["description"] for part in parts if part.get("type") == "object")

    def test_every_whole_number_has_bounds(self) -> None:
        # Beyond 64 bits the loader leaves 1e300 a float, which a schema calls an integer.
        actual = list(integers(SCHEMA))
        assert len(actual) > 5
        for number in actual:
            least = number.get("minimum", number.get("exclusiveMinimum"))
            most = number.get("maximum", number.get("exclusiveMaximum"))
            assert least is not None and least >= -(2**63)
            assert most is not None and most <= 2**63

    def test_it_describes_every_parameter(self) -> None:
        text = json.dumps(SCHEMA)
        for name in ATOMS.names():
            for parameter in ATOMS[name].call.parameters():
                description = ATOMS[name].call.model_fields[parameter].description
                assert json.dumps(description) in text


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
