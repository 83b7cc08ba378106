from __future__ import annotations

import pytest
import torch

from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.safety import synthetic_probes


@pytest.mark.parametrize("budget", [1, 33, 640])
def test_probes_have_the_inputs_of_every_policy(budget: int) -> None:
    for tokens in synthetic_probes(budget):
        for policy in BASE_POLICIES.values():
            actual = policy.select(policy.call.model_fields["params"].default, tokens, budget)
            extra = 0 if actual.extra is None else actual.extra.shape[1]
            assert actual.picks.shape == (2, budget - extra)


def test_probes_are_deterministic() -> None:
    for one, other in zip(synthetic_probes(9), synthetic_probes(9), strict=True):
        assert torch.equal(one.features, other.features)
        mine, yours = one.require_tower(), other.require_tower()
        assert torch.equal(mine.patches, yours.patches)
        assert torch.equal(mine.project(mine.patches), yours.project(yours.patches))
        assert torch.equal(
            one.require_language().attention(1), other.require_language().attention(5)
        )


def test_one_image_has_text_that_is_padding() -> None:
    for tokens in synthetic_probes(4):
        assert tokens.require_language().text.sum(dim=1).tolist() == [6, 4]
