"""Guarantees of every declared atom: validity, declared needs, ranges, no host sync."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import combinations
from typing import get_args

import pytest
import torch
from torch import Tensor

from tests.stand_in_device import forbid_waiting
from tests.tpdsl.samples import (
    Changes,
    active_parameters,
    assert_sound,
    call,
    images,
    mapped,
    on_meta,
    same,
    state,
    take,
)
from vllm_autoprune import Grid, PruningPolicy, VisualTokens, materialize, refine
from vllm_autoprune.tpdsl.atoms.pools import PartitionCall
from vllm_autoprune.tpdsl.atoms.reassembly import RECIPES, orders_by_quality
from vllm_autoprune.tpdsl.atoms.scoring import run_signal
from vllm_autoprune.tpdsl.atoms.source import (
    ViewCall,
    run_budget,
)
from vllm_autoprune.tpdsl.registry import ATOMS, ROLES, Group, atom
from vllm_autoprune.tpdsl.safety import safety_check
from vllm_autoprune.tpdsl.state import PruningState, required_inputs
from vllm_autoprune.tpdsl.tokens import Need

EVERY = ATOMS.names()
GRIDS = [Grid(6, 6), Grid(3, 4, tiles=3)]
SIZES: dict[Group, int] = {
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
"""Table of the paper's supplementary: nine groups, 131 atoms."""

WITHOUT_NEEDS: Changes = {
    "/base_policy": {"name": "divprune"},
    "/scoring/signals": [{"atom": "visual_token_norm_saliency"}],
    "/constraints/selector/q_e": 3,
}
"""Changes after which the sample state reads only features."""


def active(name: str) -> object:
    return ATOMS[name].call.model_validate(active_parameters(name))


def using(name: str) -> dict[str, object]:
    """Changes to the sample state after which the atom affects the result."""
    parameters, kind, group = active_parameters(name), ATOMS[name].call, ATOMS[name].group
    dpp = {"/constraints/selector": active_parameters("constrained_pool_dpp_selector")}
    if issubclass(kind, PartitionCall):
        places: dict[str, object] = {**dpp, "/constraints/partition": parameters}
    elif group == "token_source_base_policy":
        view = issubclass(kind, ViewCall)
        places = {"/source": {"tokens": parameters} if view else {"priors": [parameters]}}
    else:
        pointers = {
            "budget_control": "/budget",
            "scoring": "/scoring/signals",
            "similarity_kernel": "/scoring/kernel",
            "score_fusion": "/scoring/fusion",
            "candidate_pool": "/constraints/pool",
            "selection_constraints": "/constraints/selector",
            "reassembly": "/reassembly",
            "safety_checks": "/safety",
        }
        many = group in ("scoring", "candidate_pool", "safety_checks")
        places = {pointers[group]: [parameters] if many else parameters}
        places |= dpp if group == "similarity_kernel" else {}
    changes = {**WITHOUT_NEEDS, **places}
    if "/constraints/selector" in changes:
        del changes["/constraints/selector/q_e"]
    return changes


def policy_using(name: str, budget: int = 8) -> PruningPolicy:
    """The policy that runs the atom, for K tokens."""
    return materialize(state(using(name)), budget)


def test_the_language_has_131_atoms_in_nine_groups_and_marked_extensions() -> None:
    ours = {name for name in EVERY if ATOMS[name].origin == "extension"}
    assert {group: len(set(ATOMS.names(group)) - ours) for group in ROLES} == SIZES
    assert len(EVERY) - len(ours) == 131
    assert sum(ATOMS[name].paper for name in EVERY) == 50
    assert ours == {
        "ratio_budget",
        "per_tile_budget",
        "local_detail_energy",
        "mean_dissimilarity_saliency",
        "centred_cosine_kernel",
    }
    schema = str(PruningState.model_json_schema())
    assert all(f"'{name}'" in schema for name in EVERY)


@pytest.mark.parametrize("name", EVERY)
def test_atoms_and_parameters_are_documented(name: str) -> None:
    entry = ATOMS[name]
    assert entry.name == name and entry.role == ROLES[entry.group]
    assert entry.doc.endswith(".") and "\n" not in entry.doc
    for parameter in entry.call.parameters():
        field = entry.call.model_fields[parameter]
        assert field.description, f"{name}.{parameter} has no description"
        assert not field.is_required(), f"{name}.{parameter} has no default"


def test_duplicate_name_is_refused() -> None:
    def quality_pool_builder() -> None:
        """Another of that name."""

    with pytest.raises(ValueError, match="'quality_pool_builder' is declared twice"):
        atom("candidate_pool")(quality_pool_builder)


