from __future__ import annotations

import pytest
import torch

from scripts.base_policies import PAGE, page
from vllm_autoprune import VisualTokens
from vllm_autoprune.base_policies.published_forms import PUBLISHED_FORMS
from vllm_autoprune.tpdsl.base_policy import (
    BASE_POLICIES,
    BasePolicyParams,
    ReferenceSelection,
    base_policy,
)


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


def test_forms_and_base_policies_are_the_same_set() -> None:
    assert sorted(PUBLISHED_FORMS) == sorted(BASE_POLICIES)


@pytest.mark.parametrize("name", PUBLISHED_FORMS)
def test_form_agrees_with_the_inputs_of_the_policy(name: str) -> None:
    form = PUBLISHED_FORMS[name]
    policy = BASE_POLICIES[name]
    needs = policy.needs_of(policy.default_params)
    assert (form.layers > 0) == ("language" in needs)
    assert (form.published == "in-LLM pruning") == (form.layers > 0)
    merges = not {"tower", "next_layer"}.isdisjoint(needs)
    assert (form.published == "pre-projector merge") == merges
    assert form.ours and not any(note.endswith(".") for note in form.ours)


def test_page_equals_the_command_output() -> None:
    stale = "run: python scripts/base_policies.py"
    assert PAGE.read_text(encoding="utf-8") == page(), stale
