"""Inputs of the model: which value wins, which are assumed, which have to be given."""

from __future__ import annotations

import pytest

from vllm_autoprune.advice.observation import Observation, complete
from vllm_autoprune.errors import ConfigError

GIVEN = Observation(questions=2, tokens=640, tower=1.0, prefill=0.01)


def test_given_values_win_over_measured_ones() -> None:
    measured = Observation(tokens=900, tower=2.0, selection=0.5, notes=("measured",))
    known = GIVEN.filled_from(measured)
    assert (known.tokens, known.tower, known.selection) == (640, 1.0, 0.5)
    assert known.notes == ("measured",)
    assert Observation(block=0).filled_from(Observation(block=32)).block == 0


def test_assumed_values_are_noted() -> None:
    traffic, timings, notes = complete(GIVEN)
    assert (traffic.budget, traffic.core) == (71, 53)
    assert timings.selection == 0.0
    text = "\n".join(notes)
    assert "K = 71" in text and "K_c = 53" in text
    assert "decode image, processor, selection, request, decode" in text


def test_all_missing_values_are_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        complete(Observation(tower=1.0))
    places = [problem.where for problem in caught.value.problems]
    assert places == ["--questions", "--tokens", "--prefill-ms-per-token"]
