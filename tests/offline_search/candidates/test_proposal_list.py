from __future__ import annotations

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from pydantic import JsonValue

from offline_search.candidates import (
    MAX_CHARACTERS,
    PURPOSES,
    Draft,
    list_purposes,
    list_schema,
    parse_list,
    parse_proposal,
)
from offline_search.schema import proposal_schema, shorten_schema
from offline_search.settings import Settings
from tests.offline_search.replies import BUDGET, HOSTILE, valid_replies

DEFAULT = Draft("llm", None, (), ("1.0",))
NAMES = {"1.0", "1.1"}


def items(count: int, **changes: JsonValue) -> list[dict[str, Any]]:
    """Different valid proposals of a list, with the same changes each."""
    fields: dict[str, JsonValue] = {
        "purpose": "ablate", "hypothesis": "The fusion does nothing.", "parent": "1.1",
        "expect": "same",
    }  # fmt: skip
    return [{**fields, **changes, **json.loads(one)} for one in valid_replies(count)]


def parse(text: str, settings: Settings, count: int = 5) -> list[Draft]:
    drafts = parse_list(text, settings, count, DEFAULT, NAMES)
    assert len(drafts) == count
    return drafts


def digests(drafts: list[Draft]) -> list[str]:
    return ["" if draft.state is None else draft.state.digest for draft in drafts]


def single_digests(count: int, settings: Settings) -> list[str]:
    return digests([parse_proposal(one, settings, "llm", ()) for one in valid_replies(count)])


@pytest.mark.parametrize(
    "around",
    ['{"proposals": LIST}', "LIST", 'Sure:\n```json\n{"proposals": LIST}\n```\n[1] {}',
     '{"notes": "[{", "proposals": LIST, "more": {}}'],
)  # fmt: skip
def test_a_list_is_found_in_surrounding_text(around: str, settings: Settings) -> None:
    text = around.replace("LIST", json.dumps(items(5), indent=1))
    drafts = parse(text, settings)
    assert digests(drafts) == single_digests(5, settings)
    for draft in drafts:
        assert draft.origin == "llm" and draft.parents == ("1.1",) and not draft.problems
        assert draft.hypothesis is not None
        assert draft.hypothesis.model_dump() == {
            "purpose": "ablate", "text": "The fusion does nothing.", "expect": "same",
        }  # fmt: skip


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_missing_proposals_are_problems(count: int, settings: Settings) -> None:
    drafts = parse(json.dumps({"proposals": items(count)}), settings)
    assert digests(drafts) == single_digests(count, settings) + [""] * (5 - count)
    assert f"the reply has {count} of 5 proposals" in str(drafts[-1].problems)


def test_proposals_beyond_those_asked_for_are_ignored(settings: Settings) -> None:
    drafts = parse(json.dumps({"proposals": items(9)}), settings)
    assert digests(drafts) == single_digests(5, settings)


def test_an_object_without_a_list_is_its_first_proposal(settings: Settings) -> None:
    drafts = parse(valid_replies(1)[0], settings)
    assert digests(drafts) == [*single_digests(1, settings), *[""] * 4]


def test_a_list_that_is_cut_off_keeps_its_complete_proposals(settings: Settings) -> None:
    text = json.dumps({"proposals": items(5)})
    lengths = {
        len([one for one in digests(parse(text[:length], settings)) if one])
        for length in range(0, len(text), 97)
    }
    assert lengths == {0, 1, 2, 3, 4}
    cut = parse(text[: len(text) * 7 // 10], settings)
    assert digests(cut)[:3] == single_digests(3, settings) and cut[-1].problems


@pytest.mark.parametrize("name", HOSTILE)
def test_an_invalid_proposal_spoils_no_other(name: str, settings: Settings) -> None:
    whole = parse(HOSTILE[name], settings)
    assert not any(digests(whole)) and all(draft.problems for draft in whole)
    wanted = single_digests(2, settings)
    before, after = (json.dumps(one) for one in items(2))
    if HOSTILE[name].startswith("{") and name != "cut":
        drafts = parse(f'{{"proposals": [{before}, {HOSTILE[name]}, {after}]}}', settings, 3)
        assert digests(drafts) == [wanted[0], "", wanted[1]]
        assert drafts[1].problems and drafts[1].parents == ("1.0",)


@pytest.mark.parametrize(
    ("changes", "purpose", "text", "expect", "parents"),
    [
        ({"purpose": "win", "expect": "much higher", "parent": "9.9"}, "", None, "higher", "1.0"),
        ({"purpose": ["ablate"], "expect": 3, "parent": {}}, "", None, "higher", "1.0"),
        ({"hypothesis": "x" * 10**4}, "ablate", "x" * MAX_CHARACTERS, "same", "1.1"),
        ({"hypothesis": ["why"]}, "ablate", "", "same", "1.1"),
        ({"hypothesis": " a\n\tb\u202e\u0007 "}, "ablate", "a b", "same", "1.1"),
        ({"hypothesis": 'a "b}" \\ ]{ c'}, "ablate", 'a "b}" \\ ]{ c', "same", "1.1"),
        ({"parent": "base", "expect": "lower"}, "ablate", None, "lower", ""),
    ],
)
def test_fields_beside_the_policy_never_make_a_proposal_invalid(
    changes: dict[str, JsonValue], purpose: str, text: str | None, expect: str, parents: str,
    settings: Settings,
) -> None:  # fmt: skip
    (draft,) = parse(json.dumps(items(1, **changes)), settings, 1)
    assert digests([draft]) == single_digests(1, settings) and draft.hypothesis is not None
    assert draft.hypothesis.purpose == purpose and draft.hypothesis.expect == expect
    assert draft.hypothesis.text == ("The fusion does nothing." if text is None else text)
    assert draft.parents == ((parents,) if parents else ())


def test_an_invalid_policy_keeps_its_hypothesis(settings: Settings) -> None:
    broken = items(1, scoring=None)[0] | {"scoring": {"signals": []}}
    (draft,) = parse(json.dumps([broken]), settings, 1)
    assert draft.state is None and draft.hypothesis is not None
    assert draft.hypothesis.purpose == "ablate"


def test_the_schema_of_a_list_accepts_such_lists_of_its_length() -> None:
    schema = list_schema(shorten_schema(proposal_schema(BUDGET)), 5)
    checked = jsonschema.Draft202012Validator(schema)
    valid = items(8)
    for item in valid:
        item["scoring"]["signals"] = item["scoring"]["signals"][:6]
    for count in range(8):
        assert checked.is_valid({"proposals": valid[:count]}) == (count == 5)
    for change in ({"purpose": "win"}, {"hypothesis": "x" * 201}, {"expect": "more"}):
        assert not checked.is_valid({"proposals": [*valid[:4], valid[4] | change]})
    del valid[0]["parent"]
    assert not checked.is_valid({"proposals": valid[:5]})
    five_requests = 5 * len(json.dumps(shorten_schema(proposal_schema(BUDGET))))
    assert 4 * len(json.dumps(schema)) < five_requests


def test_purposes_take_turns_once_something_was_measured() -> None:
    assert list_purposes(0, 5, measured=True) == list(PURPOSES)
    assert list_purposes(4, 3, measured=True) == ["worst_category", "exploit", "ablate"]
    assert list_purposes(2, 3, measured=False) == ["explore"] * 3
