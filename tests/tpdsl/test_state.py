"""PruningState: round trips, digests, JSON Schema, and the reference that is made of it."""

from __future__ import annotations

import json
import pickle
from collections import Counter

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.tpdsl.samples import (
    DELETE,
    IN,
    UNCHANGED,
    Changes,
    Json,
    edited,
    sample,
    state,
)
from vllm_autoprune import PruningState, load_state, materialize
from vllm_autoprune.tpdsl.atoms.reassembly import RECIPES
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import shipped_states
from vllm_autoprune.tpdsl.reference import (
    CORE_POLICIES,
    PLACES,
    _list_parameters,
    render_language,
)
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.state import Core

SCHEMA = PruningState.model_json_schema()
CHECKED = jsonschema.Draft202012Validator(SCHEMA)


SAME: list[Changes] = [
    {"/name": "another"},
    {"/$schema": "./autoprune-state-1.schema.json"},
    {"/provenance": {"found_by": "hand", "scores": {"x": 1}}},
    {"/base_policy": {"name": "cdpruner"}},
    {"/budget/limit": None},
    {"/scoring/signals/0/sign": "auto"},
    {"/constraints/selector": {"atom": "reference_residual_exchange_selector"}},
    {"/reassembly": {"atom": "mean_residual"}},
    {"/rank_at": "merger_out"},
    {"/shares": "equal"},
    {"/safety/2": {"atom": "deterministic", "repeats": 2}},
]
"""Changes that do not affect behaviour."""


def test_a_digest_is_that_of_behaviour() -> None:
    # The sample with every default stated, without what is outside the digest.
    written = state().model_dump(mode="json", exclude={"provenance"})
    different: list[Changes] = [
        {"/base_policy/params/theta": 0.5},
        {"/base_policy": {"name": "divprune", "params": {"tile_scope": "global"}}},
        {"/source/tokens/tile_scope": "global"},
        {"/budget": {"atom": "fixed_budget@64"}},
        {"/budget/limit": 640},
        {"/scoring/signals/0/weight": 0.77},
        {"/scoring/signals/4": DELETE},
        {
            "/scoring/kernel": {
                "atom": "runtime_conditional_similarity_kernel",
                "theta": 0.5,
            }
        },
        {"/constraints/pool/0/pool_ratio": 0.75},
        {"/constraints/partition/cells": 7},
        {"/constraints/selector/r_min": 7},
        {"/reassembly/strength": 0.25},
        {"/safety/2/repeats": 4},
        {"/safety/3": DELETE},
        {"/core": {"share": 0.5}},
        {"/shares": "free"},
        *({"/cells": {"rule": "flat", "tolerance": tolerance}} for tolerance in (0, 2)),
        IN,
    ]
    # Caches and measurements are stored under the digest, so a change here invalidates them.
    # Those of the states that ship are pinned.
    mine = "2233f0520a54703f1c5f07895539f52e9ab2bfdbe4fd2bf8dcc548516794c9a8"
    for changes in SAME:
        assert (
            load_state(edited(written, changes)).digest == state(changes).digest == mine
        ), changes
    others = [load_state(edited(written, changes)).digest for changes in different]
    assert len({mine, *others}) == 1 + len(others)


def test_a_changed_copy_has_its_own_digest() -> None:
    chosen = state()
    before = chosen.digest
    alone = chosen.without_exchange()
    assert materialize(alone).quota == 0
    assert alone.digest != before and alone.digest == load_state(alone.dumps()).digest
    assert alone != chosen and chosen.digest == before


