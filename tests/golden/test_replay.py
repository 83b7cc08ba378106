"""Golden cases, replayed through the interface of base policies and of refine.

Where the published loop gives NaN or duplicates, picks are compared as far as they count.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.golden.case import Case, images, load, names
from vllm_autoprune import load_state, materialize, refine
from vllm_autoprune.base_policies.language import (
    _cluster_means,
    _density_peak_clusters,
    _recycled_count,
)
from vllm_autoprune.base_policies.merging import _merge_neighbours
from vllm_autoprune.ops.rowwise import gather_rows, mask_from_indices
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, Given

POLICIES = Path(__file__).parents[2] / "policies"
NEXT_TO_ROUNDING = 1e-3
"""Tolerance of merged rows in float32."""

Recipe = dict[str, Any]

ORDERED = (
    "cdpruner",
    "divprune",
    "fastv",
    "cen_divprune",
    "cen_cdpruner",
    "scope",
    "mmtok",
    "idpruner",
)
"""Methods that return picks in an order of their own."""

COUNTING = {
    "cdpruner/case_08": 16,  # the rank of the kernel: rounding decides the others
    "divprune/case_07": 36,  # as many distinct tokens as there are
    "mmtok/case_09": 36,
    "scope/case_07": 36,
    "cen_cdpruner/case_08": 34,
    "idpruner/case_07": 60,
}
"""Degenerate case -> how many of its first picks count, up to tokens that equal each other."""

RENAMED = {"gmap": "weight", "t_tv": "tau_text", "lam": "balance"}
"""What recipes call parameters of policies; others have the same name, or are as published."""


def params_of(policy: str, recipe: Recipe, **others: object) -> Any:
    """Parameters of a policy, as the recipe of a case has them."""
    call = BASE_POLICIES[policy].call
    known = BASE_POLICIES[policy].default_params
    named = {RENAMED.get(key, key): value for key, value in recipe.items()}
    named |= {"scale_variance": recipe.get("scale") == 1, "patch_only": False}
    taken = {name: named[name] for name in type(known).model_fields if name in named}
    return call.model_validate({"name": policy, "params": {**taken, **others}}).params


def ascending(picks: Tensor) -> Tensor:
    return picks.sort(dim=-1).values


def method_of(case: Case) -> str:
    return case.name.split("/")[0]


def is_exact(case: Case) -> bool:
    """Whether every value counts: the published loop is finite and its order stable."""
    return not case.recipe.get("note") and bool(case.recipe.get("stable_order", True))


def assert_values(
    case: Case, name: str, actual: Tensor, tolerance: float = NEXT_TO_ROUNDING
) -> None:
    """Values are the recorded ones, where these count."""
    if is_exact(case):
        wanted = case.recorded(name).float()
        assert_close(actual.float(), wanted, rtol=tolerance, atol=tolerance)


def assert_picks(case: Case, actual: Tensor, wanted: Tensor) -> None:
    """Picks are unique, in range, and the recorded ones as far as these count."""
    assert actual.shape == wanted.shape
    for row in actual:
        assert row.unique().numel() == row.numel()
        assert ((row >= 0) & (row < case.recipe["N"])).all()
    if is_exact(case):
        assert actual.tolist() == wanted.tolist()
    elif case.recipe.get("stable_set", False):
        assert ascending(actual).tolist() == ascending(wanted).tolist()
    elif case.name in COUNTING:
        tokens = images(case)
        encoded = case.recipe["gen"] in ("scope", "mmtok")
        rows = (tokens.require_encoder() if encoded else tokens.features)[0]
        kind = (rows[:, None] == rows[None]).all(dim=2).to(torch.uint8).argmax(dim=1)
        counted = slice(COUNTING[case.name])
        assert kind[actual[0, counted]].tolist() == kind[wanted[0, counted]].tolist()


def serve(case: Case, policy: str, count: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Picks and rows of a policy ``(R, k)`` and ``(R, k, D)`` by tile, and its added rows."""
    tokens = images(case)
    tiles = tokens.grid.tiles
    budget = min(count * tiles, tokens.count + (case.recipe.get("mode") == "cls"))
    params = params_of(policy, case.recipe)
    served = BASE_POLICIES[policy].select(params, tokens, budget)

    def by_tile(values: Tensor) -> Tensor:
        """Values ``(B, P, ...)`` of rows that come in turn from every tile, ``(R, p, ...)``."""
        shape = (len(values), -1, tiles, *values.shape[2:])
        return values.reshape(shape).transpose(1, 2).flatten(0, 1)

    rows = by_tile(gather_rows(served.rows(tokens), served.picks))
    picks = by_tile(served.picks)
    picks = picks - (torch.arange(len(picks)) % tiles)[:, None] * tokens.grid.per_tile
    return picks, rows, None if served.extra is None else by_tile(served.extra)


