"""Replay of golden cases of the policies that select all tokens before the language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tests.golden.case import Case
from tests.golden.compare import (
    Problems,
    compare_picks,
    find_differences,
    find_distances,
)
from tests.golden.degenerate import Demand, demand
from tests.golden.records import RECORDS
from vllm_autoprune.base_policies.holov import HoloVParams, band_quotas
from vllm_autoprune.base_policies.prunesid import PruneSIDParams, group_tokens
from vllm_autoprune.ops.rowwise import mask_from_indices
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, BasePolicyParams, Given
from vllm_autoprune.tpdsl.tokens import TileGroup, VisualTokens


def cen_divprune(case: Case) -> Problems:
    """Pick order; of duplicates, each kind before a repeat."""
    tokens = RECORDS["cen_divprune"](case)
    picks = _select(case, "cen_divprune", tokens, _centred(case))
    yield from compare_picks(case, picks, case.recorded("order"), _budget(case))
    yield from _find_early_repeats(case, tokens.features, picks)


def cen_cdpruner(case: Case) -> Problems:
    """Pick order within each tile, with a core where the case has one."""
    tokens = RECORDS["cen_cdpruner"](case)
    params, core = _centred(case), {"relevance": False}
    picks = _select(case, "cen_cdpruner", tokens, params, {**params, **core})
    yield from compare_picks(case, picks, case.recorded("order"), _budget(case))
    yield from _find_early_repeats(case, tokens.features, picks)


def scope(case: Case) -> Problems:
    """Pick order; of duplicates, each kind before a repeat."""
    tokens = RECORDS["scope"](case)
    picks = _select(case, "scope", tokens, {"alpha": float(case.recipe.get("alpha", 1))})
    yield from compare_picks(case, picks, case.recorded("order"), _budget(case))
    yield from _find_early_repeats(case, tokens.require_encoder(), picks)


def mmtok(case: Case) -> Problems:
    """Pick order, without excluded tokens, with a core where the case has one."""
    tokens = RECORDS["mmtok"](case)
    recipe = case.recipe
    params: dict[str, object] = {
        "alpha": float(recipe.get("alpha", 0.5)),
        "tau_text": recipe.get("t_tv", 0.02),
        "tau_vision": recipe.get("t_vv", 0.2),
    }
    picks = _select(case, "mmtok", tokens, params, {**params, "words": False})
    yield from compare_picks(case, picks, case.recorded("order"), _budget(case))
    yield from _find_early_repeats(case, tokens.require_encoder(), picks)


def prunesid(case: Case) -> Problems:
    """Order group by group, the groups and what each of them gives."""
    tokens = RECORDS["prunesid"](case)
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


def holov(case: Case) -> Problems:
    """The kept set, band by band, and what each band gives."""
    tokens = RECORDS["holov"](case)
    bands, count = case.recipe["bands"], _budget(case)
    params = HoloVParams(bands=bands)
    native = torch.stack(BASE_POLICIES["holov"].native(params, tokens, count).indices)
    yield from compare_picks(case, _set(native), _set(case.recorded("order")), count)
    served = BASE_POLICIES["holov"].select(params, tokens, count).picks
    yield from find_differences("served", _set(served), _set(native))
    if demand(case) is not Demand.SOUND:
        take = band_quotas(tokens.require_cls_attention(), bands, count)
        yield from find_differences("take", take, case.recorded("take"))


def fsr(case: Case) -> Problems:
    """Focus by priority and then the scan, in each tile; rows after the merge."""
    tokens, recipe = RECORDS["fsr"](case), case.recipe
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


def idpruner(case: Case) -> Problems:
    """Pick order."""
    tokens = RECORDS["idpruner"](case)
    picks = _select(case, "idpruner", tokens, {"balance": case.recipe.get("lam", 0.5)})
    yield from compare_picks(case, picks, case.recorded("order"), _budget(case))


SELECTIONS: Mapping[str, Callable[[Case], Problems]] = {
    "cen_divprune": cen_divprune,
    "cen_cdpruner": cen_cdpruner,
    "scope": scope,
    "mmtok": mmtok,
    "prunesid": prunesid,
    "holov": holov,
    "fsr": fsr,
    "idpruner": idpruner,
}


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


def _select(
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
