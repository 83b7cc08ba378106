"""Guarantees of every declared atom: validity, declared needs, ranges, no host sync."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

import tests.ops
import tests.tpdsl
from tests.stand_in_device import forbid_waiting
from tests.tpdsl.samples import (
    ATOM_GRIDS,
    MEANINGS,
    WITHOUT_NEEDS,
    active,
    active_parameters,
    call,
    mapped,
    policy_using,
    same,
    state,
    take,
    using,
    vars_of,
    whole_images,
    with_only,
)
from vllm_autoprune import Grid, RefinedTokens, VisualTokens, materialize, refine
from vllm_autoprune.ops.rowwise import mask_from_indices
from vllm_autoprune.tpdsl.atoms.pools import PartitionCall, run_partition
from vllm_autoprune.tpdsl.atoms.reassembly import RECIPES, orders_by_quality
from vllm_autoprune.tpdsl.atoms.scoring import run_signal
from vllm_autoprune.tpdsl.atoms.source import (
    PriorCall,
    PriorInputs,
    run_budget,
    run_prior,
)
from vllm_autoprune.tpdsl.registry import ATOMS, ROLES, AtomCall, Group, Registry, atom, declare
from vllm_autoprune.tpdsl.safety import safety_check
from vllm_autoprune.tpdsl.state import PruningState, required_inputs

EVERY = ATOMS.names()
ALL = (slice(None), slice(None))
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


class TestRegistry:
    def test_the_language_has_131_atoms_in_nine_groups(self) -> None:
        own = [ATOMS[name] for name in EVERY if ATOMS[name].origin != "extension"]
        assert {group: sum(a.group == group for a in own) for group in ROLES} == SIZES
        assert len(own) == 131

    def test_the_paper_prints_50_of_them(self) -> None:
        assert sum(ATOMS[name].paper for name in EVERY) == 50

    def test_extensions_are_marked(self) -> None:
        extensions = [name for name in EVERY if ATOMS[name].origin == "extension"]
        assert set(extensions) == {
            "ratio_budget",
            "per_tile_budget",
            "local_detail_energy",
            "mean_dissimilarity_saliency",
            "centred_cosine_kernel",
        }

    def test_every_atom_has_a_test_of_its_values(self) -> None:
        for package in (tests.tpdsl, tests.ops):
            for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                if module.name.rpartition(".")[2].startswith("test_"):
                    importlib.import_module(module.name)
        assert sorted(set(EVERY) - MEANINGS) == []


def assert_valid(name: str, tokens: VisualTokens, outcome: RefinedTokens, k: int = 8) -> None:
    policy = policy_using(name, k)
    assert outcome.features.shape == (tokens.batch, k, tokens.features.shape[2])
    assert outcome.features.dtype == tokens.features.dtype
    assert bool(outcome.features.isfinite().all())
    assert outcome.indices.shape == outcome.reference.shape == (tokens.batch, k)
    kept = mask_from_indices(outcome.indices, tokens.count)
    assert kept.sum(dim=1).tolist() == [k] * tokens.batch
    shared = (kept & mask_from_indices(outcome.reference, tokens.count)).sum(dim=1)
    assert torch.equal(outcome.exchanged, k - shared)
    assert int(shared.min()) >= policy.r_min and int(outcome.exchanged.max()) <= policy.quota


class TestPromises:
    """Each atom in a state that runs it, through Algorithm 1."""

    @pytest.mark.parametrize("name", EVERY)
    @pytest.mark.parametrize("grid", ATOM_GRIDS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_k_unique_finite_rows_and_the_same_bits_again(
        self, name: str, grid: Grid, dtype: torch.dtype
    ) -> None:
        tokens = whole_images(3, grid=grid, dtype=dtype)
        actual = refine(policy_using(name), tokens)
        assert_valid(name, tokens, actual)
        assert actual.fallback.tolist() == [0, 0]
        again = refine(policy_using(name), whole_images(3, grid=grid, dtype=dtype))
        assert same(actual, again, ALL)

    @pytest.mark.parametrize("name", EVERY)
    @pytest.mark.parametrize("grid", ATOM_GRIDS)
    def test_an_image_gets_the_same_bits_alone_and_in_a_batch(self, name: str, grid: Grid) -> None:
        policy, tokens = policy_using(name), whole_images(5, batch=3, grid=grid)
        together = refine(policy, tokens)
        for i in range(3):
            assert same(together, refine(policy, take(tokens, [i])), ([i], [0]))

    @pytest.mark.parametrize("name", EVERY)
    def test_inputs_are_only_read(self, name: str) -> None:
        whole = whole_images(9)
        tokens = replace(whole, known_cosine=whole.cosine.clone())
        inputs: list[Tensor] = []
        mapped(tokens, lambda tensor: inputs.append(tensor) or tensor)  # type: ignore[func-returns-value]
        before = [tensor.clone() for tensor in inputs]
        refine(policy_using(name), tokens)
        assert len(inputs) > 5
        assert all(torch.equal(*pair) for pair in zip(inputs, before, strict=True))

    @pytest.mark.parametrize("name", EVERY)
    def test_non_finite_input_affects_only_its_image(self, name: str) -> None:
        clean, tokens = whole_images(6, batch=2), whole_images(6, batch=2)
        assert tokens.instruction is not None and tokens.cls_attention is not None
        assert tokens.tower is not None
        tokens.instruction.patches[1, 3] = torch.nan
        tokens.cls_attention[1, 4] = torch.inf
        tokens.tower.patches[1, 5] = torch.nan
        tokens.features[1, 7] = torch.nan
        actual = refine(policy_using(name), tokens)
        assert_valid(name, tokens, actual)
        assert actual.fallback.tolist() == [0, 2]
        assert same(actual, refine(policy_using(name), clean), ([0], [0]))

    @pytest.mark.parametrize("name", EVERY)
    @pytest.mark.parametrize("k", [1, 35])
    def test_the_smallest_and_the_largest_budget(self, name: str, k: int) -> None:
        tokens = whole_images(7)
        assert_valid(name, tokens, refine(policy_using(name, k), tokens), k)

    @pytest.mark.parametrize("name", EVERY)
    def test_no_host_sync(self, name: str) -> None:
        tokens = whole_images(8)
        empty = mapped(tokens, lambda tensor: tensor.to("meta"))
        policy = policy_using(name)
        with forbid_waiting():
            assert refine(policy, empty).features.shape == (2, 8, 16)


def outputs(name: str) -> bytes:
    """What a state with the atom keeps of several images, where parameters it shares are equal."""
    changes, fields = {**using(name), "/constraints/selector/q_e": 8}, ATOMS[name].call.model_fields
    if ATOMS[name].group != "scoring":
        changes["/scoring/signals"] = [
            {"atom": "redundancy_density_penalty"},
            {"atom": "visual_token_norm_saliency", "weight": 0.5},
        ]
    if isinstance(selector := changes.get("/constraints/selector"), dict):
        del changes["/constraints/selector/q_e"]
        selector |= {"q_e": 8} if "q_e" in selector else {}
        selector |= {"cell_cap": 1} if selector["atom"] == "constrained_pool_dpp_selector" else {}
    if isinstance(pool := changes.get("/constraints/pool"), list) and "pool_ratio" in fields:
        apart = [
            {"atom": name} for name in ("diversity_pool_builder", "spatial_coverage_pool_builder")
        ]
        pool[0] |= (
            {"pool_ratio": 0.75, "sources": apart} if "sources" in fields else {"pool_ratio": 0.75}
        )
    source = changes.get("/source")
    if isinstance(source, dict) and "tile_scope" in fields:
        source["tokens"] = {**source["tokens"], "tile_scope": "global"}
    policy = materialize(state(changes), 8)
    grids = (*ATOM_GRIDS, Grid(9, 8), Grid(12, 12))
    kept = [refine(policy, whole_images(seed, grid=grid)) for seed in range(2) for grid in grids]
    return b"".join(p.numpy().tobytes() for one in kept for p in (one.indices, one.features))


class TestDescriptions:
    """An atom that does the same as another one, or nothing where it is listed, says so."""

    @pytest.mark.parametrize("group", sorted(set(ROLES) - {"budget_control", "safety_checks"}))
    def test_atoms_of_equal_outputs_name_each_other(self, group: Group) -> None:
        alike: dict[bytes, list[str]] = {}
        for name in ATOMS.names(group):
            alike.setdefault(outputs(name), []).append(name)
        for names in alike.values():
            for one, other in combinations(names, 2):
                assert one in ATOMS[other].doc or other in ATOMS[one].doc, (one, other)

    def test_budgets_differ_in_tokens_kept(self) -> None:
        kept = {
            tuple(run_budget(active(name), 576 * tiles, tiles) for tiles in (1, 4))
            for name in ATOMS.names("budget_control")
        }
        assert len(kept) == len(ATOMS.names("budget_control"))

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
        tokens, best = (
            whole_images(4, grid=ATOM_GRIDS[1]),
            [active_parameters("quality_pool_builder")],
        )
        for name in [*ATOMS.names("scoring"), *ATOMS.names("candidate_pool")]:
            changes = {"/constraints/pool": best, **using(name)}
            kept = []
            for scope in ("per_tile", "global"):
                source = {"tokens": {"atom": "vision_tokens@pre_llm", "tile_scope": scope}}
                kept.append(refine(materialize(state({**changes, "/source": source}), 8), tokens))
            assert torch.equal(kept[0].indices, kept[1].indices) != (name in named), name

    def test_attention_without_cls_is_a_softmax_along_the_mean_token(self) -> None:
        call, tokens = active("attention_proxy_saliency"), whole_images(2)
        tokens = replace(tokens, cls_attention=None)
        mean = tokens.features.mean(dim=1)
        along = torch.einsum("bnd,bd->bn", tokens.features, mean / mean.norm(dim=1, keepdim=True))
        picks = torch.arange(8).expand(2, -1)
        assert torch.allclose(run_signal(call, tokens, picks), along.softmax(dim=1), atol=1e-6)
        assert "without [CLS], softmax" in ATOMS[call.atom].doc


class TestNeeds:
    """Declared needs are correct; caches rely on them."""

    @pytest.mark.parametrize("name", EVERY)
    def test_undeclared_inputs_are_not_read(self, name: str) -> None:
        policy, tokens = policy_using(name), whole_images(9)
        actual = refine(policy, tokens)
        assert same(refine(policy, with_only(tokens, policy.needs)), actual, ALL)

    @pytest.mark.parametrize("name", EVERY)
    def test_declared_inputs_are_read(self, name: str) -> None:
        policy, tokens = policy_using(name), whole_images(9)
        assert policy.needs == ATOMS[name].needs_of(active(name))
        others = whole_images(10)
        for need in policy.needs:
            changed = VisualTokens(**{**fields_of(tokens), need: fields_of(others)[need]})
            assert not same(refine(policy, changed), refine(policy, tokens), ALL), need

    @pytest.mark.parametrize("name", RECIPES)
    def test_idle_reassembly_reads_nothing(self, name: str) -> None:
        idle = state({**WITHOUT_NEEDS, "/reassembly": {"atom": name}})
        assert materialize(idle, 8).needs == frozenset()
        tokens = whole_images(9)
        assert refine(materialize(idle, 8), with_only(tokens, frozenset())).exchanged.shape == (2,)

    @pytest.mark.parametrize("name", RECIPES)
    def test_an_order_by_quality_reads_the_signals_even_without_an_exchange(
        self, name: str
    ) -> None:
        signal = [{"atom": "instruction_guided_visual_relevance"}]
        changes = {**WITHOUT_NEEDS, "/scoring/signals": signal, "/reassembly": {"atom": name}}
        alone = state({**changes, "/constraints/selector/q_e": 0})
        assert ("instruction" in required_inputs(alone, exchange=False)) == orders_by_quality(
            alone.reassembly
        )
        assert refine(materialize(alone, 8), whole_images(1)).exchanged.tolist() == [0, 0]

    def test_priors_of_weight_zero_read_nothing(self) -> None:
        prior = {"atom": "external_policy", "policy": "cdpruner", "weight": 0.0}
        policy = materialize(state({**WITHOUT_NEEDS, "/source": {"priors": [prior]}}), 8)
        assert policy.needs == frozenset()
        prior["weight"] = 0.1
        policy = materialize(state({**WITHOUT_NEEDS, "/source": {"priors": [prior]}}), 8)
        assert policy.needs == {"instruction"} and policy.reads_instruction


def fields_of(tokens: VisualTokens) -> dict[str, Any]:
    """Fields of the images by name; each need is one of these names."""
    return {name: vars(tokens)[name] for name in VisualTokens.__dataclass_fields__}


def test_every_field_of_an_outcome_is_compared() -> None:
    actual = refine(policy_using("mean_residual"), whole_images(1))
    assert set(vars_of(actual)) == set(RefinedTokens.__dataclass_fields__)


RANGES: dict[str, tuple[float, float]] = {
    "instruction_guided_visual_relevance": (-1, 1),
    "attention_proxy_saliency": (0, 1),
    "spatial_centrality_prior": (0, 1),
    "redundancy_density_penalty": (-1, 1),
    "local_contrast_saliency": (0, 2),
    "visual_token_norm_saliency": (0, torch.inf),
    "cluster_centroid_representativeness": (-1, 1),
    "global_mean_representativeness": (-1, 1),
    "channel_entropy_informativeness": (0, 1),
    "reference_selection_confidence": (0, 1),
    "local_detail_energy": (0, 2),
    "mean_dissimilarity_saliency": (0, 1),
}
"""Range of each signal, to rounding."""

TOKENS = whole_images(4, grid=Grid(3, 4, tiles=3))
PICKS = torch.stack([torch.randperm(36)[:7] for _ in range(2)])
G = torch.rand(2, 36)


@pytest.mark.parametrize("name", ATOMS.names("scoring"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_signals_are_float32_and_keep_their_range(name: str, dtype: torch.dtype) -> None:
    for grid in (*ATOM_GRIDS, Grid(1, 1), Grid(1, 7)):
        tokens = whole_images(4, grid=grid, dtype=dtype)
        picks = torch.zeros(2, 1, dtype=torch.int64)
        actual = run_signal(call(name), tokens, picks)
        assert actual.shape == (2, grid.tokens) and actual.dtype == torch.float32
        least, most = RANGES[name]
        assert bool(actual.isfinite().all())
        assert least - 0.01 <= float(actual.min()) and float(actual.max()) <= most + 0.01


@pytest.mark.parametrize("name", ATOMS.of_kind("candidate_pool", PartitionCall))
def test_labels_count_from_zero_and_are_fewer_than_tokens(name: str) -> None:
    for grid in (*ATOM_GRIDS, Grid(1, 1), Grid(1, 3)):
        tokens = whole_images(4, grid=grid)
        labels = run_partition(call(name), tokens)
        assert labels.shape == (2, grid.tokens) and labels.dtype == torch.int64
        assert int(labels.min()) >= 0 and int(labels.max()) < grid.tokens


@pytest.mark.parametrize("name", ATOMS.of_kind("token_source_base_policy", PriorCall))
def test_priors_lie_between_zero_and_one(name: str) -> None:
    policy = policy_using(name, 7)
    known = PriorInputs(TOKENS, policy.state.base_policy, 7, PICKS)
    prior = run_prior(active(name), known)
    assert prior.shape == (2, 36) and prior.dtype == torch.float32
    assert float(prior.min()) >= 0 and float(prior.max()) == 1


@pytest.mark.parametrize("name", RECIPES)
def test_another_order_moves_rows_together_with_their_indices(name: str) -> None:
    tokens = whole_images(4)
    here, there = (
        refine(materialize(state({**using(name), "/reassembly": changed}), 8), tokens)
        for changed in (
            active_parameters(name),
            active_parameters(_in_raster(name)),
        )
    )
    back = here.indices.argsort(dim=1)
    assert torch.equal(here.indices.gather(1, back), there.indices)
    moved = here.features.gather(1, back[:, :, None].expand_as(here.features))
    assert torch.equal(moved, there.features)
    assert torch.equal(here.indices, there.indices) == (RECIPES[name].order.name == "raster")


def _in_raster(name: str) -> str:
    cell = RECIPES[name].cell.rpartition(".")[0] + ".raster"
    return next(other for other, recipe in RECIPES.items() if recipe.cell == cell)


@pytest.mark.parametrize("name", ATOMS.names())
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


def test_a_declaration_enters_name_group_parameters_and_doc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fresh = Registry()
    monkeypatch.setattr("vllm_autoprune.tpdsl.registry.ATOMS", fresh)

    class Call(AtomCall):
        strength: float = 0.5

    def brighten() -> None:
        """Make it brighter.

        More about it.
        """

    call = declare("brighten", "scoring", Call, brighten, origin="extension")
    entry = fresh["brighten"]
    assert (entry.name, entry.group, entry.role) == ("brighten", "scoring", "S")
    assert entry.origin == "extension" and not entry.paper
    assert entry.doc == "Make it brighter." and entry.function is brighten
    assert call.model_validate({"atom": "brighten"}).model_dump() == {
        "atom": "brighten",
        "strength": 0.5,
    }
    assert len(fresh) == 1 and fresh.names("reassembly") == []


def test_the_grammar_of_a_state_holds_every_atom() -> None:
    schema = str(PruningState.model_json_schema())
    assert all(f"'{name}'" in schema for name in ATOMS.names())
