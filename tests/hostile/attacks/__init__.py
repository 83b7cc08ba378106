"""All attacks; importing this package registers them."""

from tests.hostile.attacks import (
    cores,
    cost,
    counting,
    images,
    places,
    plans,
    recalls,
    texts,
    uuids,
)

__all__ = ["cores", "cost", "counting", "images", "places", "plans", "recalls", "texts", "uuids"]
