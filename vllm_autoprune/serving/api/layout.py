"""Layout of a prompt: its images, their cores and deltas, recalls of later turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from vllm_autoprune.errors import Refusal, RequestError
from vllm_autoprune.serving.api.instruction import find_question_turns
from vllm_autoprune.serving.api.placeholders import Placeholders
from vllm_autoprune.serving.api.request import RecallTurn, split_shared_budget
from vllm_autoprune.serving.compat import depends_on, get_attachment
from vllm_autoprune.serving.plan import ENTRY, MAX_RECALLS, ItemPlan, Part
from vllm_autoprune.serving.served_state import KV_CACHE, ServedState
from vllm_autoprune.serving.state_codec import decode_state
from vllm_autoprune.tpdsl.atoms.source import MAX_BUDGET
from vllm_autoprune.tpdsl.cost import state_cost
from vllm_autoprune.tpdsl.state import PruningState

if TYPE_CHECKING:
    from vllm.multimodal.processing import BaseProcessingInfo, ProcessorInputs

    from vllm_autoprune.serving.api.budgets import RequestBudgets
    from vllm_autoprune.serving.api.media import Media


@dataclass(frozen=True, slots=True)
class Slot:
    """One item of the prompt: ``budget`` tokens of an image, all its kept tokens or a part of them.

    ``core`` is K_c of the image. For a whole image it is the K_c that its state asks for, or 0 if
    the image cannot be split; for a part it is the actual K_c. ``turn`` of a whole image is the
    same for the images of one user turn, which one question follows; ``turn`` of a recall is the
    number of its turn.
    """

    image: int
    budget: int
    part: Part = "whole"
    core: int = 0
    turn: int | None = None


# Split of a request's images into cores, which questions share, and deltas after them.
#
# An image becomes two items of the prompt. vLLM's prefix cache keys a block by the items that
# overlap it (``kv_cache_utils._gen_mm_extra_hash_keys``), so every block that ends within the cores
# is shared by all questions about the images::
#
#     one item    [text][      K tokens chosen by the question      ][question]
#     two items   [text][ K_c for every question ][ K - K_c by this one ][question]
#
# Cores of several images come first, at the images' positions; all deltas follow the last core.


def split_slots(
    ids: Sequence[int], image_token: int, slots: Sequence[Slot], block: int
) -> tuple[list[int], list[Slot]] | None:
    """Token ids and items with whole images split, or None if splitting would share nothing.

    ``ids`` has one image token per item. The last core of a turn ends at the edge of a KV block of
    ``block`` tokens, so its K_c may differ from the state's. An image that contains no such edge
    stays whole.
    """
    starts = [i for i, token in enumerate(ids) if token == image_token]
    if len(starts) != len(slots) or not any(slot.core for slot in slots):
        return None
    new_ids: list[int] = []
    new_slots: list[Slot] = []
    # Positions in the prompt that the model sees, and in ids.
    position = 0
    done = 0
    for _, turn in groupby(
        range(len(slots)), key=lambda i: (slots[i].part, slots[i].turn)
    ):
        deltas: list[Slot] = []
        members = list(turn)
        for i in members:
            position += starts[i] - done
            new_ids += ids[done : starts[i] + 1]
            done = starts[i] + 1
            slot = slots[i]
            core = slot.core if slot.part == "whole" else 0
            if i == members[-1] and core:
                core = align_core(position, slot.budget, core, block)
            if core:
                new_slots.append(Slot(slot.image, core, "core", core))
                deltas.append(Slot(slot.image, slot.budget - core, "delta", core))
            else:
                new_slots.append(
                    replace(slot, core=0) if slot.part == "whole" else slot
                )
            position += core or slot.budget
        new_ids += [image_token] * len(deltas)
        new_slots += deltas
        position += sum(delta.budget for delta in deltas)
    if not any(slot.core for slot in new_slots):
        return None
    return new_ids + list(ids[done:]), new_slots


def align_core(start: int, budget: int, core: int, block: int) -> int:
    """K_c with which a core that begins at ``start`` ends at a block edge; 0 without an edge.

    Of the edges inside the image of K tokens, it is the one nearest to the state's own K_c.
    """
    beyond = -(-(start + 1) // block) * block
    edges = range(beyond, start + budget, block)
    return min(
        (edge - start for edge in edges), key=lambda size: abs(size - core), default=0
    )


def count_recomputed(
    ids: Sequence[int],
    image_token: int,
    slots: Sequence[Slot],
    reduced: Sequence[int],
    newest: int,
) -> int:
    """Number of tokens between the first core that has lost its delta and image ``newest``.

    ``ids`` has one image token per item, and ``reduced`` are the images that this turn retires. The
    turn before had these tokens at other positions, so that their KV is computed again.
    """
    if not reduced:
        return 0
    items = iter(slots)
    position = 0
    begin: int | None = None
    for token in ids:
        if token != image_token:
            position += 1
            continue
        slot = next(items)
        if slot.image == newest:
            break
        position += slot.budget
        if begin is None and slot.image in reduced:
            begin = position
    return 0 if begin is None else position - begin


# Recall: a later user turn without an image gets more tokens of the images before it.
#
# The tokens are chosen by the turn's own text among those that are not kept yet. They stand before
# that text, so that the prefix of the conversation does not change::
#
#     [turn 1: K tokens of the image, question 1] ... [turn 2: K_r more tokens, question 2] ...
#
# The chat renderer marks each of these turns with an image token before the chat template is
# applied. The processor replaces every mark by the turn's items, one for each image.

_MAX_TURNS = 256
"""Number of turns of a conversation that may recall, from the first on: more take seconds to plan.
"""

MAX_ITEMS = 64
"""Maximum number of items that the turns of a request recall."""

_DEAREST = 2
"""Bound of the cost of all recalls by a state of the request's own, as a number of images that are
selected from with the most expensive state allowed (``--autoprune-request-cost``)."""


def limit_recalls(state: PruningState, bound: float) -> int:
    """Number of items that a request may recall by a state of its own.

    ``bound`` is the allowed cost of one selection of a request, in milliseconds.
    """
    return max(_DEAREST, min(MAX_ITEMS, int(_DEAREST * bound / state_cost(state))))


def choose_recalls(
    turns: Sequence[RecallTurn],
    recall: int,
    plans: Sequence[ItemPlan],
    contents: Sequence[str],
    maximum: int = MAX_BUDGET,
    limit: int = MAX_ITEMS,
) -> list[Slot]:
    """The items of every turn: ``recall`` tokens, split over the images before it.

    An image that is shown several times is recalled after its last occurrence. Nothing is recalled
    of an image that keeps ``maximum`` tokens, has none left, was recalled by ``MAX_RECALLS`` turns,
    or is resized. What a turn recalls does not depend on later turns. There are at most ``limit``
    items.
    """
    slots: list[Slot] = []
    room = [
        0 if plan.keep == "resized" else max(0, min(plan.tokens, maximum) - plan.budget)
        for plan in plans
    ]
    times = [0] * len(plans)
    for number, turn in enumerate(turns[:_MAX_TURNS]):
        latest = {contents[i]: i for i in range(min(turn.images, len(plans)))}
        images = [
            i for i in sorted(latest.values()) if room[i] and times[i] < MAX_RECALLS
        ]
        budgets = split_shared_budget(recall, [room[i] for i in images])
        of_turn = [
            Slot(i, budget, "recall", turn=number)
            for i, budget in zip(images, budgets, strict=True)
            if budget
        ]
        for slot in of_turn[: limit - len(slots)]:
            slots.append(slot)
            room[slot.image] -= slot.budget
            times[slot.image] += 1
    return slots


def expand_marks(
    ids: Sequence[int],
    token: int,
    images: Sequence[Slot],
    turns: Sequence[RecallTurn],
    recalls: Sequence[Slot],
) -> tuple[list[int], list[Slot]]:
    """Replace the marks of a prompt by items: its ids with one image token an item, and the items.

    A mark is an image token of ``ids``, for an image or for a turn that recalls. An image's becomes
    one item, and a turn's one for each image that it recalls tokens of. Raises RequestError unless
    there is one mark for every image and every turn.
    """
    items_by_mark: list[list[Slot]] = []
    start = 0
    for number, turn in enumerate(turns):
        items_by_mark += [[slot] for slot in images[start : turn.images]]
        items_by_mark.append([slot for slot in recalls if slot.turn == number])
        start = turn.images
    items_by_mark += [[slot] for slot in images[start:]]
    ends = [turn.images for turn in turns]
    count = ids.count(token)
    if count != len(items_by_mark) or ends != sorted(ends) or max(ends) > len(images):
        what = (
            f"{len(turns)} turns and {len(images)} images in a prompt of {count} marks"
        )
        fix = "keep every message in the chat template, or send recall 0"
        raise RequestError.of(f"{ENTRY}/recall_turns", what, fix)
    remaining = iter(items_by_mark)
    expanded: list[int] = []
    for token_id in ids:
        expanded += [token] * len(next(remaining)) if token_id == token else [token_id]
    return expanded, [slot for items in items_by_mark for slot in items]


# The prompt of a request, composed of these parts.

_LOOKBACK = 4096
"""Number of token ids before an image in which its question is searched for."""


@dataclass
class PromptLayout:
    """Lays out the prompts of one served model: recalls of later turns, then cores and deltas."""

    info: BaseProcessingInfo
    placeholders: Placeholders
    served: ServedState

    @cached_property
    def token(self) -> int:
        """Id of the image token."""
        return self.placeholders.token(self.info)

    def arrange(
        self,
        inputs: ProcessorInputs,
        images: Media,
        plans: Sequence[ItemPlan],
        reads: Sequence[bool],
    ) -> tuple[Sequence[int], list[Slot], int]:
        """Token ids and items of the prompt, with an image token for each item.

        ``reads`` says for each plan whether its policy reads the instruction. Also returns the
        number of tokens that are computed again because this turn retires images.
        """
        prompt, slots = self._add_recalls(inputs.prompt, images, plans)
        if set(inputs.mm_data_items) != {"image"}:
            return prompt, slots, 0
        if images.budgets.history is not None:
            return self._retire(prompt, slots, images.budgets, plans)
        cores = [
            self.served.policy_for_plan(plan).core if reads_it else 0
            for plan, reads_it in zip(plans, reads, strict=True)
        ]
        if not any(cores):
            return prompt, slots, 0
        return *self._split(prompt, slots, images, cores), 0

    def _add_recalls(
        self, prompt: Sequence[int], images: Media, plans: Sequence[ItemPlan]
    ) -> tuple[Sequence[int], list[Slot]]:
        """Token ids and items of the prompt, with an item for what each turn recalls.

        Raises RequestError if a request asks for recall and the model cannot do it.
        """
        request = images.budgets.request
        unsplittable = self.placeholders.unsplittable
        if request.enabled and request.recall and unsplittable:
            what = f"later turns cannot recall tokens: this model {unsplittable}"
            raise RequestError.of(
                f"{ENTRY}/recall", what, "leave it out", kind=Refusal.UNSUPPORTED
            )
        slots = [Slot(i, plan.budget) for i, plan in enumerate(plans)]
        turns = request.recall_turns
        if not turns:
            return prompt, slots
        rules = self.served.rules
        limit = MAX_ITEMS
        if encoded := next((plan.state for plan in plans if plan.state), b""):
            limit = limit_recalls(decode_state(encoded), rules.cost)
        recall = rules.recall
        maximum = MAX_BUDGET
        if request.recall is not None:
            # A recall that the request itself asks for is bounded by its range instead.
            recall = request.recall
            maximum = rules.maximum
        recalls = choose_recalls(turns, recall, plans, images.digests, maximum, limit)
        return expand_marks(prompt, self.token, slots, turns, recalls)

    @depends_on("vllm.config:CacheConfig", "block_size")
    def _split(
        self,
        prompt: Sequence[int],
        slots: list[Slot],
        images: Media,
        cores: Sequence[int],
    ) -> tuple[Sequence[int], list[Slot]]:
        """The prompt and its items, with images split into core and delta if that shares anything.

        ``cores`` are K_c of each image. Without a prefix cache nothing is shared. If the question
        stands before the image, a split gains nothing, because the question is part of the prefix.
        """
        config: Any = get_attachment(self.info.ctx.model_config, KV_CACHE)
        if not config or not config.enable_prefix_caching or not config.block_size:
            return prompt, slots
        starts = self._find_images(prompt, slots)
        if starts is None:
            return prompt, slots
        turns = images.budgets.request.turns
        if turns is not None and len(turns) != len(cores):
            turns = None  # the images were not found in the messages
        questions = find_question_turns(
            self._read_text_before(prompt, starts), images.texts, turns
        )
        slots_with_cores = []
        for slot in slots:
            turn = None if slot.part == "recall" else questions[slot.image]
            if turn is not None:
                slot = replace(slot, core=cores[slot.image], turn=turn)
            slots_with_cores.append(slot)
        divided = split_slots(prompt, self.token, slots_with_cores, config.block_size)
        return divided or (prompt, slots)

    def _retire(
        self,
        prompt: Sequence[int],
        slots: list[Slot],
        budgets: RequestBudgets,
        plans: Sequence[ItemPlan],
    ) -> tuple[Sequence[int], list[Slot], int]:
        """The prompt and its items in history mode: cores of retired images, the others split.

        A core has exactly K_c tokens, whatever the blocks: its tokens must not depend on where it
        stands. Neighbouring images have their cores first, so that they can be retired together.
        """
        history = budgets.history
        state = budgets.chosen_state
        starts = self._find_images(prompt, slots)
        is_split = plans[0].runs_policy and state.possible_core is not None
        if history is None or starts is None or not is_split:
            return prompt, slots, 0
        retired = history.count_retired(len(plans))
        groups: list[int] = []
        for i, text in enumerate(self._read_text_before(prompt, starts)):
            groups.append(i if text.strip() or i == 0 else groups[-1])
        divided = []
        for slot in slots:
            core = slot.budget
            if slot.part == "whole" and slot.image >= retired:
                core = history.count_core(state, slot.budget)
            if core < slot.budget:
                slot = replace(slot, core=core, turn=groups[slot.image])
            elif slot.part == "whole" and not plans[slot.image].keeps_all:
                slot = Slot(slot.image, core, "core", core)
            divided.append(slot)
        ids, items = split_slots(prompt, self.token, divided, 1) or (prompt, slots)
        newest = groups.index(groups[-1])
        plan = plans[-1]
        reduced = list[int]()
        # Otherwise an image has nothing but its core from the start.
        if plan.keeps_all or history.count_core(state, plan.budget) < plan.budget:
            new = range(history.count_retired(newest), retired)
            reduced = [i for i in new if not plans[i].keeps_all]
        return ids, items, count_recomputed(ids, self.token, items, reduced, newest)

    def _find_images(
        self, prompt: Sequence[int], slots: Sequence[Slot]
    ) -> list[int] | None:
        """Positions of the images, without recalls; None if images cannot be split here."""
        positions = [i for i, token in enumerate(prompt) if token == self.token]
        if self.placeholders.unsplittable or len(positions) != len(slots):
            return None
        return [
            position
            for position, slot in zip(positions, slots, strict=True)
            if slot.part != "recall"
        ]

    def _read_text_before(
        self, prompt: Sequence[int], positions: Sequence[int]
    ) -> list[str]:
        """Text between each of these images and the image before it, without image markup."""
        tokenizer = self.info.get_tokenizer()
        texts: list[str] = []
        start = 0
        for position in positions:
            ids = list(prompt[max(start, position - _LOOKBACK) : position])
            while ids and not tokenizer.decode(ids[-1:], skip_special_tokens=True):
                ids.pop()
            texts.append(tokenizer.decode(ids))
            start = position + 1
        return texts
