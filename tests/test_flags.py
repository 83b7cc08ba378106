"""Flags of models: what a validator refuses is told as it says, whatever the value contains."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from vllm_autoprune.connection import Connection
from vllm_autoprune.errors import Problem
from vllm_autoprune.flags import flag_problems


def test_what_is_refused_and_its_fix_are_told_apart_by_fields() -> None:
    with pytest.raises(ValidationError) as caught:
        Connection.model_validate({"header": ["X-Key: secret"]})
    what = "'X-Key: secret' is refused"
    fix = "give NAME=VALUE in plain ASCII"
    assert flag_problems(caught.value, {}) == [Problem("--header", what, fix)]
