"""Features are kept by content, for one cache salt, until vLLM drops what it has of images."""

from __future__ import annotations

import pytest

from tests.serving.runners import Runner

pytestmark = pytest.mark.engine


def test_a_tenant_s_images_are_not_found_by_another(runner: Runner) -> None:
    """Else the time to the first token tells who has sent an image before (CVE-2025-46570)."""
    runs = runner.run("kept_features")["tenants"]
    assert runs == [["a", 1], ["a", 0], ["b", 1], ["", 1], ["a", 0]]


def test_resets_of_vllm_s_caches_and_new_weights_drop_features(runner: Runner) -> None:
    left = runner.run("kept_features")["resets"]
    assert left == {"reset_mm_cache": 0, "reset_encoder_cache": 0, "reload_weights": 0}


def test_an_image_sent_under_the_names_of_later_ones_is_not_their_answer(runner: Runner) -> None:
    """Both of vLLM's caches off: it then counts images, and a client may send such names."""
    before, *after = runner.run("kept_features")["planted"]
    for answer in after:
        assert answer["text"] == before["text"]
        assert answer["logprob"] == pytest.approx(before["logprob"], abs=2e-2)


def test_two_images_under_one_name_are_answered_as_without_a_name(runner: Runner) -> None:
    unnamed, named = runner.run("kept_features")["renamed"]
    assert unnamed[1]["text"] != unnamed[2]["text"], "the images should lead to other answers"
    assert [answer["text"] for answer in named] == [answer["text"] for answer in unnamed]
    for answer, expected in zip(named, unnamed, strict=True):
        assert answer["logprob"] == pytest.approx(expected["logprob"], abs=2e-2)
