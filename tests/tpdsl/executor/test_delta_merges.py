from __future__ import annotations

import torch

from tests.tpdsl.samples import images, state
from vllm_autoprune import RefinedTokens, materialize, refine
from vllm_autoprune.tpdsl.refine import most_similar

CORE = {"share": 0.5, "cover": 0.25, "strength": 0.5}


def refined() -> RefinedTokens:
    changes = {
        "/constraints/selector/q_e": 0,
        "/reassembly": {"atom": "mean_residual", "strength": 0.5},
        "/core": CORE,
    }
    return refine(materialize(state(changes), 8), images(3))


def test_the_delta_merges_every_token_that_the_core_does_not_stand_for() -> None:
    tokens, kept = images(3), refined()
    own, delta = kept.indices[:, :4], kept.indices[:, 4:]
    covered = most_similar(tokens, own, int(CORE["cover"] * tokens.grid.per_tile))
    for image in range(tokens.batch):
        features, cosine = tokens.features[image].float(), tokens.cosine[image]
        owner = cosine[:, delta[image]].argmax(dim=1)
        free = ~covered[image]
        free[delta[image]] = False
        for row, token in enumerate(delta[image].tolist()):
            group = features[free & (owner == row)]
            expected = features[token]
            if len(group):
                expected = (expected + group.mean(dim=0)) / 2
            torch.testing.assert_close(kept.features[image, 4 + row].float(), expected)