class TestPromises:
    """Each atom in a state that runs it, through Algorithm 1."""

    @pytest.mark.parametrize("name", EVERY)
    @pytest.mark.parametrize("grid", GRIDS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_k_unique_finite_rows_and_the_same_bits_again(
        self, name: str, grid: Grid, dtype: torch.dtype
    ) -> None:
        policy, tokens = policy_using(name), images(3, grid=grid, dtype=dtype)
        refined = refine(policy, tokens)
        assert_sound(policy, tokens, refined)
        assert refined.fallback.tolist() == [0, 0]
        assert same(refined, refine(policy, images(3, grid=grid, dtype=dtype)))

    @pytest.mark.parametrize("name", EVERY)
    @pytest.mark.parametrize("grid", GRIDS)
    def test_an_image_gets_the_same_bits_alone_and_in_a_batch(self, name: str, grid: Grid) -> None:
        policy, tokens = policy_using(name), images(5, batch=3, grid=grid)
        together = refine(policy, tokens)
        for i in range(3):
            assert same(together, refine(policy, take(tokens, [i])), [i], [0])

    @pytest.mark.parametrize("name", EVERY)
    def test_inputs_are_only_read(self, name: str) -> None:
        tokens = images(9)
        tokens = replace(tokens, known_cosine=tokens.cosine.clone())
        inputs: list[Tensor] = []
        mapped(tokens, lambda tensor: inputs.append(tensor) or tensor)  # type: ignore[func-returns-value]
        before = [tensor.clone() for tensor in inputs]
        refine(policy_using(name), tokens)
        assert len(inputs) > 5
        assert all(torch.equal(*pair) for pair in zip(inputs, before, strict=True))

    @pytest.mark.parametrize("name", EVERY)
    def test_non_finite_input_affects_only_its_image(self, name: str) -> None:
        policy, clean, tokens = policy_using(name), images(6), images(6)
        tokens.require_instruction().patches[1, 3] = torch.nan
        tokens.require_cls_attention()[1, 4] = torch.inf
        tokens.require_tower().patches[1, 5] = torch.nan
        tokens.features[1, 7] = torch.nan
        refined = refine(policy, tokens)
        assert_sound(policy, tokens, refined)
        assert refined.fallback.tolist() == [0, 2]
        assert same(refined, refine(policy, clean), [0], [0])

    @pytest.mark.parametrize("name", EVERY)
    @pytest.mark.parametrize("k", [1, 35])
    def test_the_smallest_and_the_largest_budget(self, name: str, k: int) -> None:
        policy, tokens = policy_using(name, k), images(7)
        assert_sound(policy, tokens, refine(policy, tokens))

    @pytest.mark.parametrize("name", EVERY)
    def test_no_host_sync(self, name: str) -> None:
        policy, tokens = policy_using(name), on_meta(images(8))
        with forbid_waiting():
            assert refine(policy, tokens).features.shape == (2, 8, 16)


class TestNeeds:
    """Declared needs are correct; caches rely on them."""

    @pytest.mark.parametrize("name", EVERY)
    def test_inputs_are_read_if_and_only_if_they_are_declared(self, name: str) -> None:
        policy, tokens = policy_using(name), images(9)
        assert policy.needs == ATOMS[name].needs_of(active(name))  # type: ignore[arg-type]
        refined = refine(policy, tokens)
        without = dict.fromkeys({*get_args(Need)} - policy.needs - {"next_layer"})
        assert same(refine(policy, replace(tokens, **without)), refined)  # type: ignore[arg-type]
        for field in fields(VisualTokens):
            if field.name in policy.needs:
                other = {field.name: vars(images(10))[field.name]}
                changed: VisualTokens = replace(tokens, **other)
                assert not same(refine(policy, changed), refined), field.name

    @pytest.mark.parametrize("name", RECIPES)
    def test_idle_reassembly_reads_nothing_but_an_order_by_quality_the_signals(
        self, name: str
    ) -> None:
        changes: Changes = {**WITHOUT_NEEDS, "/reassembly": {"atom": name}}
        tokens, idle = images(9), materialize(state(changes), 8)
        assert idle.needs == frozenset()
        assert refine(idle, VisualTokens(tokens.features, tokens.grid)).exchanged.shape == (2,)
        signal = [{"atom": "instruction_guided_visual_relevance"}]
        alone = state({**changes, "/scoring/signals": signal, "/constraints/selector/q_e": 0})
        reads = "instruction" in required_inputs(alone, exchange=False)
        assert reads == orders_by_quality(alone.reassembly)
        assert refine(materialize(alone, 8), tokens).exchanged.tolist() == [0, 0]

    @pytest.mark.parametrize(("weight", "needs"), [(0.0, set()), (0.1, {"instruction"})])
    def test_priors_of_weight_zero_read_nothing(self, weight: float, needs: set[str]) -> None:
        prior = {"atom": "external_policy", "policy": "cdpruner", "weight": weight}
        changes: Changes = {**WITHOUT_NEEDS, "/source": {"priors": [prior]}}
        assert materialize(state(changes), 8).needs == needs


def outputs(name: str) -> bytes:
    """What a state with the atom keeps of several images, where parameters it shares are equal."""
    changes, parameters = (
        {**using(name), "/constraints/selector/q_e": 8},
        ATOMS[name].call.model_fields,
    )
    if ATOMS[name].group != "scoring":
        changes["/scoring/signals"] = [
            {"atom": "redundancy_density_penalty"},
            {"atom": "visual_token_norm_saliency", "weight": 0.5},
        ]
    if isinstance(selector := changes.get("/constraints/selector"), dict):
        del changes["/constraints/selector/q_e"]
        selector |= {"q_e": 8} if "q_e" in selector else {}
        selector |= {"cell_cap": 1} if selector["atom"] == "constrained_pool_dpp_selector" else {}
    if isinstance(pool := changes.get("/constraints/pool"), list) and "pool_ratio" in parameters:
        apart = [{"atom": f"{kind}_pool_builder"} for kind in ("diversity", "spatial_coverage")]
        pool[0] |= {"pool_ratio": 0.75, **({"sources": apart} if "sources" in parameters else {})}
    source = changes.get("/source")
    if isinstance(source, dict) and "tile_scope" in parameters:
        source["tokens"] = {**source["tokens"], "tile_scope": "global"}
    policy = materialize(state(changes), 8)
    grids = (*GRIDS, Grid(9, 8), Grid(12, 12))
    kept = [refine(policy, images(seed, grid=grid)) for seed in range(2) for grid in grids]
    return b"".join(
        p.numpy().tobytes() for outcome in kept for p in (outcome.indices, outcome.features)
    )


class TestDescriptions:
    """An atom that does the same as another one, or nothing where it is listed, says so."""

    @pytest.mark.parametrize("group", sorted(set(ROLES) - {"budget_control", "safety_checks"}))
    def test_atoms_of_equal_outputs_name_each_other(self, group: Group) -> None:
        alike: dict[bytes, list[str]] = {}
        for name in ATOMS.names(group):
            alike.setdefault(outputs(name), []).append(name)
        for names in alike.values():
            for atom_name, other in combinations(names, 2):
                assert atom_name in ATOMS[other].doc or other in ATOMS[atom_name].doc, (
                    atom_name,
                    other,
                )

    def test_budgets_differ_in_tokens_kept(self) -> None:
        names = ATOMS.names("budget_control")
        kept = {tuple(run_budget(call(n), 576 * tiles, tiles) for tiles in (1, 4)) for n in names}
        assert len(kept) == len(names)

    def test_checks_that_are_always_made_say_so(self) -> None:
        last = "fallback_to_selection"
        without = safety_check(materialize(state({"/safety": [last]})))
        for name in ATOMS.names("safety_checks"):
            policy = materialize(state({"/safety": [name]}))
            assert safety_check(policy) == without
            assert policy.falls_back == ("listed or not" not in ATOMS[name].doc) == (name == last)

    def test_the_scope_of_tiles_names_all_atoms_that_read_it(self) -> None:
        view = ATOMS["vision_tokens@pre_llm"].call.model_fields["tile_scope"].description or ""
        named = {
            "redundancy_density_penalty": "redundancy",
            "mean_dissimilarity_saliency": "mean dissimilarity",
            "diversity_pool_builder": "the diversity pool",
        }
        assert all(words in view for words in named.values())
        tokens, best = images(4, grid=GRIDS[1]), [active_parameters("quality_pool_builder")]
        for name in [*ATOMS.names("scoring"), *ATOMS.names("candidate_pool")]:
            changes = {"/constraints/pool": best, **using(name)}
            kept = []
            for scope in ("per_tile", "global"):
                source = {"tokens": {"atom": "vision_tokens@pre_llm", "tile_scope": scope}}
                kept.append(refine(materialize(state({**changes, "/source": source}), 8), tokens))
            assert torch.equal(kept[0].indices, kept[1].indices) != (name in named), name


RANGES: dict[str, tuple[float, float]] = {
    "instruction_guided_visual_relevance": (-1, 1),
    "redundancy_density_penalty": (-1, 1),
    "local_contrast_saliency": (0, 2),
    "visual_token_norm_saliency": (0, torch.inf),
    "cluster_centroid_representativeness": (-1, 1),
    "global_mean_representativeness": (-1, 1),
    "local_detail_energy": (0, 2),
}
"""Range of each signal, to rounding; 0 to 1 of the others."""


@pytest.mark.parametrize("name", ATOMS.names("scoring"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_signals_are_float32_and_keep_their_range(name: str, dtype: torch.dtype) -> None:
    for grid in (*GRIDS, Grid(1, 1), Grid(1, 7)):
        tokens = images(4, grid=grid, dtype=dtype)
        values = run_signal(call(name), tokens, torch.zeros(2, 1, dtype=torch.int64))
        assert values.shape == (2, grid.tokens) and values.dtype == torch.float32
        least, most = RANGES.get(name, (0, 1))
        assert least - 0.01 <= float(values.min()) and float(values.max()) <= most + 0.01
