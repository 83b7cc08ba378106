"""Proposals: their schema, what is read of a reply, and the state that is made of it."""

from __future__ import annotations

import json
import re
import time
from random import Random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from offline_search.candidates import (
    MAX_HYPOTHESIS,
    Draft,
    assemble_state,
    list_purposes,
    paper_state,
)
from offline_search.choices import RandomSource
from offline_search.components import JsonObject, compact_json, describe_changes
from offline_search.replies import parse_reply, reply_schema
from offline_search.search_space import sample_proposal
from offline_search.settings import Settings
from offline_search.task import describe_task
from tests.offline_search.synthetic import BUDGET, HOSTILE, VALID_REPLIES
from vllm_autoprune import load_state
from vllm_autoprune.errors import StateError
from vllm_autoprune.tpdsl.loading import shipped_states
from vllm_autoprune.tpdsl.registry import ATOMS

PLAIN = Settings(budgets=(BUDGET,))
PAPER = Settings(budgets=(32,), library="paper")
SEARCHED = Settings(budgets=(32,))
SPLIT = Settings(budgets=(BUDGET,), core=True, rank_at=True)
DEFAULT = Draft("llm", None, (), ("1.0",))
BODY: dict[str, Any] = json.loads(VALID_REPLIES[0])
PAPER_BODY: dict[str, Any] = json.loads(json.dumps(compact_json(paper_state(PLAIN))))


def parse_one(text: str, settings: Settings = PLAIN) -> Draft:
    (draft,) = parse_reply(text, settings, DEFAULT)
    return draft


def accepts(settings: Settings, body: JsonValue) -> bool:
    valid: bool = jsonschema.Draft202012Validator(reply_schema(settings)).is_valid(body)
    return valid


A, B, C = VALID_REPLIES[:3]
QUOTED = json.dumps(A)
SURROUNDED = {
    "alone": A,
    "a fence": f"Here it is:\n```json\n{A}\n```\nDone.",
    "a byte order mark": f"\ufeff{A}",
    "a set before": f"Atoms of {{pool, kernel}} matter.\n{A}",
    "an object that is no proposal": f'{{"note": {{"a": 1}}}} {A} {{"done": true}}',
    "a bracket that does not close": f"Write {{ to begin, [ for a list: {A}",
    "a bracket that does not open": f"}} ]] {A} }} ]",
    "a quote in prose": f'{{ 5" wide\n{A}',
    "braces in thoughts": f'<think>A set {{a}} or {{"atom": "y"}}? [</think>\n{A}',
    "a draft in thoughts": f"<think>{B} is too large.</think>\n\n{A}",
    "thoughts of the prompt": f"{B} { {B} } </think> {A}",
    "thoughts in thoughts": f"<think>I write <think>{B}</think> {C}</think>{A}",
    "thoughts after": f"{A}<think>Was {B} better?</think>",
    "THINKING": f"<THINKING>{B}</THINKING>{A}",
    "Mistral": f"[THINK]{B}[/THINK]{A}",
    "Kimi": f"◁think▷{B}◁/think▷{A}",
    "Seed": f"<seed:think>{B}</seed:think>{A}",
    "Cohere": f"<|START_THINKING|>{B}<|END_THINKING|>{A}",
    "gpt-oss": f"<|channel|>analysis<|message|>{B}<|end|><|start|>assistant<|channel|>final"
    f" <|constrain|>json<|message|>{A}<|return|>",
    "gpt-oss without its marks": f"analysis{B}assistantfinal{A}",
    "a draft in prose": f"First I had {B}, but this is better:\n{A}",
    "JSON in a string": QUOTED,
    "indented JSON in a string": json.dumps(json.dumps(json.loads(A), indent=2)),
    "objects around it": f'{{"result": {{"reason": "a }} or {{", "policy": {A}}}}}',
    "a list around it": f'{{"proposals": [{A}]}}',
    "a tool call with a string": f'{{"name": "propose", "arguments": {QUOTED}}}',
}
"""Replies whose proposal is A."""


