"""All attacks; importing this package registers them."""

from tests.hostile.attacks import images, plans, requests

__all__ = ["images", "plans", "requests"]
