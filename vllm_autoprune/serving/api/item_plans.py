"""Plans and cache identities of a request's items: an image, its parts, what later turns recall."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vllm_autoprune.serving.api.image_split import Slot
from vllm_autoprune.serving.api.pruning_choice import ImageChoice
from vllm_autoprune.serving.api.recall import RecallItem
from vllm_autoprune.serving.shared.identities import (
    make_cache_identity,
    make_core_identity,
    make_feature_key,
    make_pixels_key,
    make_recall_identity,
)
from vllm_autoprune.serving.shared.plan import NO_KEY, Choice, Ids, ItemPlan


class ItemPlans:
    """Items of a request in the order of its prompt, with their plans and cache identities.

    ``digests`` are those of the contents of its images, ``salt`` its ``cache_salt``; ``seeds`` has
    what a random keep of an image is drawn from.
    """

    def __init__(
        self,
        digests: Sequence[str],
        salt: str,
        choices: Sequence[ImageChoice],
        ids: Sequence[tuple[Ids, Ids]],
        seeds: Mapping[int, str],
    ) -> None:
        self.plans: list[ItemPlan] = []
        self.identities: list[str] = []
        self.sources: list[int] = []
        self.keys: list[str] = []
        """Of each item's processed tensors; items of one image have the same."""
        self._digests = digests
        self._salt = salt
        self._choices = choices
        self._ids = ids
        self._seeds = seeds
        self._last: dict[int, tuple[ItemPlan, str]] = {}
        """Plan and identity of the item of each image that was chosen last."""

    def add(self, slot: Slot) -> None:
        """Add an image, or one part of it."""
        choice, ids = self._choices[slot.image], self._ids[slot.image]
        # Features are kept of images whose tokens are chosen.
        chosen = not choice.keeps_all and choice.resized is None
        parts = self._digests[slot.image], self._salt, self._seeds.get(slot.image, "")
        key = make_feature_key(*parts) if chosen else NO_KEY
        whole = ItemPlan(choice.kept, key, *ids, choice.keep, state=choice.state)
        # A resized image has no more tokens than those that are kept.
        tokens = choice.tokens if choice.resized is None else choice.kept
        plan = replace(whole, tokens=tokens, core=slot.core)
        if slot.part == "core":
            plan = plan.of_part("core", Choice(slot.core))
        elif slot.part == "delta":
            plan = plan.of_part("delta", Choice(choice.kept - slot.core, *ids))
        # Where everything is kept the image is what it is in stock vLLM, caches included.
        identity = self._digests[slot.image]
        if not choice.keeps_all:
            identity = _identify_slot(slot, self._content(slot.image), choice, ids)
        self._append(slot.image, plan, identity)

    def add_recall(self, item: RecallItem, ids: tuple[Ids, Ids]) -> None:
        """Add tokens that a later turn recalls of an image, by the ids that they are chosen by."""
        last, before = self._last[item.image]
        choice = Choice(last.image_budget if not last.earlier else last.budget, *last.read)
        plan = last.of_part("recall", Choice(item.budget, *ids))
        identity = make_recall_identity(before, item.budget, ids)
        self._append(item.image, replace(plan, earlier=(*last.earlier, choice)), identity)

    def _append(self, image: int, plan: ItemPlan, identity: str) -> None:
        self.plans.append(plan)
        self.identities.append(identity)
        self.sources.append(image)
        choice = self._choices[image]
        key = make_pixels_key(self._content(image), choice.resized)
        self.keys.append(identity if choice.keeps_all else key)
        self._last[image] = plan, identity

    def _content(self, image: int) -> str:
        return repr((self._digests[image], self._salt))

    def served(self) -> tuple[ImageChoice, ...]:
        """The choices with the cores and recalls of their images."""
        cores, recalled = dict[int, int](), dict[int, int]()
        for image, plan in zip(self.sources, self.plans, strict=True):
            if plan.part == "recall":
                recalled[image] = recalled.get(image, 0) + plan.budget
            else:
                cores[image] = plan.core
        return tuple(
            replace(choice, core=cores[i], recalled=recalled.get(i, 0))
            for i, choice in enumerate(self._choices)
        )


def _identify_slot(slot: Slot, content: str, choice: ImageChoice, ids: tuple[Ids, Ids]) -> str:
    if slot.part == "core":
        return make_core_identity(content, choice.core_identity, slot.core)
    read = ids if choice.reads_instruction else None
    return make_cache_identity(content, choice.identity, choice.kept, choice.keep, read, slot.core)
