"""Golden cases, replayed through the interface of base policies and of refine.

Where the published loop gives NaN or duplicates, picks are compared as far as they count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
from vllm_autoprune.tpdsl.tokens import VisualTokens

POLICIES = Path(__file__).parents[2] / "policies"
AUTOPRUNE = POLICIES / "autoprune.json"
NEXT_TO_ROUNDING = 1e-3
"""Tolerance of merged rows in float32."""

Recipe = dict[str, Any]
Outputs = Iterator[tuple[str, Tensor, Tensor, float | None]]
"""What is compared, this implementation's and the published; picks have no tolerance."""


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


def select(case: Case, policy: str, tokens: VisualTokens) -> Tensor:
    """Picks ``(B, K)``, of one image of B tiles ``(T, K)``.

    The first ``core`` picks are those of the question-free parameters, where the case has a core.
    Excluded tokens are closed, unless too few are left.
    """
    recipe = case.recipe
    chosen = BASE_POLICIES[policy]
    tiles = tokens.grid.tiles
    params = params_of(policy, recipe)
    count = min(recipe["K"], recipe["N"]) * tiles
    core = recipe.get("core", 0) * tiles
    picks = torch.empty(tokens.batch, 0, dtype=torch.int64)
    if core:
        unasked = {"cen_cdpruner": {"relevance": False}, "mmtok": {"words": False}}[
            policy
        ]
        picks = chosen.select(params_of(policy, recipe, **unasked), tokens, core).picks
    closed = mask_from_indices(picks, tokens.count)
    excluded = recipe.get("exclude", [])
    if excluded and tokens.count - len(excluded) >= recipe["K"]:
        closed[:, excluded] = True
    if closed.any():
        start = Given(picks, closed, closed, int(closed.sum(dim=1).max()))
        delta = chosen.select_given(params, tokens, count - core, start)
        picks = torch.cat([picks, delta], dim=1)
    else:
        picks = chosen.select(params, tokens, count).picks
    # Picks come in turn from every tile.
    by_tile = picks.reshape(-1, tiles).T if tiles > 1 else picks
    return by_tile - torch.arange(tiles)[:, None] * tokens.grid.per_tile


def ascending(picks: Tensor) -> Tensor:
    return picks.sort(dim=-1).values


def replay(case: Case) -> Outputs:  # noqa: C901, PLR0915
    """All that the case records and this implementation gives."""
    method = case.name.split("/")[0]
    recipe = case.recipe
    recorded = case.recorded
    tokens = images(case)
    policy = {
        "pdrop": "pyramiddrop",
        "prumerge": "prumerge_plus",
        "prumerge_budget": "prumerge_plus",
    }.get(method, method)
    if method == "autoprune_released":
        refined = refine(materialize(load_state(released_state(recipe))), tokens)
        yield "reference", refined.reference, recorded("reference"), None
        yield "keep", refined.indices, recorded("keep"), None
        yield "rows", refined.features, recorded("features"), 1e-4
        if refined.quality is not None:  # not computed where nothing is exchanged
            yield "quality", refined.quality, recorded("quality"), 1e-4
        return
    if recipe["gen"] == "video":
        document = json.loads((POLICIES / f"{method}.json").read_text())
        document["base_policy"]["params"] = params_of(method, recipe).model_dump()
        document["frames"] |= {"low": recipe.get("low", document["frames"]["low"])}
        if method == "vcast":
            document["frames"]["tau"] = recipe["tau"]
        elif recipe.get("first") == "global":
            document["frames"]["first"] = "as_others"
        refined = refine(
            materialize(load_state(document), recipe["K"], video=True), tokens
        )
        yield "keep", refined.indices, recorded("keep")[None], None
        return
    if method in ORDERED:
        picks = select(case, policy, tokens)
        yield "order", picks, recorded("order").reshape(picks.shape), None
        return

    # What is served, by tile: picks, and rows with what is merged into them.
    tiles = tokens.grid.tiles
    params = params_of(policy, recipe)
    if method in (
        "prumerge",
        "prumerge_budget",
    ):  # the published choice, and the rows that it has
        layer = tokens.require_next_layer()
        patches = tokens.require_tower().patches
        merged = _merge_neighbours(
            layer.attention, layer.keys, patches, recorded("idx")[None]
        )
        yield (
            "rows",
            torch.cat(merged, dim=1)[0],
            recorded("features"),
            NEXT_TO_ROUNDING,
        )
        return
    count = recipe.get("K") or len(recorded("keep")[0]) + 1
    if method == "dart":
        count = len(recorded("keep"))  # pivots are added to the published budget
    elif method == "sparsevlm":  # the dropped ones in descending order are clustered
        count = min(count, tokens.count - 1)
        order = BASE_POLICIES[policy].select(params, tokens, tokens.count).picks
        language = tokens.require_language()
        states = language.visual(language.states(params.layer), tokens.count, dim=1)
        states = gather_rows(
            states, order[:, count:][:, : _recycled_count(tokens.count - count)]
        )
        clusters = states.shape[1] // 10 + 1
        members = _density_peak_clusters(states, clusters, break_ties=False)
        yield (
            "rows",
            _cluster_means(members, states)[0],
            recorded("merged"),
            NEXT_TO_ROUNDING,
        )
    budget = min(count * tiles, tokens.count + (recipe.get("mode") == "cls"))
    served = BASE_POLICIES[policy].select(params, tokens, budget)

    def by_tile(values: Tensor) -> Tensor:
        """Values ``(B, P, ...)`` of rows that come in turn from every tile, ``(R, p, ...)``."""
        shape = (len(values), -1, tiles, *values.shape[2:])
        return values.reshape(shape).transpose(1, 2).flatten(0, 1)

    features = by_tile(gather_rows(served.rows(tokens), served.picks))
    picks = by_tile(served.picks)
    picks = picks - (torch.arange(len(picks)) % tiles)[:, None] * tokens.grid.per_tile
    match method:
        case "pdrop" | "dart" | "sparsevlm":
            yield "keep", ascending(picks), recorded("keep")[None], None
        case "holov" | "prunesid":
            yield "order", ascending(picks), ascending(recorded("order")), None
        case "fsr":
            yield "order", picks, recorded("order"), None
            exact = case.dtype == torch.float32
            yield (
                "rows",
                features,
                recorded("features"),
                NEXT_TO_ROUNDING if exact else 1e-2,
            )
        case "visionzip":  # [CLS], dominant tokens in raster order, contextual ones
            assert served.extra is not None
            last = recipe["dominant"] - 1
            dominant = picks[:, :last]
            wanted = recorded("dominant_idx")
            yield "dominant", ascending(dominant), ascending(wanted)[:, 1:] - 1, None
            plain = gather_rows(features, dominant.argsort(dim=1))
            every = torch.cat([by_tile(served.extra), plain, features[:, last:]], dim=1)
            exact = case.dtype == torch.float32
            yield "rows", every, recorded("features"), 1e-4 if exact else 5e-2
        case "trim":  # kept patches in raster order, the mean of the others
            assert served.extra is not None
            yield "keep", ascending(picks), recorded("keep"), None
            plain = gather_rows(features, picks.argsort(dim=1))
            every = torch.cat([plain, by_tile(served.extra)], dim=1)
            yield "rows", every, recorded("features_fp16"), 2e-2


