from __future__ import annotations

import pytest

from vllm_autoprune.tpdsl.json_text import child_pointer, escape_unprintable, format_value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (-0.5, "-0.5"),
        ("naïve 🦙", '"naïve 🦙"'),
        ("a\n\x1b\u202e\ud800", r'"a\n\u001b\u202e\ud800"'),
        (["a", {"b": [1, 2]}], '["a", {"b": [1, 2]}]'),
        ([], "[]"),
        ("x" * 100, f'"{"x" * 57}..."'),
        ([1] * 100, "[" + "1, " * 18 + "1,..."),
    ],
)
def test_a_value_is_shown_as_json_on_one_short_line(value: object, text: str) -> None:
    assert format_value(value) == text and text.isprintable()


def test_showing_a_large_value_is_fast() -> None:
    deep: object = "x" * 1_000_000
    for _ in range(30):
        deep = {"k" * 1000: deep, "other": [deep] * 2}
        assert len(format_value(deep)) <= 60


@pytest.mark.parametrize(
    ("step", "below"),
    [("a", "/p/a"), (3, "/p/3"), ("", "/p/"), ("a/b~c", "/p/a~1b~0c"), ("\n", r"/p/\n")],
)
def test_a_pointer_goes_one_step_down(step: str | int, below: str) -> None:
    assert child_pointer("/p", step) == below


def test_a_long_text_is_cut() -> None:
    assert (
        escape_unprintable("x" * 61) == "x" * 57 + "..."
        and escape_unprintable("x" * 60) == "x" * 60
    )
