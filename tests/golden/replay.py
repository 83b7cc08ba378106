"""Replay of golden cases through the public interface of the base policies and of refine."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.golden import records
from tests.golden.case import Case
from tests.golden.compare import (
    Demand,
    Problems,
    compare_picks,
    demand,
    find_differences,
    find_distances,
    find_unsound,
    same_until_duplicates,
    same_until_rank,
)
from tests.golden.records import plain_instruction
from vllm_autoprune import PruningState, load_state
from vllm_autoprune.base_policies.holov import HoloVParams, band_quotas
from vllm_autoprune.base_policies.prunesid import PruneSIDParams, group_tokens
from vllm_autoprune.base_policies.sparsevlm import (
    cluster_count,
    find_raters,
    rater_attention,
    recycled_tokens,
)
from vllm_autoprune.ops.rowwise import mask_from_indices
from vllm_autoprune.serving.worker.question import split_segments
from vllm_autoprune.tpdsl.base_policy import (
    BASE_POLICIES,
    BasePolicyParams,
    Given,
    PublishedSelection,
    ReferenceSelection,
)
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.refine import refine
from vllm_autoprune.tpdsl.tokens import Grid, TileGroup, VisualTokens, Words

AUTOPRUNE = Path(__file__).parents[2] / "policies" / "autoprune.json"

_SIGNALS = {
    "semantic": "instruction_guided_visual_relevance",
    "attn": "attention_proxy_saliency",
    "spatial": "spatial_centrality_prior",
    "redundancy": "redundancy_density_penalty",
    "contrast": "local_contrast_saliency",
}


METHODS: dict[str, Callable[[Case], Problems]] = {}
"""What replays the cases of a folder, by its name."""


def _method(function: Callable[[Case], Problems]) -> Callable[[Case], Problems]:
    METHODS[function.__name__] = function
    return function


@_method
def autoprune_released(case: Case) -> Problems:
    """Reference picks in order, kept tokens, token quality within 1e-4, rows within 1e-4."""
    refined = refine(materialize(released_state(case)), released_tokens(case))
    yield from find_differences("reference", refined.reference, case.recorded("reference"))
    yield from find_differences("keep", refined.indices, case.recorded("keep"))
    yield from find_distances(refined.features, case.recorded("features"), 1e-4)
    if refined.quality is not None:  # not computed where nothing is exchanged
        yield from find_distances(refined.quality, case.recorded("quality"), 1e-4)


def released_state(case: Case) -> PruningState:
    """The shipped state with the numbers of the case, which mostly are its own."""
    recipe: dict[str, Any] = case.recipe
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


def released_tokens(case: Case) -> VisualTokens:
    """B images on a square grid; the pooled text as the only word, where the case has one."""
    features = case.given("image_features")
    side, batch = isqrt(features.shape[1]), features.shape[0]
    text = case.given("text_embeds", cast=False).expand(batch, -1)
    words = None
    if "text_features" in case.inputs:
        pooled = case.given("text_features")[:, None]
        words = Words(pooled, torch.ones(pooled.shape[:2], dtype=torch.bool))
    return VisualTokens(
        features,
        Grid(side, side),
        instruction=plain_instruction(case.given("image_embeds", cast=False), text),
        words=words,
    )


@_method
def cen_divprune(case: Case) -> Problems:
    """Pick order; of duplicates, each kind before a repeat."""
    tokens = records.cen_divprune(case)
    picks = _select_split(case, "cen_divprune", tokens, _centred(case))
    yield from compare_picks(case, picks, case.recorded("order"), _budget(case))
    yield from _find_early_repeats(case, tokens.features, picks)


@_method
def cen_cdpruner(case: Case) -> Problems:
    """Pick order within each tile, with a core where the case has one."""
    tokens = records.cen_cdpruner(case)
    params, core = _centred(case), {"relevance": False}
    picks = _select_split(case, "cen_cdpruner", tokens, params, {**params, **core})
    yield from compare_picks(case, picks, case.recorded("order"), _budget(case))
    yield from _find_early_repeats(case, tokens.features, picks)


@_method
def scope(case: Case) -> Problems:
    """Pick order; of duplicates, each kind before a repeat."""
    tokens = records.scope(case)
    picks = _select_split(case, "scope", tokens, {"alpha": float(case.recipe.get("alpha", 1))})
    yield from compare_picks(case, picks, case.recorded("order"), _budget(case))
    yield from _find_early_repeats(case, tokens.require_encoder(), picks)


@_method
def mmtok(case: Case) -> Problems:
    """Pick order, without excluded tokens, with a core where the case has one."""
    tokens = records.mmtok(case)
    recipe = case.recipe
    params: dict[str, object] = {
        "alpha": float(recipe.get("alpha", 0.5)),
        "tau_text": recipe.get("t_tv", 0.02),
        "tau_vision": recipe.get("t_vv", 0.2),
    }
    picks = _select_split(case, "mmtok", tokens, params, {**params, "words": False})
    yield from compare_picks(case, picks, case.recorded("order"), _budget(case))
    yield from _find_early_repeats(case, tokens.require_encoder(), picks)


@_method
def prunesid(case: Case) -> Problems:
    """Order group by group, the groups and what each of them gives."""
    tokens = records.prunesid(case)
    mode = case.recipe["mode"]
    params = _params("prunesid", {"mode": mode})
    assert isinstance(params, PruneSIDParams)
    count = min(case.recipe["K"], tokens.count + (mode == "cls"))
    kept = count - (mode == "cls")
    native = BASE_POLICIES["prunesid"].native(params, tokens, count)
    picks = torch.stack([own[own >= 0] for own in native.indices])
    yield from compare_picks(case, picks, case.recorded("order"), kept)
    if kept:  # one row is a patch where it is served, and [CLS] as published
        served = BASE_POLICIES["prunesid"].select(params, tokens, count).picks
        yield from find_differences("served", _set(served), _set(picks))
    if demand(case) is not Demand.SOUND:
        grouped, _ = group_tokens(params, tokens, TileGroup(0, 1, count), kept)
        yield from find_differences("groups", grouped.group, case.recorded("groups"))
        yield from find_differences("take", grouped.take, case.recorded("take"))


@_method
def holov(case: Case) -> Problems:
    """The kept set, band by band, and what each band gives."""
    tokens = records.holov(case)
    bands, count = case.recipe["bands"], _budget(case)
    params = HoloVParams(bands=bands)
    native = torch.stack(BASE_POLICIES["holov"].native(params, tokens, count).indices)
    yield from compare_picks(case, _set(native), _set(case.recorded("order")), count)
    served = BASE_POLICIES["holov"].select(params, tokens, count).picks
    yield from find_differences("served", _set(served), _set(native))
    if demand(case) is not Demand.SOUND:
        take = band_quotas(tokens.require_cls_attention(), bands, count)
        yield from find_differences("take", take, case.recorded("take"))


@_method
def fsr(case: Case) -> Problems:
    """Focus by priority and then the scan, in each tile; rows after the merge."""
    tokens, recipe = records.fsr(case), case.recipe
    tiles, count = tokens.grid.tiles, _budget(case)
    params = _params(
        "fsr",
        {
            "alpha": float(recipe.get("a", 3)),
            "beta": float(recipe.get("b", 1)),
            "rho": recipe.get("rho", 0.9),
            "kappa": float(recipe.get("kappa", 1)),
        },
    )
    native = BASE_POLICIES["fsr"].native(params, tokens, count * tiles)
    assert native.features is not None
    picks = native.indices[0].reshape(tiles, -1)
    picks = picks - torch.arange(tiles)[:, None] * tokens.grid.per_tile
    yield from compare_picks(case, picks, case.recorded("order"), count)
    served = BASE_POLICIES["fsr"].select(params, tokens, count * tiles).picks
    yield from find_differences("served", _set(served), _set(native.indices[0][None]))
    if not case.note:
        rows = native.features[0].reshape(tiles, count, -1)
        yield from find_distances(rows, case.recorded("features"), 1e-3)


@_method
def idpruner(case: Case) -> Problems:
    """Pick order."""
    tokens = records.idpruner(case)
    picks = _select_split(case, "idpruner", tokens, {"balance": case.recipe.get("lam", 0.5)})
    yield from compare_picks(case, picks, case.recorded("order"), _budget(case))


def _centred(case: Case) -> dict[str, object]:
    scale = bool(case.recipe.get("scale", 0))
    return {"scale_variance": scale, "weight": case.recipe.get("gmap", "minmax")}


def _params(policy: str, params: dict[str, object]) -> BasePolicyParams:
    return BASE_POLICIES[policy].call.model_validate({"name": policy, "params": params}).params


def _budget(case: Case) -> int:
    """Tokens kept of a tile: all of them where K is larger."""
    return int(min(case.recipe["K"], case.recipe["N"]))


def _set(picks: Tensor) -> Tensor:
    return picks.sort(dim=1).values


def _select_split(
    case: Case,
    policy: str,
    tokens: VisualTokens,
    params: dict[str, object],
    core: dict[str, object] | None = None,
) -> Tensor:
    """Picks ``(B, K)``, of one image of B tiles ``(T, K)``.

    The first ``core`` picks are those of the question-free parameters, where the case has a core.
    Excluded tokens are closed, unless too few are left.
    """
    recipe, chosen = case.recipe, BASE_POLICIES[policy]
    tiles = tokens.grid.tiles
    count, first = _budget(case) * tiles, recipe.get("core", 0) * tiles
    picks = torch.empty(tokens.batch, 0, dtype=torch.int64)
    if first and core is not None:
        picks = chosen.select(_params(policy, core), tokens, first).picks
    closed = mask_from_indices(picks, tokens.count)
    excluded = recipe.get("exclude", [])
    if excluded and tokens.count - len(excluded) >= recipe["K"]:
        closed[:, excluded] = True
    if not closed.any():
        picks = chosen.select(_params(policy, params), tokens, count).picks
    else:
        given = Given(picks, closed, closed, int(closed.sum(dim=1).max()))
        rest = chosen.select_given(_params(policy, params), tokens, count - first, given)
        picks = torch.cat([picks, rest], dim=1)
    if tiles == 1:
        return picks
    # Picks come in turn from every tile.
    return picks.reshape(-1, tiles).T - torch.arange(tiles)[:, None] * tokens.grid.per_tile


def _find_early_repeats(case: Case, rows: Tensor, picks: Tensor) -> Problems:
    """Where the note demands it: tokens that equal a pick, before one of each kind is picked.

    Kinds that are never picked before repeats start have a weight below the floor.
    """
    if "one token of every distinct group before any repeat" not in case.note:
        return
    floor = 2 if "weight below the floor excepted" in case.note else 0
    for own, order in zip(rows, picks, strict=False):
        alike = (own[:, None, :] == own[None, :, :]).all(dim=2)
        kind = alike.to(torch.uint8).argmax(dim=1)
        kinds = kind.unique().numel()
        first = kind[order[: min(kinds - floor, len(order))]]
        if first.unique().numel() != first.numel():
            yield f"a token repeats among the first {first.numel()} picks, of {kinds} kinds"


def replay(case: Case) -> list[str]:
    """Differences between this implementation and the published output of a case."""
    method = case.name.split("/")[0]
    if method not in METHODS:
        return [f"no method of the name {method!r} is known"]
    return list(METHODS[method](case))


@_method
def cdpruner(case: Case) -> Problems:
    """Pick order within each tile, up to the kernel's rank where the published loop gives NaN."""
    tokens = records.cdpruner(case)
    tiles, count = tokens.grid.tiles, case.recipe["K"]
    flat = _select("cdpruner", {}, tokens, count * tiles).picks
    # Picks come in turn from every tile.
    picks = flat.reshape(-1, tiles).T - torch.arange(tiles)[:, None] * tokens.grid.per_tile
    yield from compare_picks(case, picks, case.recorded("order"), count)
    yield from same_until_rank(case, tokens, picks)


