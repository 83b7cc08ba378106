from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from pydantic import ValidationError

from tests.tpdsl.samples import DELETE, Json, edited, sample, shipped, state
from vllm_autoprune import PruningState, StateError, load_state, materialize
from vllm_autoprune.tpdsl.loading import shipped_states
from vllm_autoprune.tpdsl.registry import ATOMS

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

    def test_dump_names_the_schema_version(self) -> None:
        assert json.loads(load_state("autoprune").dumps())["schema"] == "autoprune-state/1"


class TestFrozen:
    def test_no_field_can_be_set(self) -> None:
        chosen = state()
        with pytest.raises(ValidationError, match="frozen"):
            chosen.name = "other"
        with pytest.raises(ValidationError, match="frozen"):
            chosen.constraints.pool = ()

    def test_states_are_hashable(self) -> None:
        assert {state(): 1}[state()] == 1


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

    def test_all_those_digests_differ_from_each_other(self) -> None:
        full = written_out(sample())
        pointers = [pointer for source, pointer in BEHAVIOUR if source == "shipped"]
        digests = {
            parsed(edited(full, {p: OTHERWISE[p.rpartition("/")[2]]})).digest for p in pointers
        }
        assert len(digests) == len(pointers)

    def test_a_changed_copy_has_its_own_digest(self) -> None:
        chosen = state()
        before = chosen.digest
        alone = chosen.without_exchange()
        assert materialize(alone).quota == 0
        assert alone.digest != before and alone.digest == load_state(alone.dumps()).digest
        assert alone != chosen and chosen.digest == before


class TestJsonSchema:
    @pytest.mark.parametrize("name", shipped_states())
    def test_the_check_accepts_all_shipped_states(self, name: str) -> None:
        jsonschema.Draft202012Validator.check_schema(SCHEMA)
        jsonschema.Draft202012Validator(SCHEMA).validate(shipped(name))
        jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(load_state(name).dumps()))

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
