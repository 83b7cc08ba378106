from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from benchmarks.search.comparison import run_comparison
from benchmarks.search.stand_ins import RandomProposer, RecordedProposer, draw_json
from offline_search.candidates.compact_schema import shorten_schema
from offline_search.candidates.components import JsonObject
from offline_search.candidates.menu import draw_menu
from offline_search.candidates.proposal import parse_proposal
from offline_search.candidates.schema import proposal_schema
from offline_search.ledger import Ledger, read_ledger
from offline_search.ledger.records import ReplyRecord, SettingsRecord
from offline_search.settings import Settings
from offline_search.strategies.start_states import minimal_state
from tests.offline_search.replies import valid_replies
from tests.offline_search.synthetic import ScriptedProposer, SyntheticEvaluator, dataset
from vllm_autoprune.errors import SearchError

SETTINGS = Settings(rounds=2, per_round=3, budgets=(8,), proposer="m", menu=1)
ONE = SETTINGS.model_copy(update={"menu": 0})


@pytest.fixture
def evaluator(tmp_path: Path) -> SyntheticEvaluator:
    folder = tmp_path / "data"
    folder.mkdir()
    return SyntheticEvaluator(dataset(folder))


def _digest(folder: Path, arm: str) -> str:
    with Ledger(folder / f"{arm}-0.jsonl") as ledger:
        return ledger.digest()


def _replies(path: Path) -> list[str | None]:
    return [record.text for record in read_ledger(path) if isinstance(record, ReplyRecord)]


async def test_recorded_replies_are_a_proposer(
    evaluator: SyntheticEvaluator, tmp_path: Path
) -> None:
    scripted = ScriptedProposer(valid_replies(20))
    await run_comparison(tmp_path / "a", ["autoprune"], [0], ONE, evaluator, scripted)
    ledger = tmp_path / "a" / "autoprune-0.jsonl"
    for folder in ("b", "c"):
        recorded = RecordedProposer([ledger])
        assert len(recorded) == len({str(asked) for asked in scripted.requests}) > 0
        await run_comparison(tmp_path / folder, ["autoprune+"], [0], ONE, evaluator, recorded)
    assert _digest(tmp_path / "b", "autoprune+") == _digest(tmp_path / "c", "autoprune+")
    given = set(_replies(tmp_path / "b" / "autoprune+-0.jsonl"))
    assert given and given <= set(_replies(ledger))
    await run_comparison(tmp_path / "d", ["random"], [0], ONE, evaluator, None)
    with pytest.raises(SearchError, match="no proposal or choice of a model is recorded"):
        RecordedProposer([tmp_path / "d" / "random-0.jsonl"])


@pytest.mark.parametrize("strategy", ["autoprune", "autoprune+", "evoprompting-states"])
async def test_the_control_changes_nothing_but_the_replies(
    strategy: str, evaluator: SyntheticEvaluator, tmp_path: Path
) -> None:
    arm, scripted = f"{strategy}@random", ScriptedProposer(valid_replies(20))
    for folder in ("a", "b"):
        await run_comparison(tmp_path / folder, [strategy, arm], [0], SETTINGS, evaluator, scripted)
    assert _digest(tmp_path / "a", arm) == _digest(tmp_path / "b", arm)
    with_model, control = (
        read_ledger(tmp_path / "a" / f"{name}-0.jsonl") for name in (strategy, arm)
    )
    first, other = with_model[0], control[0]
    assert isinstance(first, SettingsRecord) and isinstance(other, SettingsRecord)
    assert first.settings.proposer == "m"
    expected = first.settings.model_copy(update={"proposer": RandomProposer.name})
    assert other.settings == expected
    first_requests, other_requests = (
        [record.request for record in records if isinstance(record, ReplyRecord)]
        for records in (with_model, control)
    )
    assert other_requests[0] == first_requests[0], "both get the same prompts to begin with"
    asked = len(scripted.requests)
    await run_comparison(tmp_path / "c", [arm], [0], SETTINGS, evaluator, scripted)
    assert len(scripted.requests) == asked, "the control asks no model"


async def test_programs_are_not_drawn(evaluator: SyntheticEvaluator, tmp_path: Path) -> None:
    with pytest.raises(SearchError, match="leave out strategies of programs"):
        await run_comparison(tmp_path, ["evoprompting-code@random"], [0], SETTINGS, evaluator, None)


@pytest.mark.parametrize("menu", [0, 1, 3])
def test_random_proposals_are_valid_and_differ(menu: int) -> None:
    settings = Settings(budgets=(16,), proposer="m", menu=menu)
    schema = proposal_schema(
        settings.source_budget, settings.core, settings.rank_at, settings.library, settings.bases
    )
    example, drawn = minimal_state(settings), set()
    for seed in range(100):
        rng = Random(seed)
        offered = draw_menu(rng, [example], menu, settings.source_budget) if menu else None
        restricted = shorten_schema(offered.restrict(schema) if offered else schema)
        draft = parse_proposal(json.dumps(draw_json(restricted, rng)), settings, "llm", ())
        assert draft.problems == () and draft.state is not None
        drawn.add(draft.state.digest)
    assert len(drawn) == 100


def test_every_choice_of_a_schema_is_as_likely_as_another() -> None:
    schema: JsonObject = {
        "type": "object",
        "properties": {
            "choice": {"enum": [1, 2, 3, 4]},
            "number": {"type": "number", "minimum": -1, "maximum": 3},
            "integer": {"type": "integer", "minimum": 0, "maximum": 3},
            "list": {
                "type": "array", "items": {"$ref": "#/$defs/d0"}, "minItems": 1, "maxItems": 4
            },
        },
        "required": ["choice", "number", "list"],
        "$defs": {"d0": {"anyOf": [{"const": "a"}, {"const": "b"}, {"const": "c"}]}},
    }  # fmt: skip
    rng, counts = Random(0), Counter[tuple[str, object]]()
    for _ in range(4000):
        drawn = draw_json(schema, rng)
        assert isinstance(drawn, dict) and isinstance(drawn["number"], float)
        assert isinstance(drawn["list"], list)
        counts["choice", drawn["choice"]] += 1
        counts["number", math.floor(drawn["number"])] += 1
        counts["integer", drawn.get("integer")] += 1
        counts["length", len(drawn["list"])] += 1
        counts["item", drawn["list"][0]] += 1
    share: dict[str, dict[object, float]] = {
        "choice": {1: 0.25, 2: 0.25, 3: 0.25, 4: 0.25},
        "number": {-1: 0.25, 0: 0.25, 1: 0.25, 2: 0.25},
        "integer": {None: 0.5, 0: 0.125, 1: 0.125, 2: 0.125, 3: 0.125},
        "length": {1: 0.25, 2: 0.25, 3: 0.25, 4: 0.25},
        "item": {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3},
    }
    expected = {(name, value): p for name, one in share.items() for value, p in one.items()}
    assert set(counts) == set(expected)
    for key, probability in expected.items():
        assert counts[key] / 4000 == pytest.approx(probability, abs=0.03), key


def test_an_unknown_part_of_a_schema_is_an_error() -> None:
    with pytest.raises(SearchError, match="draw it in draw_json"):
        draw_json({"type": "string"}, Random(0))
