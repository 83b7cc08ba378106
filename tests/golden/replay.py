"""Replay of golden cases through the interface of base policies and of refine, and comparison.

A problem is one line of text. Where the published loop gives NaN or duplicates, picks are compared
as far as they count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.golden.case import Case, images
from vllm_autoprune import PruningState, load_state
from vllm_autoprune.ops.rowwise import mask_from_indices
from vllm_autoprune.serving.worker.question import split_segments
from vllm_autoprune.tpdsl.base_policy import (
    BASE_POLICIES,
    BasePolicyParams,
    Given,
    PublishedSelection,
)
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.refine import refine
from vllm_autoprune.tpdsl.tokens import VisualTokens

AUTOPRUNE = Path(__file__).parents[2] / "policies" / "autoprune.json"

_SIGNALS = {
    "semantic": "instruction_guided_visual_relevance",
    "attn": "attention_proxy_saliency",
    "spatial": "spatial_centrality_prior",
    "redundancy": "redundancy_density_penalty",
    "contrast": "local_contrast_saliency",
}

Problems = Iterator[str]
Params = dict[str, Any]

METHODS: dict[str, Callable[[Case], Problems]] = {}
"""What replays the cases of a folder, by its name."""


def replay(case: Case) -> list[str]:
    """Differences between this implementation and the published output of a case."""
    method = case.name.split("/")[0]
    if method not in METHODS:
        return [f"no method of the name {method!r} is known"]
    return list(METHODS[method](case))


class Demand(Enum):
    """Part of the output that must equal the published one."""

    ORDER = "order"
    SET = "set"
    SOUND = "sound"
    """Nothing: the right number of unique indices in range, and finite rows."""


def demand(case: Case) -> Demand:
    """Order if it is stable, else the set if that is; less for degenerate cases."""
    if not case.note and case.recipe.get("stable_order", True):
        return Demand.ORDER
    return Demand.SET if case.recipe.get("stable_set", False) else Demand.SOUND


def _compare_picks(case: Case, picks: Tensor, wanted: Tensor, count: int) -> Problems:
    """Picks ``(B, K)`` with those of the published code, as far as the case allows."""
    for row in picks:
        if row.numel() != count:
            yield f"{row.numel()} indices instead of {count}"
        if row.unique().numel() != row.numel():
            yield "an index repeats"
        if row.numel() and not 0 <= int(row.min()) <= int(row.max()) < case.recipe["N"]:
            yield f"an index lies outside of 0 to {case.recipe['N'] - 1}"
    if demand(case) is Demand.ORDER:
        yield from _compare("order", picks, wanted)
    elif demand(case) is Demand.SET:
        yield from _compare("set", _set(picks), _set(wanted))


def _compare(what: str, actual: Tensor, wanted: Tensor, tolerance: float | None = None) -> Problems:
    """Equal whole numbers, or rows within a tolerance."""
    if actual.shape != wanted.shape:
        yield f"{what}: shape {tuple(actual.shape)} instead of {tuple(wanted.shape)}"
    elif tolerance is None:
        if wrong := int((actual != wanted).sum()):
            place = int((actual != wanted).flatten().nonzero()[0])
            yield f"{what}: {wrong} of {actual.numel()} differ, the first at {place}"
    elif not torch.allclose(actual.float(), wanted.float(), rtol=tolerance, atol=tolerance):
        apart = float((actual.float() - wanted.float()).abs().max())
        yield f"{what}: {apart:.2g} apart, allowed {tolerance}"


def _set(picks: Tensor) -> Tensor:
    return picks.sort(dim=-1).values


def _params(policy: str, params: Params) -> BasePolicyParams:
    return BASE_POLICIES[policy].call.model_validate({"name": policy, "params": params}).params


def _native(
    policy: str, params: Params, tokens: VisualTokens, budget: int | None
) -> PublishedSelection:
    return BASE_POLICIES[policy].native(_params(policy, params), tokens, budget)


def _within_tiles(picks: Tensor, tokens: VisualTokens) -> Tensor:
    return picks - torch.arange(len(picks))[:, None] * tokens.grid.per_tile


# Policies that return picks in an order of their own.

_ORDERED: dict[str, Callable[[dict[str, Any]], Params]] = {
    "cdpruner": lambda recipe: {},
    "divprune": lambda recipe: {},
    "fastv": lambda recipe: {},
    "cen_divprune": lambda recipe: _centred(recipe),
    "cen_cdpruner": lambda recipe: _centred(recipe),
    "scope": lambda recipe: {"alpha": float(recipe.get("alpha", 1))},
    "mmtok": lambda recipe: {
        "alpha": float(recipe.get("alpha", 0.5)),
        "tau_text": recipe.get("t_tv", 0.02),
        "tau_vision": recipe.get("t_vv", 0.2),
    },
    "idpruner": lambda recipe: {"balance": recipe.get("lam", 0.5)},
}
_WITHOUT_QUESTION: dict[str, Params] = {
    "cen_cdpruner": {"relevance": False},
    "mmtok": {"words": False},
}


def _centred(recipe: dict[str, Any]) -> Params:
    scale = bool(recipe.get("scale", 0))
    return {"scale_variance": scale, "weight": recipe.get("gmap", "minmax")}


def _ordered(case: Case) -> Problems:
    policy, tokens = case.name.split("/")[0], images(case)
    picks = _select(case, policy, tokens, _ORDERED[policy](case.recipe))
    wanted = case.recorded("order")
    wanted = wanted if wanted.dim() == 2 else wanted[None]
    yield from _compare_picks(case, picks, wanted, min(case.recipe["K"], case.recipe["N"]))
    rows = tokens.require_encoder() if policy in ("scope", "mmtok") else tokens.features
    yield from _find_early_repeats(case, rows, picks)
    if bound := re.search(r"residual\s*<=\s*([0-9.eE+-]*[0-9])", case.note):
        yield from _compare_until_rank(case, tokens, picks, float(bound[1]))
    if limit := re.search(r"first (\d+) picks", case.note):
        kind, count = _kinds(tokens.features[0]), int(limit[1])
        if kind[picks[0, :count]].tolist() != kind[wanted[0, :count]].tolist():
            yield f"the first {count} picks are others, even up to duplicates"
    if policy == "fastv" and demand(case) is not Demand.SOUND:
        start, length = case.recipe["sys"], case.inputs["attn_last_row"].shape[1]
        after = torch.arange(start + tokens.count, length)
        positions = torch.cat([torch.arange(start), _set(picks)[0] + start, after])
        yield from _compare("keep_seq", positions, case.recorded("keep_seq"))


METHODS |= dict.fromkeys(_ORDERED, _ordered)


def _select(case: Case, policy: str, tokens: VisualTokens, params: Params) -> Tensor:
    """Picks ``(B, K)``, of one image of B tiles ``(T, K)``.

    The first ``core`` picks are those of the question-free parameters, where the case has a core.
    Excluded tokens are closed, unless too few are left.
    """
    recipe, chosen, tiles = case.recipe, BASE_POLICIES[policy], tokens.grid.tiles
    count, core = min(recipe["K"], recipe["N"]) * tiles, recipe.get("core", 0) * tiles
    picks = torch.empty(tokens.batch, 0, dtype=torch.int64)
    if core:
        silent = _params(policy, params | _WITHOUT_QUESTION[policy])
        picks = chosen.select(silent, tokens, core).picks
    closed = mask_from_indices(picks, tokens.count)
    excluded = recipe.get("exclude", [])
    if excluded and tokens.count - len(excluded) >= recipe["K"]:
        closed[:, excluded] = True
    if closed.any():
        start = Given(picks, closed, closed, int(closed.sum(dim=1).max()))
        rest = chosen.select_given(_params(policy, params), tokens, count - core, start)
        picks = torch.cat([picks, rest], dim=1)
    else:
        picks = chosen.select(_params(policy, params), tokens, count).picks
    # Picks come in turn from every tile.
    return picks if tiles == 1 else _within_tiles(picks.reshape(-1, tiles).T, tokens)


def _kinds(rows: Tensor) -> Tensor:
    """The first token ``(N,)`` that each token of rows ``(N, D)`` equals."""
    alike = (rows[:, None, :] == rows[None, :, :]).all(dim=2)
    return alike.to(torch.uint8).argmax(dim=1)


def _find_early_repeats(case: Case, rows: Tensor, picks: Tensor) -> Problems:
    """Where the note demands it: tokens that equal a pick, before one of each kind is picked.

    Kinds that are never picked before repeats start have a weight below the floor.
    """
    if "one token of every distinct group before any repeat" not in case.note:
        return
    floor = 2 if "weight below the floor excepted" in case.note else 0
    for features, order in zip(rows, picks, strict=False):
        kind = _kinds(features)
        early = kind[order[: min(kind.unique().numel() - floor, len(order))]]
        if early.unique().numel() != early.numel():
            yield f"a token repeats among the first {early.numel()} picks"


def _compare_until_rank(case: Case, tokens: VisualTokens, picks: Tensor, bound: float) -> Problems:
    """Compare CDPruner's picks ``(T, K)`` up to the numerical rank of the kernel.

    A pick counts while the squared residual of q_j u_j outside the span of earlier picks is above
    the bound. None does where relevance is constant: the published code divides zero by zero.
    """
    instruction = tokens.require_instruction()
    patches, text = instruction.patches[0].double(), instruction.text[0].double()
    unit = torch.nn.functional.normalize(patches, dim=1)
    raw = instruction.sign * (unit @ torch.nn.functional.normalize(text, dim=1).T).mean(dim=1)
    spread = raw.max() - raw.min()
    if spread < 1e-12:
        return
    quality = ((raw - raw.min() + 1e-6) / spread).reshape(len(picks), -1)
    features = tokens.by_tile(tokens.features).double()
    for tile, order in enumerate(picks):
        outside = torch.nn.functional.normalize(features[tile], dim=1) * quality[tile][:, None]
        sound = 0
        for pick in order.tolist():
            if float(outside[pick].square().sum()) <= bound:
                break
            direction = outside[pick] / outside[pick].norm()
            outside = outside - (outside @ direction)[:, None] * direction
            sound += 1
        if order[:sound].tolist() != case.recorded("order")[tile, :sound].tolist():
            yield f"the first {sound} picks of tile {tile}, which still count, are others"


# Policies whose published code returns more than picks, or in another order.


def _method(function: Callable[[Case], Problems]) -> Callable[[Case], Problems]:
    METHODS[function.__name__] = function
    return function


@_method
def dart(case: Case) -> Problems:
    """Kept tokens in raster order."""
    kept = _native("dart", {}, images(case), case.recipe["K"]).indices[0]
    yield from _compare("n_out", torch.tensor(kept.numel()), case.recorded("n_out"))
    yield from _compare_picks(case, kept[None], case.recorded("keep")[None], kept.numel())


@_method
def pdrop(case: Case) -> Problems:
    """Kept tokens of one stage in raster order."""
    kept = _native("pyramiddrop", {}, images(case), case.recipe["K"]).indices[0]
    yield from _compare_picks(case, kept[None], case.recorded("keep")[None], case.recipe["K"])


@_method
def holov(case: Case) -> Problems:
    """The kept set; what is served is the same in another order."""
    tokens, params = images(case), {"bands": case.recipe["bands"]}
    count = min(case.recipe["K"], case.recipe["N"])
    native = torch.stack(_native("holov", params, tokens, count).indices)
    yield from _compare_picks(case, _set(native), _set(case.recorded("order")), count)
    served = BASE_POLICIES["holov"].select(_params("holov", params), tokens, count).picks
    yield from _compare("served", _set(served), _set(native))


@_method
def prunesid(case: Case) -> Problems:
    """Order group by group; what is served is the same in another order."""
    tokens, params = images(case), {"mode": case.recipe["mode"]}
    with_cls = params["mode"] == "cls"
    count = min(case.recipe["K"], tokens.count + with_cls)
    native = _native("prunesid", params, tokens, count)
    picks = torch.stack([indices[indices >= 0] for indices in native.indices])
    yield from _compare_picks(case, picks, case.recorded("order"), count - with_cls)
    if count > with_cls:  # one row is a patch where it is served, and [CLS] as published
        served = BASE_POLICIES["prunesid"].select(_params("prunesid", params), tokens, count).picks
        yield from _compare("served", _set(served), _set(picks))


@_method
def fsr(case: Case) -> Problems:
    """Focus by priority and then the scan, in each tile; rows after the merge."""
    tokens, recipe = images(case), case.recipe
    tiles, count = tokens.grid.tiles, min(recipe["K"], recipe["N"])
    params = {
        "alpha": float(recipe.get("a", 3)),
        "beta": float(recipe.get("b", 1)),
        "rho": recipe.get("rho", 0.9),
        "kappa": float(recipe.get("kappa", 1)),
    }
    native = _native("fsr", params, tokens, count * tiles)
    assert native.features is not None
    picks = _within_tiles(native.indices[0].reshape(tiles, -1), tokens)
    yield from _compare_picks(case, picks, case.recorded("order"), count)
    served = BASE_POLICIES["fsr"].select(_params("fsr", params), tokens, count * tiles).picks
    yield from _compare("served", _set(served), _set(native.indices[0][None]))
    if not case.note:
        rows = native.features[0].reshape(tiles, count, -1)
        yield from _compare("rows", rows, case.recorded("features"), 1e-3)


@_method
def visionzip(case: Case) -> Problems:
    """The dominant set, [CLS] as 0; rows before the projector."""
    dominant, tolerance = case.recipe["dominant"], 1e-4 if case.dtype == torch.float32 else 5e-2
    tokens, params = images(case), {"contextual": case.recipe["contextual"]}
    native = _native("visionzip", params, tokens, case.recipe["K"])
    assert native.features is not None
    for image, indices in enumerate(native.indices):
        wanted = _set(case.recorded("dominant_idx")[image]) - 1
        kept = indices[:dominant]
        yield from _compare_picks(case, kept[None, 1:], wanted[None, 1:], dominant - 1)
        if not case.note:
            rows, features = native.features[image], case.recorded("features")[image]
            yield from _compare("rows", rows, features, tolerance)


@_method
def prumerge(case: Case) -> Problems:
    """Indices in output order, and rows before the projector: K tokens, or its published count."""
    params = {"plus": bool(case.recipe.get("plus", True))}
    native = _native("prumerge_plus", params, images(case), case.recipe.get("K"))
    assert native.features is not None
    wanted = case.recorded("idx")
    yield from _compare_picks(case, native.indices[0][None, :-1], wanted[None], wanted.numel())
    if demand(case) is Demand.ORDER:
        yield from _compare("rows", native.features[0], case.recorded("features"), 1e-3)


METHODS["prumerge_budget"] = prumerge


@_method
def trim(case: Case) -> Problems:
    """Kept patches of every tile in raster order; rows before the projector, the mean last."""
    tokens, budget = images(case), case.recipe.get("K")
    tiles = tokens.grid.tiles
    native = _native("trim", {}, tokens, None if budget is None else budget * tiles)
    assert native.features is not None
    indices = native.indices[0].reshape(tiles, -1)
    yield from _compare("n_out", torch.tensor(indices.shape[1]), case.recorded("n_out"))
    kept, wanted = _within_tiles(indices[:, :-1], tokens), case.recorded("keep")
    yield from _compare_picks(case, kept, wanted, wanted.shape[1])
    rows = native.features[0].reshape(*indices.shape, -1)
    if not case.note:
        yield from _compare("rows", rows, case.recorded("features_fp16"), 2e-2)
    for tile, patches in enumerate(tokens.by_tile(tokens.features)):
        others = torch.ones(len(patches), dtype=torch.bool).scatter(0, kept[tile], False)
        mean = patches[others].float().mean(dim=0, keepdim=True)
        yield from _compare("rows", rows[tile], torch.cat([patches[kept[tile]], mean]), 2e-2)


@_method
def sparsevlm(case: Case) -> Problems:
    """Kept tokens, and the means of the clusters of recycled ones."""
    tokens = images(case)
    native = _native("sparsevlm", {}, tokens, case.recipe["K"])
    assert native.features is not None
    kept = native.indices[0][native.indices[0] >= 0]
    count = min(case.recipe["K"], tokens.count - 1)
    yield from _compare_picks(case, kept[None], case.recorded("keep")[None], count)
    if not case.note:
        clusters = native.features[0][kept.numel() :]
        yield from _compare("rows", clusters, case.recorded("merged"), 1e-3)


# Cases of more or of less than a base policy.


@_method
def autoprune_released(case: Case) -> Problems:
    """Reference picks in order, kept tokens, token quality within 1e-4, rows within 1e-4."""
    refined = refine(materialize(released_state(case)), images(case))
    yield from _compare("reference", refined.reference, case.recorded("reference"))
    yield from _compare("keep", refined.indices, case.recorded("keep"))
    yield from _compare("rows", refined.features, case.recorded("features"), 1e-4)
    if refined.quality is not None:  # not computed where nothing is exchanged
        yield from _compare("quality", refined.quality, case.recorded("quality"), 1e-4)


def released_state(case: Case) -> PruningState:
    """The shipped state with the numbers of the case, which mostly are its own."""
    recipe = case.recipe
    document: dict[str, Any] = json.loads(AUTOPRUNE.read_text())
    signals = {call["atom"]: call for call in document["scoring"]["signals"]}
    relevance = {"negative_mean": "negative_mean", "cosine": "words"}[recipe["relevance"]]
    signals[_SIGNALS["semantic"]]["measure"] = relevance
    signals[_SIGNALS["spatial"]]["bias"] = recipe["center_bias"]
    document["scoring"]["signals"] = [
        {**signals[_SIGNALS[name]], "weight": weight} for name, weight in recipe["weights"].items()
    ]
    document["constraints"]["selector"] |= {
        name: recipe[name] for name in ("q_e", "r_min", "lam", "keep_weight", "power")
    }
    document["reassembly"]["strength"] = recipe["scale"]
    budget = recipe["K"]
    document["budget"] = {"atom": "ratio_budget", "ratio": 1.0, "floor": budget, "ceiling": budget}
    return load_state(document)


@_method
def next_order(case: Case) -> Problems:
    """Order in which LLaVA-NeXT reads tokens: the base view, then 2 x 2 crops as one picture."""
    side, tiles = int(case.recipe["N"] ** 0.5), len(case.recorded("keep"))
    tile = torch.arange(tiles)[:, None].expand_as(case.recorded("keep")).flatten()
    place = case.recorded("keep").flatten()
    y, x = place // side, place % side
    crop = (tile - 1).clamp_min(0)
    across = (crop // 2 * side + y) * 2 * side + crop % 2 * side + x
    turn = torch.where(tile == 0, place, side * side + across).argsort()
    order = (tile * side * side + place)[turn]
    yield from _compare("sequence", order, case.recorded("sequence"))


@_method
def clip_chunk(case: Case) -> Problems:
    """A long text as segments of CLIP's length, and where each of them is pooled."""
    wanted = case.recorded("segments")
    segments = split_segments(tuple(case.recorded("token_ids").tolist()), wanted.shape[1])
    padded = torch.zeros(len(segments), wanted.shape[1], dtype=torch.int64)
    for row, segment in zip(padded, segments, strict=True):
        row[: len(segment)] = torch.tensor(segment)
    yield from _compare("segments", padded, wanted)
    yield from _compare("pooled_pos", padded.argmax(dim=1), case.recorded("pooled_pos"))
