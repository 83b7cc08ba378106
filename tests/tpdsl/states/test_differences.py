"""Differences between JSON documents, and setting values at JSON pointers."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from vllm_autoprune.tpdsl.transfer import Change, list_changes, set_at_pointer

SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab~/", max_size=3)
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab~/", max_size=2), inner),
    max_leaves=8,
)


@given(DOCUMENTS)
def test_a_document_does_not_differ_from_itself(document: JsonValue) -> None:
    assert list_changes(document, copy.deepcopy(document)) == ()


@given(DOCUMENTS, DOCUMENTS)
def test_documents_differ_exactly_where_they_are_not_equal(
    first: JsonValue, second: JsonValue
) -> None:
    assert bool(list_changes(first, second)) == (_typed(first) != _typed(second))


def _typed(value: JsonValue) -> object:
    """The value with its type, since true equals 1 in Python but not in JSON."""
    if isinstance(value, dict):
        return {key: _typed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_typed(inner) for inner in value]
    return type(value), value


def test_true_is_not_one_and_one_is_not_one_point_zero() -> None:
    assert list_changes({"a": 1}, {"a": True}) == (Change("/a", "changed", 1, True),)
    assert list_changes([1], [1.0]) == (Change("/0", "changed", 1, 1.0),)


def test_fields_come_and_go() -> None:
    assert list_changes({"a": 1, "b": {"c": 2}}, {"b": {"c": 3, "d/e": 4}}) == (
        Change("/a", "removed", 1, None),
        Change("/b/c", "changed", 2, 3),
        Change("/b/d~1e", "added", None, 4),
    )


def test_atoms_are_compared_with_themselves_wherever_they_stand() -> None:
    first: JsonValue = [{"atom": "x", "weight": 1}, {"atom": "y", "weight": 2}]
    second: JsonValue = [{"atom": "z"}, {"atom": "y", "weight": 5}]
    assert list_changes(first, second, "/signals") == (
        Change("/signals/0", "removed", {"atom": "x", "weight": 1}, None),
        Change("/signals/1/weight", "changed", 2, 5),
        Change("/signals/0", "added", None, {"atom": "z"}),
    )


def test_another_order_is_a_difference() -> None:
    assert list_changes([{"atom": "x"}, {"atom": "y"}], [{"atom": "y"}, {"atom": "x"}]) == (
        Change("", "reordered", ["x", "y"], ["y", "x"]),
    )


def test_put_writes_where_the_pointer_says() -> None:
    document: JsonValue = {"a": [{"b/c": 1}, 2], "d": 3}
    set_at_pointer(document, "/a/0/b~1c", 9)
    set_at_pointer(document, "/a/1", [])
    set_at_pointer(document, "/d", None)
    assert document == {"a": [{"b/c": 9}, []], "d": None}
    with pytest.raises(TypeError, match="leads into"):
        set_at_pointer(document, "/d/e", 1)
