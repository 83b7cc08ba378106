"""What every selection promises, and the base policies and grids that it is checked on."""

from __future__ import annotations

from dataclasses import fields

import torch

from tests.tpdsl.samples import (
    UNCHANGED,
    Changes,
)
from vllm_autoprune import (
    Grid,
    PruningPolicy,
    RefinedTokens,
    VisualTokens,
)
from vllm_autoprune.ops.rowwise import mask_from_indices
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

GRIDS = [Grid(6, 6), Grid(3, 4, tiles=3)]
ODD_GRIDS = [Grid(1, 40), Grid(4, 4, tiles=5)]


def base(name: str, **params: object) -> Changes:
    return {"/base_policy": {"name": name, "params": params}, **UNCHANGED}


BASES: dict[str, Changes] = {
    **{name: base(name) for name in BASE_POLICIES},
    "divprune global": base("divprune", tile_scope="global"),
    "norm per tile": base("norm", tile_scope="per_tile"),
    "pivoted_qr relevance": base("pivoted_qr", relevance=2.0),
    "pivoted_qr global": base("pivoted_qr", tile_scope="global"),
    "visionzip with cls": base("visionzip", patch_only=False),
    "visionzip many contextual": base("visionzip", contextual=6),
    "visionzip none contextual": base("visionzip", contextual=0),
    "prumerge": base("prumerge_plus", plus=False),
    "prumerge_plus drop_extra": base("prumerge_plus", drop_extra=True),
    "dart embeddings": base("dart", space="embeddings"),
    "sparsevlm recycle": base("sparsevlm", recycle=True),
    "pyramiddrop layer": base("pyramiddrop", layer=24),
    "cen_divprune global": base("cen_divprune", tile_scope="global", weight="none"),
    "cen_divprune scaled": base("cen_divprune", scale_variance=True, weight="sigmoid"),
    "cen_divprune uncentred": base("cen_divprune", centre=False),
    "cen_cdpruner global": base("cen_cdpruner", tile_scope="global"),
    "cen_cdpruner core": base("cen_cdpruner", relevance=False),
    "scope flat": base("scope", alpha=0.0),
    "mmtok core": base("mmtok", words=False),
    "prunesid cls": base("prunesid", mode="cls"),
    "prunesid qwen": base("prunesid", mode="qwen"),
    "prunesid strict": base("prunesid", threshold=0.0, groups=2),
    "holov bands": base("holov", bands=5),
    "fsr core": base("fsr", alpha=0.0),
    "fsr select": base("fsr", kappa=0.0, rho=0.2),
    "fsr merge": base("fsr", kappa=9.0, rho=0.0),
    "echoprune core": base("echoprune", words=False),
    "idpruner relevance": base("idpruner", importance="relevance", balance=0.0),
}
"""Base policies alone, with parameters that change what they do."""


EVERY = slice(None)


def same(
    outcome: RefinedTokens,
    other: RefinedTokens,
    row: int | slice = EVERY,
    at: int | slice = EVERY,
) -> bool:
    """Whether rows of two results are bit-identical."""
    for field in fields(RefinedTokens):
        a = getattr(outcome, field.name)
        b = getattr(other, field.name)
        if (a is None) != (b is None) or (
            a is not None and not torch.equal(a[row], b[at])
        ):
            return False
    return True


def assert_sound(
    policy: PruningPolicy, tokens: VisualTokens, outcome: RefinedTokens
) -> None:
    """K finite rows, unique tokens in range, and the bounds of the exchange."""
    k = policy.budget
    extra = outcome.extra
    assert outcome.features.shape == (tokens.batch, k, tokens.features.shape[2])
    assert outcome.features.dtype == tokens.features.dtype
    assert bool(outcome.features.isfinite().all())
    assert outcome.indices.shape == outcome.reference.shape == (tokens.batch, k - extra)
    assert int(outcome.indices.min()) >= 0 and int(outcome.indices.max()) < tokens.count
    kept, picks = (
        mask_from_indices(part, tokens.count)
        for part in (outcome.indices, outcome.reference)
    )
    assert (
        kept.sum(dim=1).tolist()
        == picks.sum(dim=1).tolist()
        == [k - extra] * tokens.batch
    )
    stays = (kept & picks).sum(dim=1)
    assert torch.equal(outcome.exchanged, k - extra - stays)
    assert int(stays.min()) + extra >= policy.r_min
    assert int(outcome.exchanged.max()) <= policy.quota
