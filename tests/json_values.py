"""Strategies of JSON texts."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hypothesis import strategies as st


def json_values(names: str, texts: Sequence[str] = ("",)) -> st.SearchStrategy[str]:
    """JSON of objects with fields of these names, of other values and of lists."""
    plain = st.none() | st.booleans() | st.integers() | st.floats()
    return st.recursive(
        plain | st.text(st.characters(), max_size=3) | st.sampled_from(texts),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(names.split()), inner, max_size=6)
        ),
    ).map(json.dumps)
