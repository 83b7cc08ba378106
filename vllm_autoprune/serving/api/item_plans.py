"""Plans and cache identities of a request's items: an image, its parts, what later turns recall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm_autoprune.serving.api.image_split import Slot
from vllm_autoprune.serving.api.pruning_choice import ImageChoice
from vllm_autoprune.serving.api.recall import RecallItem
from vllm_autoprune.serving.shared.identities import (
    make_cache_identity,
    make_core_identity,
    make_recall_identity,
)
from vllm_autoprune.serving.shared.plan import NO_KEY, Choice, Ids, ItemPlan


class ItemPlans:
    """Items of a request in the order of its prompt, with their plans and cache identities."""

    def __init__(
        self,
        stock: Sequence[str],
        contents: Sequence[str],
        choices: Sequence[ImageChoice],
        ids: Sequence[tuple[Ids, Ids]],
    ) -> None:
        self.plans: list[ItemPlan] = []
        self.identities: list[str] = []
        self.sources: list[int] = []
        self.contents: list[str] = []
        """What is processed for each item; items of one image have the same."""
        self._stock = stock
        self._contents = contents
        self._choices = choices
        self._ids = ids
        self._last: dict[int, tuple[ItemPlan, str]] = {}
        """Plan and identity of the item of each image that was chosen last."""

    def add(self, slot: Slot) -> None:
        """Add an image, or one part of it; the key is added when the image is processed."""
        choice, ids = self._choices[slot.image], self._ids[slot.image]
        whole = ItemPlan(choice.kept, NO_KEY, *ids, choice.keep, state=choice.state)
        # A resized image has no more tokens than those that are kept.
        tokens = choice.tokens if choice.resized is None else choice.kept
        plan = replace(whole, tokens=tokens, core=slot.core)
        if slot.part == "core":
            plan = plan.of_part("core", Choice(slot.core))
        elif slot.part == "delta":
            plan = plan.of_part("delta", Choice(choice.kept - slot.core, *ids))
        # Where everything is kept the image is what it is in stock vLLM, caches included.
        identity = self._stock[slot.image]
        if not choice.keeps_all:
            identity = _identify_slot(slot, self._contents[slot.image], choice, ids)
        self._append(slot.image, plan, identity)

    def add_recall(self, item: RecallItem, ids: tuple[Ids, Ids]) -> None:
        """Add tokens that a later turn recalls of an image."""
        last, before = self._last[item.image]
        choice = Choice(last.image_budget if not last.earlier else last.budget, *last.read)
        plan = last.of_part("recall", Choice(item.budget, *ids))
        read = ids if self._choices[item.image].reads_instruction else None
        identity = make_recall_identity(before, item.budget, read)
        self._append(item.image, replace(plan, earlier=(*last.earlier, choice)), identity)

    def _append(self, image: int, plan: ItemPlan, identity: str) -> None:
        self.plans.append(plan)
        self.identities.append(identity)
        self.sources.append(image)
        self.contents.append(repr((self._contents[image], self._choices[image].resized)))
        self._last[image] = plan, identity

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
