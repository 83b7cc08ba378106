from __future__ import annotations

import pytest

from scripts.base_policies import PAGE, page
from vllm_autoprune.base_policies.published_forms import PUBLISHED_FORMS
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES


def test_every_base_policy_has_a_form_and_the_other_way_round() -> None:
    assert sorted(PUBLISHED_FORMS) == sorted(BASE_POLICIES)


@pytest.mark.parametrize("name", PUBLISHED_FORMS)
def test_layers_run_where_the_policy_reads_the_language_model(name: str) -> None:
    form = PUBLISHED_FORMS[name]
    assert (form.layers > 0) == ("language" in BASE_POLICIES[name].needs)
    assert (form.published == "in-LLM pruning") == (form.layers > 0)
    merges = not {"tower", "next_layer"}.isdisjoint(BASE_POLICIES[name].needs)
    assert (form.published == "pre-projector merge") == merges
    assert form.ours and not any(note.endswith(".") for note in form.ours)


def test_the_page_is_what_the_command_writes() -> None:
    stale = "run: python scripts/base_policies.py"
    assert PAGE.read_text(encoding="utf-8") == page(), stale
