from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_autoprune.serving.shared.identities import (
    make_cache_identity,
    make_feature_key,
    make_recall_identity,
)
from vllm_autoprune.serving.shared.plan import CHOOSERS, NO_KEY, Chooser, Ids

SAME: tuple[str, str, int, Chooser, tuple[Ids, Ids] | None] = (
    "img",
    "digest",
    8,
    "state",
    ((1, 2), ()),
)


@given(st.text(max_size=20), st.text(max_size=20))
def test_a_feature_key_is_two_int64(content: str, salt: str) -> None:
    key = make_feature_key(content, salt)
    assert torch.tensor(key).tolist() == list(key)
    assert key == make_feature_key(content, salt)
    assert key[0] != make_feature_key(content + "x", salt)[0]
    assert key != NO_KEY


def test_salt_changes_the_key_but_not_the_random_seed() -> None:
    keys = [make_feature_key("content", salt) for salt in ("", "a", "b", "ab")]
    assert len(set(keys)) == 4
    assert len({draw for draw, _ in keys}) == 1
    assert make_feature_key("ab", "c") != make_feature_key("a", "bc")


@given(st.text(max_size=20), st.sampled_from(CHOOSERS))
def test_an_identity_is_one_digest_that_connectors_read_as_a_number(
    image: str, keep: Chooser
) -> None:
    """vLLM's LMCache adapter does ``int(identifier, 16) & 0xFFFF`` in the engine core."""
    identity = make_cache_identity(image, "digest", 8, keep, ((1,), ()))
    assert re.fullmatch("[0-9a-f]{64}", identity)


def test_last_16_bits_of_identities_differ() -> None:
    """Older LMCache versions keep only these bits."""
    images = [make_cache_identity(str(i), "digest", 8, "state", None) for i in range(64)]
    assert len({int(identity, 16) & 0xFFFF for identity in images}) > 60


def test_equal_plans_have_equal_identities() -> None:
    assert make_cache_identity(*SAME) == make_cache_identity(*SAME)
    assert make_cache_identity(*SAME) != "img"


@pytest.mark.parametrize(
    "other",
    [
        ("other", "digest", 8, "state", ((1, 2), ())),
        ("img", "other", 8, "state", ((1, 2), ())),
        ("img", "digest", 9, "state", ((1, 2), ())),
        ("img", "digest", 8, "reference", ((1, 2), ())),
        ("img", "digest", 8, "random", ((1, 2), ())),
        ("img", "digest", 8, "state", ((1, 3), ())),
        ("img", "digest", 8, "state", ((2, 1), ())),
        ("img", "digest", 8, "state", ((12,), ())),
        ("img", "digest", 8, "state", ((), ())),
        ("img", "digest", 8, "state", ((), (1, 2))),
        ("img", "digest", 8, "state", ((1,), (2,))),
        ("img", "digest", 8, "state", ((1, 2), (3,))),
        ("img", "digest", 8, "state", None),
    ],
)
def test_each_part_of_a_decision_is_part_of_the_identity(
    other: tuple[str, str, int, Chooser, tuple[Ids, Ids] | None],
) -> None:
    assert make_cache_identity(*other) != make_cache_identity(*SAME)


def test_empty_instruction_differs_from_unread_instruction() -> None:
    empty = make_cache_identity("i", "d", 8, "state", ((), ()))
    assert empty != make_cache_identity("i", "d", 8, "state", None)


def test_every_earlier_choice_is_part_of_the_identity_of_a_recall() -> None:
    image = make_cache_identity(*SAME)
    first = make_recall_identity(image, 4, ((1,), ()))
    others = [
        make_recall_identity(make_cache_identity("other", *SAME[1:]), 4, ((1,), ())),
        make_recall_identity(image, 5, ((1,), ())),
        make_recall_identity(image, 4, ((2,), ())),
        make_recall_identity(image, 4, ((), ())),
        make_recall_identity(first, 4, ((1,), ())),
    ]
    assert len({image, first, *others}) == 7
    assert first == make_recall_identity(image, 4, ((1,), ()))