@_method
def divprune(case: Case) -> Problems:
    """Pick order."""
    tokens = records.divprune(case)
    picks = _select("divprune", {}, tokens, case.recipe["K"]).picks
    yield from compare_picks(case, picks, case.recorded("order")[None], case.recipe["K"])
    yield from same_until_duplicates(case, tokens.features[0], picks[0])


@_method
def visionzip(case: Case) -> Problems:
    """The dominant set, [CLS] as 0; rows before the projector."""
    dominant = case.recipe["dominant"]
    params = {"contextual": case.recipe["contextual"]}
    tokens = records.visionzip(case)
    actual = _native("visionzip", params, tokens, case.recipe["K"])
    features = _features(actual)
    for image, indices in enumerate(actual.indices):
        kept = indices[:dominant]
        yield from find_unsound(indices[1:], case.recipe["K"] - 1, case.recipe["N"])
        if demand(case) is not Demand.SOUND:
            wanted = case.recorded("dominant_idx")[image].sort().values
            yield from find_differences("dominant", kept + 1, wanted)
        if not case.note:
            tolerance = 1e-4 if case.dtype == torch.float32 else 5e-2
            yield from find_distances(features[image], case.recorded("features")[image], tolerance)


@_method
def prumerge(case: Case) -> Problems:
    """PruMerge at its published count: indices in output order, and rows before the projector."""
    yield from _prumerge(case, {"plus": bool(case.recipe.get("plus", True))}, None)


