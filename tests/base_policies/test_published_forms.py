from __future__ import annotations

import pytest

from scripts.base_policies import PAGE, page
from vllm_autoprune.base_policies.published_forms import PUBLISHED_FORMS
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES


def test_forms_and_base_policies_are_the_same_set() -> None:
    assert sorted(PUBLISHED_FORMS) == sorted(BASE_POLICIES)


@pytest.mark.parametrize("name", PUBLISHED_FORMS)
def test_form_agrees_with_the_inputs_of_the_policy(name: str) -> None:
    form = PUBLISHED_FORMS[name]
    assert (form.layers > 0) == ("language" in BASE_POLICIES[name].needs)
    assert (form.published == "in-LLM pruning") == (form.layers > 0)
    merges = not {"tower", "next_layer"}.isdisjoint(BASE_POLICIES[name].needs)
    assert (form.published == "pre-projector merge") == merges
    assert form.ours and not any(note.endswith(".") for note in form.ours)


def test_page_equals_the_command_output() -> None:
    stale = "run: python scripts/base_policies.py"
    assert PAGE.read_text(encoding="utf-8") == page(), stale
