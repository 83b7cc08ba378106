"""States that rank tokens before the patch merger."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tests.tpdsl.samples import UNCHANGED, Changes, images, sample, state
from vllm_autoprune import Grid, SelectionError, VisualTokens, load_state, materialize, refine
from vllm_autoprune.backbones import find_backbone
from vllm_autoprune.ops.rowwise import gather_rows
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.materialize import core_policy
from vllm_autoprune.tpdsl.refine import keep_reference
from vllm_autoprune.tpdsl.safety import safety_check
from vllm_autoprune.tpdsl.tokens import MergerInput, Words
from vllm_autoprune.tpdsl.transfer import transfer

IN: Changes = {"/rank_at": "merger_in"}
NORM: Changes = {
    "/scoring/signals": [{"atom": "visual_token_norm_saliency"}],
    "/constraints/selector": {"atom": "quality_topk_selector"},
}
K = 9


def merged_images(seed: int = 0, *, grid: Grid | None = None) -> VisualTokens:
    """Images with norms of patches, which are not those of their means."""
    after = images(seed, grid=grid)
    source = torch.Generator().manual_seed(1000 + seed)
    norms = torch.rand(after.batch, after.count, 2, generator=source) + 1
    return replace(after, merger_input=MergerInput(norms))


def ranked(tokens: VisualTokens) -> VisualTokens:
    """Images that have nothing but the tokens before the merger."""
    return replace(tokens, features=tokens.require_encoder(), encoder=None, merger_input=None)


@pytest.mark.parametrize(
    "changes",
    [
        *({**UNCHANGED, "/base_policy": {"name": name}}
          for name in ("divprune", "cen_divprune", "cdpruner", "cen_cdpruner")),
        {},
        {"/scoring/kernel": {"atom": "centred_cosine_kernel"}},
        {"/core": {"share": 0.5, "cover": 0.3, "strength": 0.25}},
    ],
)  # fmt: skip
def test_policies_signals_kernels_and_cores_compare_the_tokens_before_the_merger(
    changes: Changes,
) -> None:
    tokens = merged_images(grid=Grid(3, 4, tiles=3))
    kept = refine(materialize(state({**changes, **IN}), 12), tokens)
    after = materialize(state(changes), 12)
    alone = refine(after, ranked(tokens))
    assert torch.equal(kept.indices, alone.indices)
    assert kept.exchanged.tolist() == alone.exchanged.tolist()
    assert not torch.equal(kept.indices, refine(after, tokens).indices)
    if after.core:
        core = refine(core_policy(state({**changes, **IN}), 6), tokens)
        assert torch.equal(kept.indices[:, :6], core.indices)


def test_reassembly_merges_rows_after_the_merger() -> None:
    tokens = merged_images()
    blend: Changes = {"/reassembly": {"atom": "mean_residual", "strength": 0.5}}
    kept = refine(materialize(state({**blend, **IN}), tokens.count - 1), tokens)
    (dropped,) = set(range(tokens.count)) - set(kept.indices[0].tolist())
    rows = tokens.features[0]
    unit = rows / rows.norm(dim=1, keepdim=True)
    nearest = int((unit[kept.indices[0]] @ unit[dropped]).argmax())
    changed = (kept.features[0] != rows[kept.indices[0]]).any(dim=1).nonzero()[:, 0]
    assert changed.tolist() == [nearest]


def test_a_policy_that_merges_tokens_returns_rows_after_the_merger() -> None:
    """FSR's rows are linear in what it merges: a linear merger may come before or after it."""
    tokens = merged_images()
    merger = torch.randn(12, 16, generator=torch.Generator().manual_seed(5))
    tokens = replace(tokens, features=tokens.require_encoder() @ merger)
    changes: Changes = {**UNCHANGED, "/base_policy": {"name": "fsr", "params": {"rho": 0.2}}}
    kept = refine(materialize(state({**changes, **IN}), K), tokens)
    alone = refine(materialize(state(changes), K), ranked(tokens))
    assert not torch.equal(alone.features, gather_rows(ranked(tokens).features, alone.indices))
    torch.testing.assert_close(kept.features, alone.features @ merger, atol=1e-4, rtol=1e-4)