@_method
def prumerge_budget(case: Case) -> Problems:
    """PruMerge with K tokens, by the rule of EffiVLM-Bench."""
    yield from _prumerge(case, {}, case.recipe["K"])


@_method
def trim(case: Case) -> Problems:
    """Kept patches of every tile in raster order; rows before the projector, the mean last."""
    tokens = records.trim(case)
    tiles, budget = tokens.grid.tiles, case.recipe.get("K")
    whole = None if budget is None else budget * tiles
    actual = _native("trim", {}, tokens, whole)
    indices = actual.indices[0].reshape(tiles, -1)
    rows = _features(actual)[0].reshape(tiles, indices.shape[1], -1)
    patches = tokens.by_tile(tokens.features)
    if budget is not None:
        alone = _select("trim", {}, tokens, budget * tiles)
        if alone.picks.shape[1] + _rows(alone.extra) != budget * tiles:
            yield f"{alone.picks.shape[1]} picks and {_rows(alone.extra)} rows for K = {budget}"
    for tile in range(tiles):
        kept = indices[tile, :-1] - tile * tokens.grid.per_tile
        yield from find_unsound(kept, case.recorded("keep").shape[1], case.recipe["N"])
        if demand(case) is not Demand.SOUND:
            yield from find_differences("keep", kept, case.recorded("keep")[tile])
        if not case.note:
            yield from find_distances(
                rows[tile], case.recorded("features_fp16")[tile].float(), 2e-2
            )
        yield from find_distances(rows[tile, :-1], patches[tile, kept], 0.0)
        others = torch.ones(patches.shape[1], dtype=torch.bool).scatter(0, kept, False)
        yield from find_distances(
            rows[tile, -1:], patches[tile, others].float().mean(0)[None], 2e-2
        )
    yield from find_differences("n_out", torch.tensor(indices.shape[1]), case.recorded("n_out"))


