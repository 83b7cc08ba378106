"""Validation rules that a JSON Schema cannot express, and the checks across two fields.

The JSON Schema and the loader accept the same states except for these rules, each with the reason
why a schema cannot express it. Problems of a refused state carry the name of the rule as
:attr:`vllm_autoprune.errors.Problem.kind`, so that tests can compare the loader with the schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from pydantic import JsonValue, TypeAdapter, ValidationError

from vllm_autoprune.errors import Problem
from vllm_autoprune.tpdsl.atoms.budget import Budget, BudgetCall
from vllm_autoprune.tpdsl.atoms.constraints import Selector
from vllm_autoprune.tpdsl.atoms.selector_calls import SelectorCall
from vllm_autoprune.tpdsl.states.json_values import MAX_BYTES, MAX_DEPTH, MAX_VALUES


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: its name, what it requires, and why a JSON Schema cannot express it."""

    kind: str
    requires: str
    why: str


_TEXT = "a schema sees values, not their text"
_WHOLE = "a schema cannot limit a document as a whole"
_TWO = "a schema cannot compare two fields"

RULES = {
    rule.kind: rule
    for rule in (
        Rule("file", "the path names a regular file that can be read", _TEXT),
        Rule("size", f"at most {MAX_BYTES} bytes, as read and as written out again", _TEXT),
        Rule("encoding", "UTF-8 without a byte order mark", _TEXT),
        Rule("syntax", "one JSON value, by RFC 8259: no NaN, no Infinity, no comments", _TEXT),
        Rule("duplicate_key", "no key twice in one object", _TEXT),
        Rule("surrogate", "no half of a surrogate pair in a string or key", _TEXT),
        Rule("number", "every number fits a 64-bit float", _TEXT),
        Rule("depth", f"nested at most {MAX_DEPTH} deep", _WHOLE),
        Rule("values", f"at most {MAX_VALUES} values", _WHOLE),
        Rule("limit_below_budget", "budget.limit is at least the state's own K", _TWO),
        Rule("r_min_above_budget", "constraints.selector.r_min is at most the state's K", _TWO),
    )
}

T = TypeVar("T")

_BUDGET: TypeAdapter[BudgetCall] = TypeAdapter(Budget)
_SELECTOR: TypeAdapter[SelectorCall] = TypeAdapter(Selector)


def find_contradictions(data: Mapping[str, JsonValue]) -> Iterator[Problem]:
    """Check the rules about two fields of a JSON object that may be invalid elsewhere.

    Only the parts that a rule reads must be valid, so that contradictions are reported together
    with all other problems.
    """
    budget = _part(_BUDGET, data.get("budget"))
    if budget is None:
        return
    least, most = budget.range()
    if budget.limit is not None and most > budget.limit:
        what = f"limit {budget.limit} is below the state's own K = {most}"
        fix = f"write {most} or more, or null for no limit"
        yield Problem("/budget/limit", what, fix, "limit_below_budget")
    constraints = data.get("constraints")
    raw = constraints.get("selector") if isinstance(constraints, dict) else None
    selector = _part(_SELECTOR, raw)
    r_min = None if selector is None else selector.insists_on
    if r_min is not None and r_min > least:
        what = f"r_min = {r_min} reference tokens cannot be kept of K = {least}"
        fix = f"write {least} or less, or null, which means K - q_e"
        yield Problem("/constraints/selector/r_min", what, fix, "r_min_above_budget")


def _part(adapter: TypeAdapter[T], data: JsonValue) -> T | None:
    try:
        return adapter.validate_python(data)
    except ValidationError:
        return None