def test_states_share_a_core_whatever_its_share_and_what_the_rest_of_them_is() -> None:
    def core_digest(core: Changes, changes: Changes | None = None) -> str:
        return state({**(changes or {}), "/core": core}).core_digest

    half = core_digest({"share": 0.5})
    assert (
        half == core_digest({"share": 0.75}) == core_digest({"share": 0.5}, UNCHANGED)
    )
    before = core_digest({"share": 0.5}, IN)
    assert before == core_digest({"share": 0.5}, {**IN, **UNCHANGED})
    free = [
        core_digest({"share": 0.5}, {**ranked, "/shares": "free"})
        for ranked in ({}, IN)
    ]
    assert len({half, before, *free, core_digest({"share": 0.5, "cover": 0.5})}) == 5
    assert (state().core_digest, state(IN).core_digest) == ("", "")
    # Without a core, that of a base policy with a form that reads no question.
    for policy in ("divprune", "mmtok"):
        by_policy = state({"/base_policy": {"name": policy}})
        same = {"share": 1.0, "policy": {"name": policy}}
        assert by_policy.core is None
        assert by_policy.core_digest == core_digest(same)
    assert '"core"' not in state().dumps() and '"rank_at"' not in state().dumps()
    assert '"shares"' not in state().dumps()


ACCEPTED: list[Changes] = [
    {"/$schema": "https://example.com/anything"},
    {"/constraints/selector/q_e": 640.0},
    {"/safety": ["deterministic"]},
    {"/core": {"share": 0.5, "cover": 0.5, "strength": 0.25}, **IN},
    {
        "/provenance": {
            "seed": -(2**63),
            "scores": {"": 10**300, "by": [1, {"k": None}]},
        }
    },
    {"/provenance": {"evaluated_on": "400 questions — naïve split"}},
]


@pytest.mark.parametrize(
    "data",
    [
        *(edited(sample(), changes) for changes in ACCEPTED),
        *(
            json.loads(path.read_text(encoding="utf-8"))
            for path in shipped_states().values()
        ),
    ],
    ids=[*map(str, ACCEPTED), *shipped_states()],
)
def test_the_schema_accepts_what_the_loader_accepts_which_comes_back_equal(
    data: Json,
) -> None:
    CHECKED.validate(data)
    loaded = load_state(data)
    CHECKED.validate(json.loads(loaded.dumps()))
    for again in (load_state(loaded.dumps()), pickle.loads(pickle.dumps(loaded))):
        assert again == loaded and again.digest == loaded.digest
        assert again.dumps() == loaded.dumps()


def test_the_reference_names_every_atom_and_parameter_once() -> None:
    prompt = render_language()
    assert Counter(name for place in PLACES for name in place.names) == Counter(
        ATOMS.names()
    )
    names = set(BASE_POLICIES) | {name for name in ATOMS.names() if name not in RECIPES}
    assert all(f"- {name}: " in prompt for name in names)
    assert all(place.pointer in prompt for place in PLACES)


def test_the_reference_and_the_schema_describe_every_parameter() -> None:
    prompt = render_language()
    schema = json.dumps(SCHEMA)
    for name in ATOMS.names():
        for p in _list_parameters(ATOMS[name].call):
            assert f"{p.name} = {p.default} ({p.values}: {p.description})" in prompt, (
                name
            )
            assert json.dumps(p.description) in schema


def test_the_reference_explains_the_81_reassemblies_by_their_axes() -> None:
    prompt = render_language()
    for name, recipe in RECIPES.items():
        assert all(f"{level}: " in prompt for level in recipe.level_names.split("."))
        assert (
            name == f"reassemble/{recipe.level_names}"
            or f"- {name} is {recipe.level_names}\n" in prompt
        )


def test_the_core_is_an_extension_which_a_reference_may_leave_out() -> None:
    prompt = render_language()
    for name, field in Core.model_fields.items():
        assert f"- {name} = " in prompt.partition("core (/core), an extension")[2]
        assert str(field.description) in prompt
    readers = {name for name, policy in BASE_POLICIES.items() if policy.core is None}
    assert set(CORE_POLICIES) == set(BASE_POLICIES) - readers
    assert "/core" not in render_language(("scoring", "constraints", "reassembly"))
    assert "/core" in render_language(("scoring", "core"))