@_method
def dart(case: Case) -> Problems:
    """Kept tokens in raster order, and the same number with that budget."""
    tokens = records.dart(case)
    kept = _native("dart", {}, tokens, case.recipe["K"]).indices[0]
    yield from find_differences("n_out", torch.tensor(kept.numel()), case.recorded("n_out"))
    yield from compare_picks(case, kept[None], case.recorded("keep")[None], kept.numel())
    for budget in {case.recipe["K"], kept.numel()}:
        yield from find_unsound(_select("dart", {}, tokens, budget).picks[0], budget, tokens.count)


@_method
def fastv(case: Case) -> Problems:
    """Pick order, and the surviving positions of the sequence."""
    tokens = records.fastv(case)
    picks = _select("fastv", {}, tokens, case.recipe["K"]).picks
    yield from compare_picks(case, picks, case.recorded("order")[None], case.recipe["K"])
    if demand(case) is not Demand.SOUND:
        length = case.given("attn_last_row").shape[1]
        left = _surviving_positions(picks, case.recipe["sys"], tokens.count, length)
        yield from find_differences("keep_seq", left[0], case.recorded("keep_seq"))


def _surviving_positions(kept: Tensor, start: int, count: int, length: int) -> Tensor:
    """Absolute positions ``(B, S + K + Lt)`` that remain of a sequence after pruning, ascending.

    kept ``(B, K)`` are indices among the ``count`` visual tokens.
    """
    batch, device = kept.shape[0], kept.device
    before = torch.arange(start, device=device).expand(batch, -1)
    after = torch.arange(start + count, length, device=device).expand(batch, -1)
    return torch.cat([before, kept.sort(dim=1).values + start, after], dim=1)


@_method
def pdrop(case: Case) -> Problems:
    """Kept tokens of one stage in raster order."""
    tokens = records.pdrop(case)
    kept = _native("pyramiddrop", {}, tokens, case.recipe["K"]).indices[0]
    yield from compare_picks(case, kept[None], case.recorded("keep")[None], case.recipe["K"])


