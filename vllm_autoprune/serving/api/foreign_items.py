"""Checks of the plans and tensors of items that another process has rendered.

vLLM's ``/inference/v1/generate`` takes processed inputs from its client, who may send anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor
from vllm.multimodal.inputs import MultiModalKwargsItem

from vllm_autoprune.serving.api.budgets import check_unpruned
from vllm_autoprune.serving.api.positions import (
    ItemFields,
    ItemSize,
    PositionCounter,
    PromptItem,
)
from vllm_autoprune.serving.compat import depends_on
from vllm_autoprune.serving.identities import identify_encoded, make_feature_key
from vllm_autoprune.serving.inputs import (
    BY_TILE,
    CELLS_FIELD,
    PIXELS,
    check_inputs,
)
from vllm_autoprune.serving.plan import FIELD, NO_KEY, ItemPlan, Key, plan_error
from vllm_autoprune.serving.plan_rules import PlanRules

if TYPE_CHECKING:
    from vllm.config import MultiModalConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalFieldElem


@depends_on("vllm.multimodal.hasher:MultiModalHasher", "hash_kwargs")
@depends_on("vllm.multimodal.inputs:MultiModalKwargsItem", "get_data")
def check_features(
    rules: PlanRules,
    features: Sequence[MultiModalFeatureSpec],
    salt: str,
    multimodal: MultiModalConfig,
) -> None:
    """Raise for plans that are not allowed, and recompute the feature key of the others.

    Otherwise a client could send an image under the key of another image, and its features would be
    served to everybody who sends that other image.
    """
    from vllm.multimodal.hasher import MultiModalHasher

    total = 0
    for feature in features:
        data = MultiModalKwargsItem() if feature.data is None else feature.data
        field = data.get(FIELD)
        if field is None:
            total += _count_unplanned(rules, feature, multimodal.enable_mm_embeds)
            continue
        plan = ItemPlan.decode(field.data)
        rules.check(plan, feature.mm_position.get_num_embeds())
        total += 0 if plan.part == "recall" else plan.budget
        fields = {name: part for name, part in data.get_data().items() if name != FIELD}
        _check_kind(FIELD, field)
        if fields.keys() != _SHARED_MEMORY:  # vLLM has checked their signature
            for name in fields:
                _check_kind(name, data[name])
            if CELLS_FIELD in fields and rules.served.capabilities.whole_only:
                raise plan_error("are not dropped of this model's images", CELLS_FIELD)
            check_inputs(
                plan, feature.modality, fields, rules.served.capabilities.frame
            )
        content = MultiModalHasher.hash_kwargs(multimodal.mm_hasher_algorithm, **fields)
        seed, key = make_feature_key(identify_encoded(content, plan), salt)
        # A random keep is drawn from the picture, which is not available here.
        seed = plan.key[0] if plan.keep == "random" else seed
        field.data = replace(plan, key=(seed, key)).encode()
    limit = rules.served.rules.total
    if limit is not None and total > limit:
        raise plan_error(f"is of {total} tokens of a request, which may keep {limit}")


_SHARED_MEMORY = {"address", "monotonic_id", "signature"}
"""Fields of an item whose tensors this server holds in shared memory."""


def _check_kind(name: str, element: MultiModalFieldElem) -> None:
    """Raise unless a field of an item is batched as by this server's own processor.

    Fields are batched by rows of pixels or by item. Fields with the numbers of rows stay on the
    CPU, where workers and M-RoPE read them.
    """
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFlatField,
        MultiModalSharedField,
    )

    kind = element.field
    by_item = isinstance(kind, MultiModalBatchedField)
    by_row = isinstance(kind, MultiModalFlatField) and kind.dim == 0
    if name in BY_TILE:
        sound = by_row and kind.keep_on_cpu
    elif name.startswith(PIXELS):
        sound = isinstance(element.data, Tensor) and (by_row or by_item)
    else:
        is_shared = isinstance(kind, MultiModalSharedField) and name not in (
            FIELD,
            CELLS_FIELD,
        )
        sound = kind.keep_on_cpu and (by_item or is_shared)
    if not sound:
        raise plan_error(
            f"comes with {name!r}, which is not batched as a processor does"
        )


def _count_unplanned(
    rules: PlanRules, feature: MultiModalFeatureSpec, takes_embeddings: bool
) -> int:
    """Tokens to count for an item without a plan: all of embeddings, none of other inputs.

    Raises :class:`RequestError` for an image that was processed without the plugin.
    """
    served = rules.served
    data = feature.data or {}
    if feature.modality == "video":
        # A request that may choose a state may choose one that leaves videos whole.
        is_pruned = (
            served.capabilities.prunes_videos and served.state.frames is not None
        )
        if is_pruned and not served.rules.allows("budget"):
            raise plan_error("is missing: the video was processed without the plugin")
    if feature.modality != "image":
        return 0
    is_embeddings = "image_embeds" in data and data["image_embeds"].data is not None
    may_keep_all = takes_embeddings and rules.served.rules.allows("budget")
    if not is_embeddings or "pixel_values" in data or not may_keep_all:
        # An image that is sent by its name alone would keep all of its tokens, too.
        raise plan_error("is missing: the image was processed without the plugin")
    tokens = feature.mm_position.get_num_embeds()
    check_unpruned(rules.served.rules, [tokens], None)
    return tokens


def count_surplus(
    measure: Callable[[ItemFields, int], ItemSize],
    features: Sequence[MultiModalFeatureSpec],
) -> int:
    """Number of positions that a prompt rendered elsewhere takes beyond its tokens.

    ``measure`` gives the size of an item by its tensors; the plans say which items are packed.
    Raises :class:`RequestError` for a part of an image whose first part is missing before it.
    """
    counter = PositionCounter()
    latest = dict[Key, int]()
    features = sorted(features, key=lambda feature: feature.mm_position.offset)
    for i, feature in enumerate(features):
        data = feature.data or {}
        placeholders = feature.mm_position
        rows = placeholders.get_num_embeds()
        plan = ItemPlan(rows, NO_KEY, tokens=rows)
        if FIELD in data:
            plan = ItemPlan.decode(data[FIELD].data)
        tokens = rows - len(plan.text) if plan.keeps_all else plan.tokens
        span = measure(data, tokens).span
        if span is None or plan.positions == "packed":
            continue
        image = i
        if plan.part in ("whole", "core"):
            latest[plan.key] = i
        elif plan.key in latest:
            image = latest[plan.key]
        else:
            raise plan_error(f"is a {plan.part} of an image that is not before it")
        span += placeholders.length - rows + len(plan.text)
        counter.add(PromptItem(placeholders.offset, placeholders.length, span, image))
    return counter.surplus