def test_words_are_compared_with_tokens_after_the_merger() -> None:
    """Every word is one token's own row, so that covering words means keeping these tokens."""
    tokens, wanted = merged_images(), torch.tensor([3, 8, 20, 31])
    words = Words(tokens.features[:, wanted], torch.ones(2, 4, dtype=torch.bool))
    mmtok = {"name": "mmtok", "params": {"alpha": 0.0, "tau_text": 0.005}}
    policy = materialize(state({**UNCHANGED, **IN, "/base_policy": mmtok}), 4)
    assert refine(policy, replace(tokens, words=words)).indices.tolist() == [wanted.tolist()] * 2


@pytest.mark.parametrize("p", [1, 2])
def test_norms_are_those_of_patches(p: int) -> None:
    tokens = merged_images()
    kept = refine(materialize(state({**NORM, "/scoring/signals/0/p": p, **IN}), K), tokens)
    best = tokens.require_merger_input().norms[:, :, p - 1].topk(K).indices.sort(dim=1).values
    assert torch.equal(kept.indices, best)


@pytest.mark.parametrize("name", BASE_POLICIES)
def test_every_base_policy_is_safe_before_the_merger(name: str) -> None:
    record = safety_check(materialize(state({"/base_policy": {"name": name}, **IN}), K))
    assert record.valid, record.failures()


def test_cores_are_shared_by_states_that_rank_at_the_same_place() -> None:
    core: Changes = {"/core": {"share": 0.5}}
    before, after = state({**core, **IN}), state(core)
    assert after.core is not None and after.core_digest == after.core.digest
    assert before.core_digest == state({**core, **IN, **UNCHANGED}).core_digest
    assert before.core_digest != after.core_digest
    assert (state().core_digest, state(IN).core_digest) == ("", "")


def test_a_backbone_without_a_merger_is_refused() -> None:
    for tokens in (images(), replace(images(), encoder=None)):
        with pytest.raises(SelectionError, match=r"rank_at: merger_in.*without a merger"):
            refine(materialize(state(IN), K), tokens)


@pytest.mark.parametrize("field", ["encoder", "features"])
def test_images_with_values_that_are_not_finite_fall_back(field: str) -> None:
    tokens, clean = merged_images(), merged_images()
    {"encoder": tokens.require_encoder(), "features": tokens.features}[field][1, 4, 2] = torch.nan
    kept = refine(materialize(state(IN), K), tokens)
    assert kept.fallback.tolist() == [0, 2]
    assert kept.features.isfinite().all()
    assert torch.equal(kept.indices[0], refine(materialize(state(IN), K), clean).indices[0])


def test_the_reference_selection_is_ranked_before_the_merger() -> None:
    tokens, before = merged_images(), state(IN)
    kept = keep_reference(materialize(before, K), tokens)
    reference = refine(materialize(before.without_exchange(), K), tokens)
    assert torch.equal(kept.indices, reference.indices)
    assert torch.equal(kept.features, reference.features)


def test_the_default_written_out_is_the_same_state() -> None:
    written = load_state(json.dumps({**sample(), "rank_at": "merger_out"}))
    assert written == state() and written.digest == state().digest != state(IN).digest
    assert "rank_at" not in written.model_dump(mode="json")


def test_transfer_to_a_backbone_without_a_merger_says_what_changes() -> None:
    moved = transfer(state(IN), backbone=find_backbone("llava-1.5-7b"))
    (change,) = [change for change in moved.changes if change.where == "/rank_at"]
    assert (change.before, change.after) == ("merger_in", "merger_out")
    assert "no patch merger" in change.why
    assert moved.state.rank_at == "merger_out"
    kept = transfer(state(IN), backbone=find_backbone("qwen2.5-vl-7b"))
    assert kept.state.rank_at == "merger_in"
