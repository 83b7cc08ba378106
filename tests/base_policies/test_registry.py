from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vllm_autoprune import VisualTokens
from vllm_autoprune.tpdsl.base_policy import (
    BASE_POLICIES,
    INSTRUCTION_NEEDS,
    BasePolicyParams,
    ReferenceSelection,
    base_policy,
)

ROOT = Path(__file__).parents[2]


def test_the_base_policies_of_this_version() -> None:
    assert {name: BASE_POLICIES[name].needs for name in BASE_POLICIES} == {
        "cdpruner": {"instruction"},
        "cen_cdpruner": {"instruction"},
        "cen_divprune": set(),
        "dart": {"language"},
        "divprune": set(),
        "fastv": {"language"},
        "fsr": {"cls_attention", "instruction"},
        "holov": {"cls_attention"},
        "idpruner": {"cls_attention", "instruction"},
        "mmtok": {"encoder", "words"},
        "prumerge_plus": {"tower", "next_layer"},
        "prunesid": {"cls_attention", "encoder", "tower"},
        "pyramiddrop": {"language"},
        "scope": {"cls_attention", "encoder"},
        "sparsevlm": {"language"},
        "trim": {"instruction", "tower"},
        "visionzip": {"cls_attention", "tower"},
    }


@pytest.mark.parametrize("name", BASE_POLICIES)
def test_policies_and_parameters_are_documented(name: str) -> None:
    policy = BASE_POLICIES[name]
    assert policy.doc.endswith(".") and "\n" not in policy.doc
    params = policy.call.model_fields["params"].annotation
    assert isinstance(params, type) and issubclass(params, BasePolicyParams)
    assert all(field.description for field in params.model_fields.values())


def test_duplicate_name_is_refused() -> None:
    def divprune(params: BasePolicyParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
        """Another policy of the same name."""
        return ReferenceSelection(torch.zeros(tokens.batch, budget, dtype=torch.int64))

    with pytest.raises(ValueError, match="'divprune' is declared twice"):
        base_policy(BasePolicyParams)(divprune)


@pytest.mark.parametrize("name", BASE_POLICIES)
def test_the_page_on_base_policies_has_a_row_and_a_paragraph_of_each(name: str) -> None:
    policy = BASE_POLICIES[name]
    page = (ROOT / "docs/base-policies.md").read_text(encoding="utf-8")
    lines = page.splitlines()
    row = next(line.split(" | ") for line in lines if line.startswith(f"| `{name}` |"))
    assert row[2] == (", ".join(f"`{need}`" for need in sorted(policy.needs)) or "-")
    asks = "yes" if policy.core is None else "optional"
    free = policy.needs.isdisjoint(INSTRUCTION_NEEDS)
    assert row[3].rstrip(" |") == ("-" if free else asks)
    assert f"**{name}**: {policy.doc} " in page
