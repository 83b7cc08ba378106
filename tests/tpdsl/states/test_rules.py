from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.tpdsl.samples import edited, sample
from vllm_autoprune import PruningState, StateError, load_state
from vllm_autoprune.tpdsl.json_text import MAX_BYTES, MAX_DEPTH, MAX_VALUES
from vllm_autoprune.tpdsl.loading import RULES

ACCEPTS = jsonschema.Draft202012Validator(PruningState.model_json_schema()).is_valid


def scores(value: object) -> str:
    return json.dumps(edited(sample(), {"/provenance": {"scores": {"x": value}}}))


def changed(pointer: str, value: object) -> str:
    return json.dumps(edited(sample(), {pointer: value}))


# For each rule a minimal breach, which the schema accepts.
TEXTS: dict[str, Callable[[], str]] = {
    "size": lambda: scores(1).ljust(MAX_BYTES + 1),
    "syntax": lambda: scores(float("nan")),
    "duplicate_key": lambda: scores(1).replace('"x": 1', '"x": 1, "x": 1'),
    "surrogate": lambda: scores("\ud800"),
    "number": lambda: scores(1).replace('"x": 1', '"x": 1e309'),
    "depth": lambda: scores(json.loads("[" * (MAX_DEPTH - 2) + "]" * (MAX_DEPTH - 2))),
    "values": lambda: scores([0] * MAX_VALUES),
    "limit_below_budget": lambda: changed("/budget/limit", 31),
    "r_min_above_budget": lambda: changed("/constraints/selector/r_min", 33),
}


def broken(source: str | Path) -> set[str]:
    """Kinds of the problems of a refused state."""
    with pytest.raises(StateError) as raised:
        load_state(source)
    return {problem.kind for problem in raised.value.problems}


@pytest.mark.parametrize("kind", TEXTS)
def test_the_schema_accepts_what_only_the_rule_refuses(kind: str) -> None:
    text = TEXTS[kind]()
    assert ACCEPTS(json.loads(text))
    assert broken(text) == {kind}


def test_rules_about_files(tmp_path: Path) -> None:
    pipe, marked = tmp_path / "pipe", tmp_path / "marked.json"
    os.mkfifo(pipe)
    marked.write_text(json.dumps(sample()), encoding="utf-8-sig")
    assert ACCEPTS(json.loads(marked.read_text(encoding="utf-8-sig")))
    assert broken(pipe) == {"file"} and broken(marked) == {"encoding"}


def test_every_rule_is_tested_and_documented() -> None:
    assert set(RULES) == {*TEXTS, "file", "encoding"}
    assert all(rule.kind == kind and rule.requires and rule.why for kind, rule in RULES.items())


@pytest.mark.parametrize(
    ("pointer", "value", "kind"),
    [
        ("/schema", "autoprune-state/9", "version"),
        ("/colour", 1, "unknown_field"),
        ("/reassembly/atom", "x", "unknown_name"),
        ("/scoring", {}, "missing"),
        ("/budget/limit", 0, "value"),
    ],
)
def test_schema_violations_are_not_rules(pointer: str, value: object, kind: str) -> None:
    text = changed(pointer, value)
    assert not ACCEPTS(json.loads(text))
    assert broken(text) == {kind} and kind not in RULES


def test_the_page_on_states_lists_every_rule() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/states.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(.+)` \| (.+) \| (.+) \|$", page, flags=re.MULTILINE)
    assert listed == [(rule.kind, rule.requires, rule.why) for rule in RULES.values()]
