"""Invariant 3: two questions on one image never share pruned KV; the same question does."""

from __future__ import annotations

import pytest

from tests.serving.conftest import V2_EXHAUSTIVE
from tests.serving.runners import Runner

pytestmark = [
    pytest.mark.engine,
    pytest.mark.both,
    pytest.mark.scenarios("interleaved", "batches"),
]


def test_interleaved_questions_answer_as_they_do_alone(runner: Runner) -> None:
    report = runner.run("interleaved")
    for first, again, alone in zip(report["first"], report["again"], report["alone"], strict=True):
        assert first["text"] == again["text"] == alone["text"]
        assert first["logprob"] == pytest.approx(alone["logprob"], abs=2e-2)
        assert again["logprob"] == pytest.approx(alone["logprob"], abs=2e-2)


def test_same_question_shares_the_prefix_and_another_does_not(runner: Runner) -> None:
    report = runner.run("interleaved")
    # The first block contains the start of the image, so only the same question shares it.
    assert all(answer["cached"] == 0 for answer in report["first"])
    assert all(answer["cached"] >= 32 for answer in report["again"])


def test_order_of_two_images_matters(runner: Runner) -> None:
    ab, ba, ab_alone, ba_alone = runner.run("interleaved")["orders"]
    assert ab["prompt_tokens"] == ba["prompt_tokens"]
    assert (ab["cached"], ba["cached"]) == (0, 0)
    for answer, alone in ((ab, ab_alone), (ba, ba_alone)):
        assert answer["text"] == alone["text"]
        assert answer["logprob"] == pytest.approx(alone["logprob"], abs=2e-2)
    assert ab["logprob"] != pytest.approx(ba["logprob"], abs=1e-4)


def test_one_vision_pass_per_image(runner: Runner) -> None:
    report = runner.run("interleaved")
    assert report["vision_runs"] == report["images"]
    assert report["vision_runs_again"] == report["images"]


@pytest.mark.scenarios("instruction_left_out")
@pytest.mark.parametrize("runner", V2_EXHAUSTIVE, indirect=True)
def test_negative_control_without_the_instruction_in_the_identity(runner: Runner) -> None:
    """Shows that the tests above detect a missing instruction."""
    report = runner.run("instruction_left_out")
    changed = [
        (right["text"], wrong["text"], answer)
        for right, wrong, answer in zip(
            report["right"], report["wrong"], report["answers"], strict=True
        )
        if right["text"] == answer != wrong["text"]
    ]
    assert changed, "leaving the instruction out should have turned a right answer wrong"


@pytest.mark.scenarios("blind_state")
@pytest.mark.parametrize("runner", V2_EXHAUSTIVE, indirect=True)
def test_a_state_that_does_not_read_the_instruction_shares_across_questions(runner: Runner) -> None:
    report = runner.run("blind_state")
    first, *later = report["answers"]
    assert first["cached"] == 0
    assert all(answer["cached"] >= 32 for answer in later)
    assert report["vision_runs"] == 1


def test_a_follow_up_turn_reuses_the_image(runner: Runner) -> None:
    report = runner.run("batches")
    assert report["turn_two"]["prompt_tokens"] > report["turn_one"]["prompt_tokens"]
    assert report["turn_two"]["cached"] >= 32


@pytest.mark.scenarios("embeddings_for_relevance")
@pytest.mark.parametrize("runner", V2_EXHAUSTIVE, indirect=True)
def test_relevance_from_input_embeddings_without_a_text_tower(runner: Runner) -> None:
    report = runner.run("embeddings_for_relevance")
    assert (report["kind"], report["sign"]) == ("InputEmbeddings", 1)
    assert all(len(kept) == 32 for kept in report["kept"])
    assert len({str(kept) for kept in report["kept"]}) > 2, "questions should keep other tokens"
