from __future__ import annotations

import pytest

from vllm_autoprune.serving.api import named_images
from vllm_autoprune.serving.api.named_images import NamedImages


def test_a_uuid_means_the_content_last_sent_with_it() -> None:
    images = NamedImages()
    images.remember("cat", "", ("first", None))
    images.remember("cat", "", ("second", None))
    assert images.find("cat", "") == ("second", None)


def test_uuids_of_one_salt_are_unknown_under_another() -> None:
    images = NamedImages()
    images.remember("cat", "a", ("a cat", None))
    assert images.find("cat", "a") == ("a cat", None)
    unknown = [images.find("cat", "b"), images.find("cat", ""), images.find("ca", "ta")]
    assert all(size is None and content.startswith("unknown ") for content, size in unknown)
    assert len({content for content, _ in unknown}) == 3


def test_the_least_recently_used_uuids_are_evicted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_images, "MAX_NAMES", 2)
    images = NamedImages()
    for name in ("one", "two"):
        images.remember(name, "", (name, None))
    images.find("one", "")
    images.remember("three", "", ("three", None))
    assert images.find("one", "")[0] == "one"
    assert images.find("two", "")[0].startswith("unknown ")
    assert images.find("three", "")[0] == "three"