@pytest.mark.parametrize("name", SURROUNDED)
def test_a_proposal_is_found_in_surrounding_text(name: str) -> None:
    draft = parse_one(SURROUNDED[name])
    assert draft.problems == () and draft.state == assemble_state(BODY, PLAIN)


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (f"<think>Let me see. {A}", "the reply holds thoughts and no answer"),
        (f"<think>{A}</think>", "the reply is empty"),
        (f"<think>{A}</think>I cannot help.", "the reply holds no JSON object"),
        (f"{A}</think>Done {{", "the reply ends within its JSON object"),
        (f"Not {{this}}: {A[:-1]},}}", "not JSON"),
        (str(BODY), "not JSON"),
    ],
    ids=str,
)
def test_what_is_only_thought_or_broken_is_no_proposal(
    reply: str, problem: str
) -> None:
    draft = parse_one(reply)
    assert draft.state is None and problem in draft.problems[0].what


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"name": "dart", "params": {"anything": 1}}, "dart"),
        ("divprune", "divprune"),
        *(
            (odd, "")
            for odd in (
                {"name": "trim"},
                {"name": ["dart"]},
                {},
                7,
                {"name": "x" * 9000},
            )
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_proposal_names_one_of_the_base_policies_offered(
    choice: JsonValue, name: str
) -> None:
    offering = PLAIN.model_copy(update={"other_bases": ("divprune", "dart")})
    assert assemble_state(BODY, offering).base_policy.name == "cdpruner"
    draft = parse_one(json.dumps({**BODY, "base_policy": choice}), offering)
    assert (draft.state.base_policy.name if draft.state else "") == name
    for problem in draft.problems:
        assert (
            problem.fix == "write cdpruner or divprune or dart"
            and len(str(problem)) < 300
        )


def test_compact_json_keeps_all_searched_components_that_act() -> None:
    for name in shipped_states():
        state = load_state(name)
        again = assemble_state(
            compact_json(state), Settings(base_policy=state.base_policy.name)
        )
        scoring = state.scoring
        if not state.reads_kernel:
            scoring = scoring.model_copy(update={"kernel": again.scoring.kernel})
        assert (again.scoring, again.reassembly) == (scoring, state.reassembly), name
        assert again.constraints == state.constraints, name


CHOSEN: JsonObject = {
    "core": {"share": 0.5, "policy": {"name": "visionzip"}},
    "rank_at": "merger_in",
}


def test_the_schema_has_core_and_position_of_ranking_where_they_are_searched() -> None:
    for accepted in (PAPER_BODY, PAPER_BODY | CHOSEN, {**PAPER_BODY, "core": None}):
        assert accepts(SPLIT, accepted)
    question: JsonObject = {"core": {"share": 0.5, "policy": {"name": "cdpruner"}}}
    assert not accepts(SPLIT, PAPER_BODY | question)
    assert not accepts(SPLIT, PAPER_BODY | {"rank_at": "x"})
    for name, value in CHOSEN.items():
        assert not accepts(PLAIN, {**PAPER_BODY, name: value})


def test_states_and_prompts_have_core_and_position_of_ranking() -> None:
    state = assemble_state(PAPER_BODY | CHOSEN, SPLIT)
    assert state.core is not None and state.core.share == 0.5
    assert state.rank_at == "merger_in"
    again = assemble_state(compact_json(state), SPLIT)
    assert (again.core, again.rank_at) == (state.core, state.rank_at)
    text = describe_task(SPLIT)
    for part in ("core (/core)", '"core": {', "merger_in"):
        assert part in text and part not in describe_task(PLAIN)


def test_changes_name_the_core_as_policies_print_it() -> None:
    plain = assemble_state(PAPER_BODY, SPLIT)
    state = assemble_state(PAPER_BODY | CHOSEN, SPLIT)
    other = assemble_state(PAPER_BODY | {"core": {"share": 0.25}}, SPLIT)
    assert describe_changes(state, other) == (
        'core share 0.5 -> 0.25, core policy name "visionzip" -> "divprune", '
        "rank_at removed"
    )
    assert "params" not in describe_changes(plain, other)


@pytest.mark.parametrize(
    "settings", [PLAIN, SEARCHED, PAPER], ids=["K = 8", "K = 32", "paper"]
)
def test_the_schema_accepts_only_loadable_proposals(settings: Settings) -> None:
    text = json.dumps(reply_schema(settings))
    assert len(text) < 20_000 and "oneOf" not in text and "discriminator" not in text
    valid = 0
    for seed in range(60):
        rng = Random(seed)
        body: Any = sample_proposal(RandomSource(rng), settings)
        short = (
            len(body["scoring"]["signals"]) <= 6
            and len(body["constraints"]["pool"]) <= 3
        )
        assert accepts(settings, body) == short
        # A number or a name that may not belong where it is.
        old, new = rng.sample(ATOMS.names(), 2)
        changed = (
            json.dumps(body).replace(f'"{old}"', f'"{new}"').replace("1.0", "99.0")
        )
        if accepts(settings, json.loads(changed)):
            assert assemble_state(json.loads(changed), settings).digest
            valid += 1
    assert 5 < valid < 60
    selector: JsonObject = {"atom": "reference_residual_exchange_selector"}
    body = {
        **PAPER_BODY,
        "constraints": {**PAPER_BODY["constraints"], "selector": selector},
    }
    for quota in (settings.source_budget, settings.source_budget + 1):
        selector["q_e"] = quota
        assert accepts(settings, body) == (quota == settings.source_budget)


def test_the_papers_library_offers_its_131_atoms_and_no_extension() -> None:
    extensions = {name for name in ATOMS.names() if ATOMS[name].origin == "extension"}
    schema = json.dumps(reply_schema(PAPER))
    task = describe_task(PAPER)
    offered = {name for name in ATOMS.names() if json.dumps(name) in schema}
    assert offered == set(ATOMS.names()) - extensions and len(offered) == 131
    assert '"r_min"' in schema and '"r_min"' not in json.dumps(reply_schema(SEARCHED))
    assert not any(name in task for name in extensions)
    assert "reassemble/ASSIGNMENT" in task
    kernels = extensions & set(ATOMS.names("similarity_kernel"))
    assert kernels
    for kernel in kernels:
        scoring = {**PAPER_BODY["scoring"], "kernel": {"atom": kernel}}
        assert assemble_state(PAPER_BODY | {"scoring": scoring}, SEARCHED).digest
        with pytest.raises(StateError, match=f"{kernel} is an extension"):
            assemble_state(PAPER_BODY | {"scoring": scoring}, PAPER)


def test_the_papers_library_has_source_budget_safety_and_r_min() -> None:
    selector = {"atom": "reference_residual_exchange_selector", "q_e": 8, "r_min": 30}
    body: JsonObject = PAPER_BODY | {
        "source": {"priors": [{"atom": "reference_mask_prior", "floor": 0.5}]},
        "budget": {"atom": "fixed_budget@64", "limit": 99},
        "safety": ["preserve_budget"],
        "constraints": {
            "pool": [{"atom": "quality_pool_builder"}],
            "selector": selector,
        },
    }
    state = assemble_state(body, PAPER)
    assert state.budget.limit == 99 and state.budget.range() == (32, 32)
    assert len(state.source.priors) == len(state.safety) == 1
    assert state.constraints.selector.bounds(32) == (2, 30)
    assert "reference_mask_prior" in json.dumps(compact_json(state))
    plain = assemble_state(body, SEARCHED)
    assert not plain.source.priors and len(plain.safety) == 4


# ---- lists ----


def items(length: int, **changes: JsonValue) -> list[dict[str, Any]]:
    """Different valid proposals of a list, with the same changes each."""
    fields: dict[str, JsonValue] = {
        "purpose": "ablate",
        "hypothesis": "The fusion does nothing.",
        "parent": "1.1",
        "expect": "same",
    }
    return [
        {**fields, **changes, **json.loads(text)} for text in VALID_REPLIES[:length]
    ]


def parse(text: str, length: int = 5) -> list[Draft]:
    drafts = parse_reply(text, PLAIN, DEFAULT, length, {"1.0", "1.1"})
    assert len(drafts) == length
    return drafts


def digests(drafts: list[Draft]) -> list[str]:
    return ["" if draft.state is None else draft.state.digest for draft in drafts]


SINGLE = digests([parse_one(text) for text in VALID_REPLIES[:5]])


FENCED = "\n".join(f"### {name}\n```json\nITEM\n```" for name in "12345")


@pytest.mark.parametrize(
    "around",
    [
        '{"proposals": LIST}',
        "LIST",
        'Sure:\n```json\n{"proposals": LIST}\n```\n[1] {}',
        '{"notes": "[{", "proposals": LIST, "more": {}}',
        '{"proposals": LIST',
        "[1] LIST",
        "ITEM\nITEM\nITEM\nITEM\nITEM",
        FENCED,
        "A set {a}.\nFirst, ITEM\nthen ITEM, ITEM;\n4. ITEM\n- ITEM\n{b}",
        '[{"proposal": ITEM}, ITEM, ITEM, [ITEM], {"x": {"y": ITEM}}]',
        '<think>I fill "proposals": [ ... ] with {five}.</think>{"proposals": LIST}',
        "<think>[DRAFT, DRAFT]</think>\n" + FENCED,
        "I had DRAFT and DRAFT. Now: LIST",
        "I had [DRAFT, DRAFT]. Now: LIST",
        "DRAFT\nDRAFT\nITEM\nITEM\nITEM\nITEM\nITEM",
    ],
)
def test_a_list_is_found_in_surrounding_text(around: str) -> None:
    around = around.replace("DRAFT", VALID_REPLIES[9])
    for item in items(5):
        around = around.replace("ITEM", json.dumps(item), 1)
    drafts = parse(around.replace("LIST", json.dumps(items(5), indent=1)))
    assert digests(drafts) == SINGLE
    for draft in drafts:
        assert (
            draft.parents == ("1.1",)
            and not draft.problems
            and draft.hypothesis is not None
        )
        assert draft.hypothesis.model_dump() == {
            "purpose": "ablate",
            "text": "The fusion does nothing.",
            "expect": "same",
        }


def test_missing_and_cut_proposals_are_problems_and_further_ones_ignored() -> None:
    for length in (0, 1, 4, 9):
        drafts = parse(json.dumps({"proposals": items(length)}))
        assert digests(drafts) == SINGLE[:length] + [""] * (5 - length)
        if length < 5:
            assert f"the reply has {length} of 5 proposals" in str(drafts[-1].problems)
    assert digests(parse(VALID_REPLIES[0])) == [SINGLE[0], *[""] * 4], "it has no list"
    text = json.dumps({"proposals": items(5)})
    parts = [digests(parse(text[:length])) for length in range(0, len(text), 97)]
    assert {5 - part.count("") for part in parts} == {0, 1, 2, 3, 4}
    assert all(part[:3] == SINGLE[:3] for part in parts if part.count("") == 2)


@pytest.mark.parametrize(
    "text", ["{" * 9000 + "]" * 9000, '"{\\"' * 9000, "<think>" * 9000]
)
def test_a_reply_of_brackets_is_read_in_linear_time(text: str) -> None:
    begin = time.monotonic()
    assert not any(digests(parse(text))) and time.monotonic() - begin < 2


@given(st.text('{}[]"\\\n,: a', max_size=40), st.text('{}[]" a\n', max_size=40))
def test_no_text_around_a_proposal_raises(prefix: str, suffix: str) -> None:
    """Text on other lines hides no proposal, unless it is quoted, escaped or a list of its own."""
    text = f"{prefix}\n{A}\n{suffix}"
    drafts = [parse_one(text), *parse(text), *parse(prefix + suffix)]
    assert all(draft.state or draft.problems for draft in drafts)
    if not re.search(r'[\\"\[\]]', prefix + suffix):
        assert digests(drafts[:1]) == SINGLE[:1]


@pytest.mark.parametrize("name", HOSTILE)
def test_an_invalid_proposal_spoils_no_other(name: str) -> None:
    drafts = [parse_one(HOSTILE[name]), *parse(HOSTILE[name])]
    assert not any(digests(drafts)) and {draft.origin for draft in drafts} == {"llm"}
    for draft in drafts:
        assert draft.problems and all(
            problem.what and problem.fix for problem in draft.problems
        )
        assert sum(len(str(problem)) for problem in draft.problems) < 20_000
    valid, other = map(json.dumps, items(2))
    if HOSTILE[name].startswith("{") and name != "cut":
        drafts = parse(f'{{"proposals": [{valid}, {HOSTILE[name]}, {other}]}}', 3)
        assert digests(drafts) == [SINGLE[0], "", SINGLE[1]]
        assert drafts[1].problems and drafts[1].parents == ("1.0",)


@pytest.mark.parametrize(
    ("changes", "purpose", "text", "expect", "parents"),
    [
        (
            {"purpose": "win", "expect": "much higher", "parent": "9.9"},
            "",
            None,
            "higher",
            "1.0",
        ),
        ({"purpose": ["ablate"], "expect": 3, "parent": {}}, "", None, "higher", "1.0"),
        ({"hypothesis": "x" * 10**4}, "ablate", "x" * MAX_HYPOTHESIS, "same", "1.1"),
        ({"hypothesis": ["why"]}, "ablate", "", "same", "1.1"),
        ({"hypothesis": " a\n\tb\u202e\u0007 "}, "ablate", "a b", "same", "1.1"),
        ({"hypothesis": 'a "b}" \\ ]{ c'}, "ablate", 'a "b}" \\ ]{ c', "same", "1.1"),
        ({"parent": "base", "expect": "lower"}, "ablate", None, "lower", ""),
    ],
)
def test_fields_beside_the_policy_never_make_a_proposal_invalid(
    changes: dict[str, JsonValue],
    purpose: str,
    text: str | None,
    expect: str,
    parents: str,
) -> None:
    (draft,) = parse(json.dumps(items(1, **changes)), 1)
    assert digests([draft]) == SINGLE[:1] and draft.hypothesis is not None
    assert (draft.hypothesis.purpose, draft.hypothesis.expect) == (purpose, expect)
    assert draft.hypothesis.text == (
        "The fusion does nothing." if text is None else text
    )
    assert draft.parents == ((parents,) if parents else ())


def test_the_schema_of_a_list_accepts_such_lists_of_its_length() -> None:
    checked = jsonschema.Draft202012Validator(reply_schema(PLAIN, 5))
    valid = items(8)
    for item in valid:
        item["scoring"]["signals"] = item["scoring"]["signals"][:6]
    for length in range(8):
        assert checked.is_valid({"proposals": valid[:length]}) == (length == 5)
    for change in ({"purpose": "win"}, {"hypothesis": "x" * 201}, {"expect": "more"}):
        assert not checked.is_valid({"proposals": [*valid[:4], valid[4] | change]})


def test_purposes_are_asked_for_in_turn_from_a_proposal_s_number_on() -> None:
    purposes = list_purposes(0, 9, "open")
    assert list_purposes(3, 6, "open") == purposes[3:] != purposes[:6]