REPLAYED: set[str] = set()


def replayed(*methods: str) -> pytest.MarkDecorator:
    """Run a test for each case of some methods."""
    REPLAYED.update(methods)
    cases = [name for method in methods for name in names(method)]
    return pytest.mark.parametrize("case", cases, indirect=True)


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    return load(request.param)


@replayed("autoprune_released")
def test_the_released_refinement(case: Case) -> None:
    """The shipped state with the numbers of the case, which mostly are its own."""
    recipe = case.recipe
    document: Recipe = json.loads((POLICIES / "autoprune.json").read_text())
    signals = {call["atom"]: call for call in document["scoring"]["signals"]}
    by_weight = {
        "semantic": "instruction_guided_visual_relevance",
        "attn": "attention_proxy_saliency",
        "spatial": "spatial_centrality_prior",
        "redundancy": "redundancy_density_penalty",
        "contrast": "local_contrast_saliency",
    }
    measures = {"negative_mean": "negative_mean", "cosine": "words"}
    signals[by_weight["semantic"]]["measure"] = measures[recipe["relevance"]]
    signals[by_weight["spatial"]]["bias"] = recipe["center_bias"]
    document["scoring"]["signals"] = [
        {**signals[by_weight[name]], "weight": weight}
        for name, weight in recipe["weights"].items()
    ]
    document["constraints"]["selector"] |= {
        name: recipe[name] for name in ("q_e", "r_min", "lam", "keep_weight", "power")
    }
    document["reassembly"]["strength"] = recipe["scale"]
    k = recipe["K"]
    budget = {"atom": "ratio_budget", "ratio": 1.0, "floor": k, "ceiling": k}
    document["budget"] = budget

    refined = refine(materialize(load_state(document)), images(case))
    assert refined.reference.tolist() == case.recorded("reference").tolist()
    assert_picks(case, refined.reference, case.recorded("reference"))
    assert_picks(case, refined.indices, case.recorded("keep"))
    assert_values(case, "features", refined.features, 1e-4)
    if refined.quality is not None:  # not computed where nothing is exchanged
        assert_values(case, "quality", refined.quality, 1e-4)


@replayed("echoprune", "evs", "vcast", "vidcom2")
def test_tokens_of_videos(case: Case) -> None:
    recipe = case.recipe
    method = method_of(case)
    document = json.loads((POLICIES / f"{method}.json").read_text())
    document["base_policy"]["params"] = params_of(method, recipe).model_dump()
    document["frames"] |= {"low": recipe.get("low", document["frames"]["low"])}
    if method == "vcast":
        document["frames"]["tau"] = recipe["tau"]
    elif recipe.get("first") == "global":
        document["frames"]["first"] = "as_others"
    policy = materialize(load_state(document), recipe["K"], video=True)
    assert_picks(
        case, refine(policy, images(case)).indices, case.recorded("keep")[None]
    )


@replayed(*ORDERED)
def test_picks_in_their_order(case: Case) -> None:
    """The first ``core`` picks are of the question-free parameters, where the case has a core.

    Excluded tokens are closed, unless too few are left.
    """
    recipe = case.recipe
    tokens = images(case)
    name = method_of(case)
    policy = BASE_POLICIES[name]
    tiles = tokens.grid.tiles
    params = params_of(name, recipe)
    count = min(recipe["K"], recipe["N"]) * tiles
    core = recipe.get("core", 0) * tiles
    picks = torch.empty(tokens.batch, 0, dtype=torch.int64)
    if core:
        unasked = {"cen_cdpruner": {"relevance": False}, "mmtok": {"words": False}}
        picks = policy.select(
            params_of(name, recipe, **unasked[name]), tokens, core
        ).picks
    closed = mask_from_indices(picks, tokens.count)
    excluded = recipe.get("exclude", [])
    if excluded and tokens.count - len(excluded) >= recipe["K"]:
        closed[:, excluded] = True
    if closed.any():
        start = Given(picks, closed, closed, int(closed.sum(dim=1).max()))
        delta = policy.select_given(params, tokens, count - core, start)
        picks = torch.cat([picks, delta], dim=1)
    else:
        picks = policy.select(params, tokens, count).picks
    # Picks come in turn from every tile.
    by_tile = picks.reshape(-1, tiles).T if tiles > 1 else picks
    by_tile = by_tile - torch.arange(tiles)[:, None] * tokens.grid.per_tile
    assert_picks(case, by_tile, case.recorded("order").reshape(by_tile.shape))


