"""What every selection promises, whatever the state: each property once, over all registries.

The states run every atom, every base policy with each of its parameters, cores, and ranking before
the merger.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache, partial
from typing import get_args

import pytest
import torch
from torch import Tensor

from tests.stand_in_device import forbid_waiting
from tests.tpdsl.samples import (
    BLEND,
    IN,
    UNCHANGED,
    Changes,
    active,
    images,
    mapped,
    sample,
    state,
    state_using,
    take,
)
from tests.tpdsl.soundness import BASES, GRIDS, ODD_GRIDS, assert_sound, same
from vllm_autoprune import (
    Grid,
    PruningPolicy,
    PruningState,
    SelectionError,
    VisualTokens,
    materialize,
    refine,
)
from vllm_autoprune.ops.rowwise import gather_rows
from vllm_autoprune.tpdsl.atoms.reassembly import (
    AGGREGATIONS,
    ASSIGNMENTS,
    ORDERINGS,
    OUTPUTS,
    RECIPES,
)
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.refine import keep_reference
from vllm_autoprune.tpdsl.registry import ATOMS, ROLES, Group, atom
from vllm_autoprune.tpdsl.tokens import Need

SILENT: Changes = {
    "/base_policy": {"name": "divprune"},
    "/scoring/signals": [{"atom": "visual_token_norm_saliency"}],
    "/constraints/selector/q_e": 3,
}
"""Changes after which the sample state reads only features."""


DPP = {"atom": "anchor_controlled_pool_dpp_selector", "q_e": 4}
CONDITIONAL = {"atom": "runtime_conditional_similarity_kernel", "theta": 0.5}
CAPPED = {"atom": "constrained_pool_dpp_selector", "q_e": 2}
GLOBAL = {"name": "divprune", "params": {"tile_scope": "global"}}
OTHERS: dict[str, Changes] = {
    "the sample": {},
    "blended": {"/reassembly/strength": 0.5},
    "conditional": {"/constraints/selector": DPP, "/scoring/kernel": CONDITIONAL},
    "anything goes": {"/constraints/selector/q_e": 640},
    "r_min": {
        "/constraints/selector": {**sample()["constraints"]["selector"], "r_min": 1}
    },
    "core": {"/core": {"share": 0.5}},
    "global core": {"/core": {"share": 0.5, "policy": GLOBAL}},
    "merging core": {"/core": {"share": 0.5, "policy": {"name": "visionzip"}}, **BLEND},
    "core of extra rows": {
        "/core": {"share": 0.5, "policy": {"name": "prumerge_plus"}},
        **BLEND,
    },
    "covering core": {"/core": {"share": 0.5, "cover": 0.5, "strength": 0.25}, **BLEND},
    "almost all core": {
        "/core": {"share": 0.9, "cover": 0.9, "strength": 0.5},
        **BLEND,
    },
    "capped core": {
        "/core": {"share": 0.5, "cover": 0.3},
        "/constraints/selector": CAPPED,
    },
    "core before the merger": {
        "/core": {"share": 0.5, "cover": 0.3, "strength": 0.25},
        **IN,
    },
    **{
        f"core and {name}": {
            "/core": {"share": 0.5},
            "/scoring/kernel": CONDITIONAL,
            "/constraints/selector": active(name),
        }
        for name in ATOMS.names("selection_constraints")
    },
    **{
        f"core and {name}": {
            "/core": {"share": 0.5, "cover": 0.5, "strength": 0.25},
            **BLEND,
            "/base_policy": {"name": name},
        }
        for name in BASE_POLICIES
    },
    **{
        f"{name} before the merger": {"/base_policy": {"name": name}, **IN}
        for name in BASE_POLICIES
    },
}

STATES: dict[str, PruningState] = {
    **{name: state_using(name) for name in ATOMS.names()},
    **{name: state(changes) for name, changes in {**BASES, **OTHERS}.items()},
}


def is_in_array(name: str) -> bool:
    """Whether a recipe is in the orthogonal array L9, in which any two levels meet once.

    Rows of all 81 recipes are held to values by ``test_atom_values.py``.
    """
    recipe = RECIPES[name]
    chosen = (recipe.assign, recipe.aggregate, recipe.output, recipe.order)
    axes = (ASSIGNMENTS, AGGREGATIONS, OUTPUTS, ORDERINGS)
    assign, aggregate, output, order = map(tuple.index, axes, chosen)
    return (
        (assign + aggregate - output) % 3 == (assign + 2 * aggregate - order) % 3 == 0
    )


every_state = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive)
        if name in RECIPES and not is_in_array(name)
        else name
        for name in STATES
    ],
)


@cache
def policy_of(name: str, budget: int = 8) -> PruningPolicy:
    return materialize(STATES[name], budget)


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("grid", GRIDS)
def test_k_sound_rows_and_the_same_bits_again_and_alone(name: str, grid: Grid) -> None:
    policy = policy_of(name)
    tokens = images(5, batch=3, grid=grid)
    refined = refine(policy, tokens)
    assert_sound(policy, tokens, refined)
    assert refined.fallback.tolist() == [0, 0, 0]
    assert same(refined, refine(policy, images(5, batch=3, grid=grid)))
    for image in range(3):
        assert same(refined, refine(policy, take(tokens, [image])), image, 0)


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@every_state
@pytest.mark.parametrize(
    "shift", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 2))]
)
def test_the_smallest_and_the_largest_budgets(name: str, shift: int) -> None:
    """Each state on three grids in three types; in every type on every grid by all shifts."""
    shift += [*STATES].index(name)
    for number, (grid, clusters, noise) in enumerate(
        ((GRIDS[0], 6, 0.5), (ODD_GRIDS[0], 3, 0.5), (ODD_GRIDS[1], 1, 0))
    ):
        dtype = DTYPES[(number + shift) % len(DTYPES)]
        tokens = images(7, grid=grid, dtype=dtype, clusters=clusters, noise=noise)
        for budget in (1, 5, grid.tokens - 1):
            policy = policy_of(name, budget)
            refined = refine(policy, tokens)
            assert_sound(policy, tokens, refined)
            assert refined.fallback.tolist() == [0, 0]


@every_state
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_not_finite_affects_only_its_image(name: str, poison: float) -> None:
    """In some places, and in all of them: the other image keeps its bits, this one has K rows."""
    policy = policy_of(name)
    clean = images(3)
    expected = refine(policy, clean)

    def spoil(share: float, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        hit = (
            torch.rand(tensor[0].shape, generator=torch.Generator().manual_seed(4))
            < share
        )
        return torch.cat([tensor[:1].masked_fill(hit, poison), tensor[1:]])

    for share in (0.05, 1.0):
        tokens = mapped(clean, partial(spoil, share))
        refined = refine(policy, tokens)
        assert_sound(policy, tokens, refined)
        assert refined.fallback.tolist() == [2, 0]
        assert same(refined, expected, 1, 1)


@every_state
def test_inputs_are_only_read_and_only_where_they_are_declared(name: str) -> None:
    policy = policy_of(name)
    tokens = images(9)
    cosine = tokens.cosine.clone()
    tokens = replace(tokens, known_cosine=lambda: record(cosine))
    inputs: list[tuple[Tensor, Tensor]] = []

    def record(tensor: Tensor) -> Tensor:
        inputs.append((tensor, tensor.clone()))
        return tensor

    refined = refine(policy, mapped(tokens, record))
    assert len(inputs) > 8 and all(torch.equal(tensor, copy) for tensor, copy in inputs)
    unread = dict.fromkeys({*get_args(Need)} - policy.needs - {"next_layer"})
    assert same(refine(policy, replace(tokens, **unread)), refined)  # type: ignore[arg-type]
    for field in fields(VisualTokens) if name in ATOMS or name in BASE_POLICIES else ():
        if field.name in policy.needs:
            other = {field.name: vars(images(10))[field.name]}
            assert not same(refine(policy, replace(tokens, **other)), refined), (
                field.name
            )


@every_state
@pytest.mark.parametrize("grid", GRIDS)
def test_no_selection_waits_for_the_device(name: str, grid: Grid) -> None:
    tokens = mapped(
        images(8, grid=grid, dtype=torch.bfloat16), lambda tensor: tensor.to("meta")
    )
    with forbid_waiting():
        refined = refine(policy_of(name), tokens)
    assert refined.features.shape == (2, 8, 16) and refined.features.is_meta
    assert refined.indices.is_meta and refined.fallback.is_meta


@pytest.mark.parametrize("name", [name for name in STATES if "core" in name.split()])
def test_no_question_changes_a_core(name: str) -> None:
    policy = policy_of(name)
    tokens = images(10)
    if policy.core == 0:
        return
    instruction = tokens.require_instruction()
    core = slice(policy.core)
    opposite = replace(tokens, instruction=replace(instruction, text=-instruction.text))
    unasked = replace(tokens, instruction=None, language=None, words=None)
    refined = refine(policy, tokens)
    alone = materialize(policy.state, policy.core, part="core")
    for other in (refine(alone, unasked), refine(policy, opposite)):
        assert torch.equal(refined.indices[:, core], other.indices[:, core])
        assert torch.equal(refined.features[:, core], other.features[:, core])
    reference = keep_reference(
        alone, tokens
    )  # single tokens, even of a policy that merges
    assert reference.extra == 0
    assert torch.equal(
        reference.features, gather_rows(tokens.features, reference.indices)
    )


# The registries themselves.


def test_131_atoms_in_nine_groups_and_marked_extensions_each_documented() -> None:
    # Table of the paper's supplementary: nine groups, 131 atoms.
    sizes: dict[Group, int] = {
        "token_source_base_policy": 6,
        "budget_control": 10,
        "scoring": 10,
        "similarity_kernel": 2,
        "score_fusion": 3,
        "candidate_pool": 6,
        "selection_constraints": 9,
        "reassembly": 81,
        "safety_checks": 4,
    }
    extensions = {
        "ratio_budget",
        "per_tile_budget",
        "per_frame_budget",
        "temporal_novelty",
        "temporal_echo_penalty",
        "prediction_surprise",
        "frame_outlier",
        "local_detail_energy",
        "mean_dissimilarity_saliency",
        "centred_cosine_kernel",
    }
    entries = [ATOMS[name] for name in ATOMS.names()]
    assert {
        entry.name for entry in entries if entry.origin == "extension"
    } == extensions
    assert {group: len({*ATOMS.names(group)} - extensions) for group in ROLES} == sizes
    assert (
        len(entries) == 131 + len(extensions)
        and sum(e.origin == "printed" for e in entries) == 50
    )
    schema = str(PruningState.model_json_schema())
    for entry in entries:
        assert f"'{entry.name}'" in schema and entry.role == ROLES[entry.group]
        assert entry.doc.endswith(".") and "\n" not in entry.doc
        for parameter in entry.call.parameters():
            field = entry.call.model_fields[parameter]
            assert field.description and not field.is_required(), (
                entry.name,
                parameter,
            )

    def quality_pool_builder() -> None:
        """Another of that name."""

    with pytest.raises(ValueError, match="'quality_pool_builder' is declared twice"):
        atom("candidate_pool")(quality_pool_builder)


@pytest.mark.parametrize("name", ATOMS.names())
def test_a_policy_needs_what_its_atom_declares(name: str) -> None:
    entry = ATOMS[name]
    assert policy_of(name).needs == entry.needs_of(
        entry.call.model_validate(active(name))
    )


@pytest.mark.parametrize("name", BASE_POLICIES)
def test_an_input_that_a_base_policy_lacks_is_named_in_the_error(name: str) -> None:
    policy = policy_of(name)
    tokens = images(8)
    for need in BASE_POLICIES[name].needs_of(policy.state.base_policy.params) - {
        "next_layer"
    }:
        with pytest.raises(
            SelectionError, match=rf"VisualTokens\.{need}: is None.*fill it"
        ):
            refine(policy, replace(tokens, **{need: None}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", RECIPES)
def test_an_idle_reassembly_changes_no_row_and_reads_for_its_order_alone(
    name: str,
) -> None:
    changes: Changes = {**SILENT, "/reassembly": {"atom": name}}
    tokens = images(9)
    idle = materialize(state(changes), 8)
    assert idle.needs == frozenset()
    refined = refine(idle, VisualTokens(tokens.features, tokens.grid))
    assert torch.equal(refined.features, gather_rows(tokens.features, refined.indices))
    signal = [{"atom": "instruction_guided_visual_relevance"}]
    alone = state({**changes, "/scoring/signals": signal, **UNCHANGED})
    reads = "instruction" in alone.needs(exchange=False)
    assert reads == alone.orders_by_quality
    assert refine(materialize(alone, 8), tokens).exchanged.tolist() == [0, 0]
