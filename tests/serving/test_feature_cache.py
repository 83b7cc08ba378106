"""Feature cache: keyed by content and cache salt, cleared with vLLM's caches."""

from __future__ import annotations

import pytest

from tests.serving.runners import Runner

pytestmark = pytest.mark.engine


def test_features_are_not_shared_between_cache_salts(runner: Runner) -> None:
    """Sharing would leak through the time to first token (CVE-2025-46570)."""
    runs = runner.run("feature_cache")["tenants"]
    assert runs == [["a", 1], ["a", 0], ["b", 1], ["", 1], ["a", 0]]


def test_cache_resets_and_new_weights_clear_features(runner: Runner) -> None:
    left = runner.run("feature_cache")["resets"]
    assert left == {"reset_mm_cache": 0, "reset_encoder_cache": 0, "reload_weights": 0}


@pytest.mark.exhaustive
@pytest.mark.scenarios("reloaded_weights")
def test_new_weights_from_disk_answer_as_a_new_engine(runner: Runner) -> None:
    report = runner.run("reloaded_weights")
    first, other = report["expected"]
    assert report["answers"] == [first, other, first]
    assert all(a["kept"] and a["kept"] != b["kept"] for a, b in zip(first, other, strict=True))


def test_planted_uuids_do_not_change_answers(runner: Runner) -> None:
    """Without its caches vLLM numbers images, and a client may send such uuids."""
    before, *after = runner.run("feature_cache")["planted"]
    for answer in after:
        assert answer["text"] == before["text"]
        assert answer["logprob"] == pytest.approx(before["logprob"], abs=2e-2)


def test_two_images_with_one_uuid_are_answered_as_without_uuid(runner: Runner) -> None:
    unnamed, named = runner.run("feature_cache")["renamed"]
    assert unnamed[1]["text"] != unnamed[2]["text"], "the images should lead to other answers"
    assert [answer["text"] for answer in named] == [answer["text"] for answer in unnamed]
    for answer, expected in zip(named, unnamed, strict=True):
        assert answer["logprob"] == pytest.approx(expected["logprob"], abs=2e-2)
