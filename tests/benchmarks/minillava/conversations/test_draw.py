"""Held-out conversations: four different questions about one image and about different objects."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from benchmarks.minillava.conversations.draw import TURNS, draw_conversations
from benchmarks.minillava.split import MAX_SCENES


def test_turns_are_about_one_image_and_share_no_evidence() -> None:
    conversations = draw_conversations("test", 12)

    assert [one[0].image_id for one in conversations] == list(range(12))
    for turns in conversations:
        assert len(turns) == TURNS == len({turn.question for turn in turns})
        assert all(torch.equal(turn.image, turns[0].image) for turn in turns)
        assert all(turn.evidence for turn in turns)
        for one, other in combinations(turns, 2):
            assert set(one.evidence).isdisjoint(other.evidence)


def test_a_fourth_of_the_test_scenes_has_unseen_wordings() -> None:
    conversations = draw_conversations("test", 8)

    assert [turns[0].unseen_wording for turns in conversations] == [False] * 3 + [True] + [
        False
    ] * 3 + [True]
    assert not any(turns[0].unseen_style for turns in draw_conversations("validation", 4))


def test_fewer_conversations_are_the_first_of_more() -> None:
    few, many = draw_conversations("validation", 2), draw_conversations("validation", 4)

    assert [[turn.question for turn in turns] for turns in few] == [
        [turn.question for turn in turns] for turns in many[:2]
    ]


def test_every_conversation_needs_a_scene_of_its_own() -> None:
    with pytest.raises(ValueError, match="must lie in"):
        draw_conversations("test", MAX_SCENES + 1)