def released_state(recipe: Recipe) -> Recipe:
    """The shipped state with the numbers of the case, which mostly are its own."""
    document: Recipe = json.loads(AUTOPRUNE.read_text())
    signals = {call["atom"]: call for call in document["scoring"]["signals"]}
    by_weight = {
        "semantic": "instruction_guided_visual_relevance",
        "attn": "attention_proxy_saliency",
        "spatial": "spatial_centrality_prior",
        "redundancy": "redundancy_density_penalty",
        "contrast": "local_contrast_saliency",
    }
    relevance = {"negative_mean": "negative_mean", "cosine": "words"}[
        recipe["relevance"]
    ]
    signals[by_weight["semantic"]]["measure"] = relevance
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
    document["budget"] = {
        "atom": "ratio_budget",
        "ratio": 1.0,
        "floor": k,
        "ceiling": k,
    }
    return document


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

METHODS = sorted(
    folder.name
    for folder in Path(__file__).parent.glob("data/*")
    if folder.name != "clip_chunk"
)
"""All that have cases, but the text tower's (``test_signals.py``)."""

COUNTING = {
    "cdpruner/case_08": 16,  # the rank of the kernel: rounding decides the others
    "divprune/case_07": 36,  # as many distinct tokens as there are
    "mmtok/case_09": 36,
    "scope/case_07": 36,
    "cen_cdpruner/case_08": 34,
    "idpruner/case_07": 60,
}
"""Degenerate case -> how many of its first picks count, up to tokens that equal each other."""


@pytest.mark.parametrize("name", [name for method in METHODS for name in names(method)])
def test_output_equals_the_published_one(name: str) -> None:
    case = load(name)
    recipe = case.recipe
    exact = not recipe.get("note") and recipe.get("stable_order", True)
    for what, actual, wanted, tolerance in replay(case):
        if tolerance is not None:
            if exact:
                torch.testing.assert_close(
                    actual.float(),
                    wanted.float(),
                    rtol=tolerance,
                    atol=tolerance,
                    msg=what,
                )
            continue
        assert actual.shape == wanted.shape, what
        for row in actual:
            assert row.unique().numel() == row.numel(), what
            assert (
                row.numel() == 0 or 0 <= int(row.min()) <= int(row.max()) < recipe["N"]
            ), what
        if exact or what == "reference":
            assert actual.tolist() == wanted.tolist(), what
        elif recipe.get("stable_set", False):
            assert ascending(actual).tolist() == ascending(wanted).tolist(), what
        elif name in COUNTING:
            tokens = images(case)
            encoded = recipe["gen"] in ("scope", "mmtok")
            rows = (tokens.require_encoder() if encoded else tokens.features)[0]
            kind = (
                (rows[:, None] == rows[None]).all(dim=2).to(torch.uint8).argmax(dim=1)
            )
            counted = slice(COUNTING[name])
            assert (
                kind[actual[0, counted]].tolist() == kind[wanted[0, counted]].tolist()
            )
