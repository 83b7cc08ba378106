"""All attacks; importing this package registers them."""

from tests.hostile.attacks import cost, counting, images, places, plans, texts, uuids

__all__ = ["cost", "counting", "images", "places", "plans", "texts", "uuids"]
