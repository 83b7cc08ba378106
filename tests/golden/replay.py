"""Replay of golden cases through the public interface of the base policies."""

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
    find_unsound,
)
from tests.golden.degenerate import Demand, demand, same_until_duplicates, same_until_rank
from tests.golden.records import RECORDS
from tests.golden.replay_released import autoprune_released
from tests.golden.replay_selections import SELECTIONS
from vllm_autoprune.base_policies.sparsevlm import (
    cluster_count,
    find_raters,
    rater_attention,
    recycled_tokens,
)
from vllm_autoprune.serving.worker.relevance import split_segments
from vllm_autoprune.tpdsl.base_policy import (
    BASE_POLICIES,
    BasePolicyParams,
    PublishedSelection,
    ReferenceSelection,
)
from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens


def replay(case: Case) -> list[str]:
    """Differences between this implementation and the published output of a case."""
    method = case.name.split("/")[0]
    if method not in METHODS:
        return [f"no method of the name {method!r} is known"]
    return list(METHODS[method](case))


def cdpruner(case: Case) -> Problems:
    """Pick order within each tile, up to the kernel's rank where the published loop gives NaN."""
    tokens = RECORDS["cdpruner"](case)
    tiles, count = tokens.grid.tiles, case.recipe["K"]
    flat = _select("cdpruner", {}, tokens, count * tiles).picks
    # Picks come in turn from every tile.
    picks = flat.reshape(-1, tiles).T - torch.arange(tiles)[:, None] * tokens.grid.per_tile
    yield from compare_picks(case, picks, case.recorded("order"), count)
    yield from same_until_rank(case, tokens, picks)


def divprune(case: Case) -> Problems:
    """Pick order."""
    tokens = RECORDS["divprune"](case)
    picks = _select("divprune", {}, tokens, case.recipe["K"]).picks
    yield from compare_picks(case, picks, case.recorded("order")[None], case.recipe["K"])
    yield from same_until_duplicates(case, tokens.features[0], picks[0])


def visionzip(case: Case) -> Problems:
    """The dominant set, [CLS] as 0; rows before the projector."""
    dominant = case.recipe["dominant"]
    params = {"contextual": case.recipe["contextual"]}
    tokens = RECORDS["visionzip"](case)
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


def prumerge(case: Case) -> Problems:
    """PruMerge at its published count: indices in output order, and rows before the projector."""
    yield from _prumerge(case, {"plus": bool(case.recipe.get("plus", True))}, None)


def prumerge_budget(case: Case) -> Problems:
    """PruMerge with K tokens, by the rule of EffiVLM-Bench."""
    yield from _prumerge(case, {}, case.recipe["K"])


def trim(case: Case) -> Problems:
    """Kept patches of every tile in raster order; rows before the projector, the mean last."""
    tokens = RECORDS["trim"](case)
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


def dart(case: Case) -> Problems:
    """Kept tokens in raster order, and the same number with that budget."""
    tokens = RECORDS["dart"](case)
    kept = _native("dart", {}, tokens, case.recipe["K"]).indices[0]
    yield from find_differences("n_out", torch.tensor(kept.numel()), case.recorded("n_out"))
    yield from compare_picks(case, kept[None], case.recorded("keep")[None], kept.numel())
    for budget in {case.recipe["K"], kept.numel()}:
        yield from find_unsound(_select("dart", {}, tokens, budget).picks[0], budget, tokens.count)


def fastv(case: Case) -> Problems:
    """Pick order, and the surviving positions of the sequence."""
    tokens = RECORDS["fastv"](case)
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


def pdrop(case: Case) -> Problems:
    """Kept tokens of one stage in raster order."""
    tokens = RECORDS["pdrop"](case)
    kept = _native("pyramiddrop", {}, tokens, case.recipe["K"]).indices[0]
    yield from compare_picks(case, kept[None], case.recorded("keep")[None], case.recipe["K"])


def sparsevlm(case: Case) -> Problems:
    """Raters, scores, kept tokens, recycled tokens and their clusters."""
    tokens = RECORDS["sparsevlm"](case)
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


METHODS: Mapping[str, Callable[[Case], Problems]] = {
    "cdpruner": cdpruner,
    "divprune": divprune,
    "visionzip": visionzip,
    "prumerge": prumerge,
    "prumerge_budget": prumerge_budget,
    "trim": trim,
    "dart": dart,
    "fastv": fastv,
    "pdrop": pdrop,
    "sparsevlm": sparsevlm,
    "next_order": next_order,
    "clip_chunk": clip_chunk,
    "autoprune_released": autoprune_released,
    **SELECTIONS,
}


def _prumerge(case: Case, params: dict[str, object], budget: int | None) -> Problems:
    tokens = RECORDS["prumerge"](case)
    actual = _native("prumerge_plus", params, tokens, budget)
    indices, rows = actual.indices[0], _features(actual)[0]
    kept = indices[:-1]
    yield from find_unsound(kept, case.recorded("idx").numel(), tokens.count)
    if demand(case) is Demand.ORDER:
        yield from find_differences("idx", kept, case.recorded("idx"))
        yield from find_distances(rows, case.recorded("features"), 1e-3)
    elif demand(case) is Demand.SET:
        yield from find_differences("idx", kept.sort().values, case.recorded("idx").sort().values)


def _params(policy: str, params: dict[str, object]) -> BasePolicyParams:
    call = BASE_POLICIES[policy].call.model_validate({"name": policy, "params": params})
    return call.params


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