@_method
def sparsevlm(case: Case) -> Problems:
    """Raters, scores, kept tokens, recycled tokens and their clusters."""
    tokens = records.sparsevlm(case)
    language = tokens.require_language()
    actual = _native("sparsevlm", {}, tokens, case.recipe["K"])
    kept = actual.indices[0][actual.indices[0] >= 0]
    score = rater_attention(language, 2, tokens.count)
    sources = recycled_tokens(score, kept[None])[0]
    result = cluster_count(sources.numel())
    clusters = _features(actual)[0][kept.numel() :]
    yield from find_unsound(kept, min(case.recipe["K"], tokens.count - 1), tokens.count)
    if clusters.shape[0] != result:
        yield f"{clusters.shape[0]} clusters of {sources.numel()} tokens, which make {result}"
    if demand(case) is not Demand.SOUND:
        yield from find_differences("keep", kept, case.recorded("keep"))
    if not case.note:
        rating = find_raters(language, tokens.count)[0].nonzero()[:, 0]
        yield from find_differences("raters", rating, case.recorded("raters"))
        yield from find_distances(score, case.recorded("rel")[None], 1e-3)
        yield from find_differences(
            "merge_src", sources.sort().values, case.recorded("merge_src").sort().values
        )
        yield from find_differences(
            "cluster_num", torch.tensor(result), case.recorded("cluster_num")
        )
        yield from find_distances(clusters, case.recorded("merged"), 1e-3)


@_method
def next_order(case: Case) -> Problems:
    """Order in which LLaVA-NeXT's language model reads the tokens of five tiles."""
    size = case.recipe["N"]
    side = int(size**0.5)
    kept = case.recorded("keep") + torch.arange(len(case.recorded("keep")))[:, None] * size
    actual = _llava_next_order(kept.reshape(1, -1), Grid(side, side, len(kept)))
    yield from find_differences("sequence", actual[0], case.recorded("sequence"))


def _llava_next_order(kept: Tensor, grid: Grid, columns: int = 2) -> Tensor:
    """Kept tokens ``(B, K)`` in the order in which LLaVA-NeXT reads them, ``(B, K)``.

    First the tokens of tile 0, the base view, in raster order; then those of the crops in raster
    order of the whole picture, with ``columns`` crops side by side. Indices count tile by tile in
    the input and the output.
    """
    tile, place = kept // grid.per_tile, kept % grid.per_tile
    y, x = place // grid.width, place % grid.width
    crop = (tile - 1).clamp_min(0)
    row = crop // columns * grid.height + y
    across = crop % columns * grid.width + x
    whole = grid.per_tile + row * (columns * grid.width) + across
    return kept.gather(1, torch.where(tile == 0, place, whole).argsort(dim=1))


@_method
def clip_chunk(case: Case) -> Problems:
    """A long text as segments of CLIP's length, and where each of them is pooled."""
    wanted = case.recorded("segments")
    ids = tuple(case.recorded("token_ids").tolist())
    padded, mask = torch.zeros_like(wanted), torch.zeros_like(wanted)
    actual = split_segments(ids, wanted.shape[1])
    if len(actual) != len(wanted):
        yield f"{len(actual)} segments instead of {len(wanted)}"
        return
    for row, segment in enumerate(actual):
        padded[row, : len(segment)] = torch.tensor(segment)
        mask[row, : len(segment)] = 1
    yield from find_differences("segments", padded, wanted)
    yield from find_differences("mask", mask, case.recorded("mask"))
    yield from find_differences("pooled_pos", padded.argmax(dim=1), case.recorded("pooled_pos"))


def _prumerge(case: Case, params: dict[str, object], budget: int | None) -> Problems:
    tokens = records.prumerge(case)
    actual = _native("prumerge_plus", params, tokens, budget)
    indices, rows = actual.indices[0], _features(actual)[0]
    kept = indices[:-1]
    yield from find_unsound(kept, case.recorded("idx").numel(), tokens.count)
    if demand(case) is Demand.ORDER:
        yield from find_differences("idx", kept, case.recorded("idx"))
        yield from find_distances(rows, case.recorded("features"), 1e-3)
    elif demand(case) is Demand.SET:
        yield from find_differences("idx", kept.sort().values, case.recorded("idx").sort().values)


def _select(
    policy: str, params: dict[str, object], tokens: VisualTokens, budget: int
) -> ReferenceSelection:
    return BASE_POLICIES[policy].select(_params(policy, params), tokens, budget)


def _native(
    policy: str, params: dict[str, object], tokens: VisualTokens, budget: int | None
) -> PublishedSelection:
    return BASE_POLICIES[policy].native(_params(policy, params), tokens, budget)


def _features(published: PublishedSelection) -> tuple[Tensor, ...]:
    assert published.features is not None
    return published.features


def _rows(extra: Tensor | None) -> int:
    return 0 if extra is None else extra.shape[1]
