from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.serving.unit.samples import served
from vllm_autoprune import load_state
from vllm_autoprune.serving.shared.description import describe_as_json, format_summary
from vllm_autoprune.serving.shared.detail_budgets import DetailBudgets
from vllm_autoprune.serving.shared.request_rules import RequestRules
from vllm_autoprune.serving.shared.served_state import ServedState
from vllm_autoprune.serving.shared.text_tower import TextTower

TOWER = TextTower("some/clip", -1, "its config says so", 77, 768, 1024)


def test_summary_is_one_line_with_reasons() -> None:
    summary = format_summary(served(budget=16))
    assert "\n" not in summary
    assert served().state.digest[:12] in summary
    assert "keeps 16 tokens of an image, by --autoprune-budget" in summary
    assert "base policy cdpruner" in summary
    assert "because no --autoprune-text-tower is given" in summary
    assert "requests may set nothing, because no --autoprune-requests is given" in summary


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"budget": 32}, "keeps 32 tokens of an image, as the state has it"),
        ({"tower": TOWER}, "relevance by CLIP text tower some/clip, sign -1, because its config"),
        ({"rules": RequestRules("none", explicit=True)}, "nothing, by --autoprune-requests none"),
        ({"rules": RequestRules("budget", 8, 64, True)}, "their budget, 8 to 64 tokens"),
        ({"rules": RequestRules("states", explicit=True)}, "any state, 1 to 65536 tokens"),
    ],
)
def test_each_reason(changes: dict[str, object], reason: str) -> None:
    changed = dataclasses.replace(served(), **changes)  # type: ignore[arg-type]
    assert reason in format_summary(changed)


def test_budgets_of_details_are_described_if_there_are_any() -> None:
    assert "image_url.detail" not in format_summary(served())
    assert describe_as_json(served())["detail"] is None
    rules = RequestRules(detail=DetailBudgets(low=64, high=256))
    both = dataclasses.replace(served(), rules=rules)
    expected = "image_url.detail low keeps 64 and high keeps 256 tokens of an image, by"
    assert f"{expected} --autoprune-detail" in format_summary(both)
    assert describe_as_json(both)["detail"] == {"low": 64, "high": 256}
    one = dataclasses.replace(served(), rules=RequestRules(detail=DetailBudgets(high=256)))
    assert "image_url.detail high keeps 256 tokens" in format_summary(one)
    assert describe_as_json(one)["detail"] == {"high": 256}


def test_recall_is_described_if_there_is_any() -> None:
    assert "recall" not in format_summary(served())
    assert describe_as_json(served())["recall"] == 0
    recalling = dataclasses.replace(served(), rules=RequestRules(recall=8))
    assert "later turns recall 8 tokens" in format_summary(recalling)
    assert describe_as_json(recalling)["recall"] == 8


def test_summary_has_relevance_only_if_it_is_read() -> None:
    blind = ServedState("LlavaForConditionalGeneration", load_state("visionzip"), 64, None, 0)
    assert "relevance" not in format_summary(blind)
    assert describe_as_json(blind)["relevance"] is None


def test_json_contains_no_path(tmp_path: Path) -> None:
    local = dataclasses.replace(TOWER, path=str(tmp_path))
    here = dataclasses.replace(served(), tower=local)
    assert str(tmp_path) in format_summary(here)
    description = json.dumps(describe_as_json(here))
    assert str(tmp_path) not in description and tmp_path.name not in description
    assert "CLIP text tower from a local folder, sign -1" in description
    hub = describe_as_json(dataclasses.replace(served(), tower=TOWER))["relevance"]
    assert hub == "CLIP text tower some/clip, sign -1, because its config says so"


def test_data_has_policy_digest_and_evidence() -> None:
    state = load_state("visionzip")
    description = describe_as_json(ServedState("LlavaForConditionalGeneration", state, 64, None, 0))
    assert (description["state"], description["digest"], description["base_policy"]) == (
        "visionzip",
        state.digest,
        "visionzip",
    )
    assert description["evidence"] == state.provenance.model_dump(mode="json")
    assert description["budget"] == {"k": 64, "follows_image_size": False, "q_e": 0, "r_min": 64}
