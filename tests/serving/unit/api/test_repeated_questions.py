"""Another question on an image: its tensors are neither processed nor sent a second time."""

from __future__ import annotations

import pytest

from tests.serving.unit.api.tiny_processor import LARGE, OTHER, Sender, processing

pytestmark = pytest.mark.compat


def test_another_question_or_k_sends_a_plan_alone(sender: Sender) -> None:
    with processing(sender) as runs:
        first = sender.send([LARGE], instructions=["what is it"])
        again = sender.send([LARGE], instructions=["where is it"])
        fewer = sender.send([LARGE], budget=4)
    assert sum(runs) == 1
    assert (first.sent, again.sent, fewer.sent) == ([True], [False], [False])
    assert len({*first.identities, *again.identities, *fewer.identities}) == 3
    assert (again.lengths, fewer.lengths) == ([8], [4])


def test_a_new_image_beside_a_known_one_is_processed_alone(sender: Sender) -> None:
    sender.send([LARGE], instructions=["what is it"])
    with processing(sender) as runs:
        both = sender.send([LARGE, OTHER], instructions=["how many", "how many"])
    assert (sum(runs), both.sent) == (1, [False, True])


def test_another_tenant_gets_tensors_of_its_own(sender: Sender) -> None:
    with processing(sender) as runs:
        sender.send([LARGE], instructions=["what"])
        sender.send([LARGE], instructions=["where"], salt="tenant")
    assert sum(runs) == 2


def test_an_operator_without_a_cache_of_images_has_none_here(without_cache: Sender) -> None:
    with processing(without_cache) as runs:
        for question in ("what", "where"):
            assert without_cache.send([LARGE], instructions=[question]).sent == [True]
    assert sum(runs) == 2


def test_a_request_that_is_not_handed_over_changes_no_cache(sender: Sender) -> None:
    before = sender.send([OTHER])
    sender.send([LARGE], hands_over=False)
    assert len(sender.cache._cache) == 1
    assert sender.send([LARGE]).sent == [True]
    assert (sender.send([OTHER]).sent, before.sent) == ([False], [True])