@replayed("prumerge", "prumerge_budget")
def test_rows_merged_into_the_published_choice(case: Case) -> None:
    tokens = images(case)
    layer = tokens.require_next_layer()
    patches = tokens.require_tower().patches
    chosen = case.recorded("idx")[None]
    merged = _merge_neighbours(layer.attention, layer.keys, patches, chosen)
    assert_values(case, "features", torch.cat(merged, dim=1)[0])


@replayed("pdrop")
def test_tokens_that_a_pyramid_keeps(case: Case) -> None:
    picks, _, _ = serve(case, "pyramiddrop", case.recipe["K"])
    assert_picks(case, ascending(picks), case.recorded("keep")[None])


@replayed("dart")
def test_tokens_beside_the_pivots(case: Case) -> None:
    """The pivots are added to the published budget."""
    picks, _, _ = serve(case, "dart", len(case.recorded("keep")))
    assert_picks(case, ascending(picks), case.recorded("keep")[None])


@replayed("sparsevlm")
def test_dropped_tokens_are_clustered(case: Case) -> None:
    """The dropped ones in descending order."""
    tokens = images(case)
    count = min(case.recipe["K"], tokens.count - 1)
    params = params_of("sparsevlm", case.recipe)
    order = BASE_POLICIES["sparsevlm"].select(params, tokens, tokens.count).picks
    language = tokens.require_language()
    states = language.visual(language.states(params.layer), tokens.count, dim=1)
    recycled = order[:, count:][:, : _recycled_count(tokens.count - count)]
    states = gather_rows(states, recycled)
    clusters = states.shape[1] // 10 + 1
    members = _density_peak_clusters(states, clusters, break_ties=False)
    assert_values(case, "merged", _cluster_means(members, states)[0])
    picks, _, _ = serve(case, "sparsevlm", count)
    assert_picks(case, ascending(picks), case.recorded("keep")[None])


@replayed("holov", "prunesid")
def test_picks_in_any_order(case: Case) -> None:
    picks, _, _ = serve(case, method_of(case), case.recipe["K"])
    assert_picks(case, ascending(picks), ascending(case.recorded("order")))


@replayed("fsr")
def test_picks_with_rows_merged_into_them(case: Case) -> None:
    picks, rows, _ = serve(case, "fsr", case.recipe["K"])
    assert_picks(case, picks, case.recorded("order"))
    single = case.dtype == torch.float32
    assert_values(case, "features", rows, NEXT_TO_ROUNDING if single else 1e-2)


@replayed("visionzip")
def test_dominant_and_contextual_tokens(case: Case) -> None:
    """[CLS], dominant tokens in raster order, contextual ones."""
    picks, rows, extra = serve(case, "visionzip", case.recipe["K"])
    assert extra is not None
    last = case.recipe["dominant"] - 1
    dominant = picks[:, :last]
    wanted = ascending(case.recorded("dominant_idx"))[:, 1:] - 1
    assert_picks(case, ascending(dominant), wanted)
    plain = gather_rows(rows, dominant.argsort(dim=1))
    every = torch.cat([extra, plain, rows[:, last:]], dim=1)
    single = case.dtype == torch.float32
    assert_values(case, "features", every, 1e-4 if single else 5e-2)


@replayed("trim")
def test_patches_and_the_mean_of_the_others(case: Case) -> None:
    """Kept patches in raster order."""
    published = case.recorded("keep")
    picks, rows, extra = serve(case, "trim", len(published[0]) + 1)
    assert extra is not None
    assert_picks(case, ascending(picks), published)
    plain = gather_rows(rows, picks.argsort(dim=1))
    every = torch.cat([plain, extra], dim=1)
    assert_values(case, "features_fp16", every, 2e-2)


def test_every_recorded_method_is_replayed() -> None:
    """But the text tower's, which ``test_signals.py`` compares."""
    folders = {folder.name for folder in (Path(__file__).parent / "data").iterdir()}
    assert folders - {"clip_chunk"} == REPLAYED
