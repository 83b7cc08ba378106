"""The processor: K placeholders, cache identity, and the plan that travels to the worker.

Knows nothing about tensors of the model: all it decides follows from image size, state, request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import ImageEmbeddingItems

from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.serving.accounts import accounts_of
from vllm_autoprune.serving.choice import Choice, called_by, choose_for
from vllm_autoprune.serving.instruction import instruction_of_prompt
from vllm_autoprune.serving.metrics import count, count_refused
from vllm_autoprune.serving.placeholders import Extent, Placeholders, shortened
from vllm_autoprune.serving.plan import FIELD, ItemPlan, image_key, pruned_identity
from vllm_autoprune.serving.request import NOT_SERVED, REQUEST_KEY, UNCOUNTED, read_request
from vllm_autoprune.serving.served import ServedState, served_state
from vllm_autoprune.serving.words import LAST_WORDS, Words

if TYPE_CHECKING:
    from transformers import BatchFeature
    from vllm.inputs import MultiModalHashes, MultiModalInput
    from vllm.multimodal.inputs import MultiModalKwargsItems
    from vllm.multimodal.parse import MultiModalDataItems
    from vllm.multimodal.processing import (
        BaseDummyInputsBuilder,
        BaseProcessingInfo,
        ProcessorInputs,
        TimingContext,
    )
    from vllm.multimodal.processing import BaseMultiModalProcessor as _Stock
    from vllm.multimodal.processing.processor import (
        MultiModalPromptUpdates,
        ResolvedPromptUpdate,
    )
    from vllm.multimodal.registry import _ProcessorFactories

else:
    _Stock = object

_PLAN = "_autoprune_plan"
_PROFILE = "_autoprune_profile"
_PROFILING = object()
"""Compared by identity, so that no request can say it."""


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """Plans of a request's images and the cache identities of all its items.

    ``choices`` are what the plans were made from, under the name that ``policy`` is counted by.
    """

    items: tuple[ItemPlan, ...]
    hashes: Mapping[str, list[str]]
    choices: tuple[Choice, ...] = ()
    policy: str = ""


def pruned_factories(stock: _ProcessorFactories, placeholders: Placeholders) -> _ProcessorFactories:
    """vLLM's ``_ProcessorFactories`` of a model, building the pruned form of its processor."""

    def build(info: BaseProcessingInfo, dummy_inputs: BaseDummyInputsBuilder) -> _Stock:
        processor = stock.processor(info, dummy_inputs)
        if served_state(info.ctx.model_config) is None:
            return processor
        kind = type(processor)
        pruned = type(
            f"Autoprune{kind.__name__}", (PrunedProcessor, kind), {"_placeholders": placeholders}
        )
        return pruned(info, dummy_inputs)

    return replace(stock, processor=build)


class PrunedProcessor(_Stock):
    """Mixin before a stock multi-modal processor.

    A plan is made once, in :meth:`apply`, and then goes through vLLM's own steps as one entry
    of the processor arguments, which each override takes out before stock code sees them.
    """

    info: BaseProcessingInfo
    _placeholders: Placeholders

    @cached_property
    def _served(self) -> ServedState:
        served = served_state(self.info.ctx.model_config)
        assert served is not None
        return served

    @cached_property
    def _kv_bytes(self) -> int:
        accounts = accounts_of(self.info.ctx.model_config)
        return 0 if accounts is None else accounts.kv_bytes

    @cached_property
    def _words(self) -> Words:
        return Words(self.info, self._served.tower, self._placeholders.token(self.info))

    @cached_property
    def _suffix(self) -> str:
        """What the chat template puts after the last user turn; empty where there is none."""
        mark = "\u2402"
        try:
            shown = self.info.get_tokenizer().apply_chat_template(
                [{"role": "user", "content": mark}], add_generation_prompt=True, tokenize=False
            )
        except (ValueError, TypeError, AttributeError):
            return ""
        return str(shown).rpartition(mark)[2]

    # ---- vLLM's steps, in the order in which it calls them ----

    def get_dummy_inputs(self, *args: object, **kwargs: object) -> ProcessorInputs:
        """Profiling inputs, marked so that they keep their unpruned size."""
        inputs = super().get_dummy_inputs(*args, **kwargs)
        return replace(inputs, hf_processor_mm_kwargs={_PROFILE: _PROFILING})

    def apply(self, inputs: ProcessorInputs, timing_ctx: TimingContext) -> MultiModalInput:
        """As stock, with a plan; raises BudgetError or RequestError, which vLLM answers by 400."""
        kwargs = dict(inputs.hf_processor_mm_kwargs)
        asked = kwargs.pop(REQUEST_KEY, None)
        profile = kwargs.pop(_PROFILE, None) is _PROFILING
        counted = kwargs.pop(UNCOUNTED, None) is not NOT_SERVED
        plain = replace(inputs, hf_processor_mm_kwargs=kwargs)
        try:
            plan = self._profiled(plain) if profile else self._planned(plain, asked)
        except AutopruneError:
            count_refused()
            raise
        planned = replace(inputs, hf_processor_mm_kwargs={**kwargs, _PLAN: plan})
        processed = super().apply(planned, timing_ctx)
        if plan.choices and counted:
            count(plan.policy, plan.choices, self._kv_bytes)
        return processed

    def _get_mm_hashes(self, inputs: ProcessorInputs) -> MultiModalHashes:
        plan = inputs.hf_processor_mm_kwargs[_PLAN]
        return {modality: list(hashes) for modality, hashes in plan.hashes.items()}

    def _get_cache_missing_processor_kwargs(
        self, inputs: ProcessorInputs, mm_is_cached: Mapping[str, list[bool]]
    ) -> Mapping[str, object]:
        kwargs = dict(super()._get_cache_missing_processor_kwargs(inputs, mm_is_cached))
        plan: RequestPlan = kwargs[_PLAN]
        cached = mm_is_cached.get("image", [])
        missing = tuple(p for p, hit in zip(plan.items, cached, strict=True) if not hit)
        return {**kwargs, _PLAN: replace(plan, items=missing)}

    def _apply_hf_processor_main(
        self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        plan, plain = _taken_out(hf_kwargs)
        data = super()._apply_hf_processor_main(mm_items, plain)
        if plan.items and _prunable(mm_items):
            data[FIELD] = [item.encode() for item in plan.items]
        return data

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        _, plain = _taken_out(hf_processor_mm_kwargs)
        fields = dict(super()._get_mm_fields_config(hf_inputs, plain))
        if FIELD in hf_inputs:
            fields[FIELD] = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
        return fields

    def _get_mm_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> MultiModalPromptUpdates:
        plan, plain = _taken_out(hf_processor_mm_kwargs)
        updates = dict(super()._get_mm_prompt_updates(mm_items, plain, out_mm_kwargs))
        if "image" in updates and _prunable(mm_items):
            updates["image"] = [
                [_shortened(update, item) for update in of_item]
                for of_item, item in zip(updates["image"], plan.items, strict=True)
            ]
        return updates

    # ---- planning ----

    def _profiled(self, inputs: ProcessorInputs) -> RequestPlan:
        """Plans of dummy images: the server's own budget, the longest text that may be read."""
        hashes = super()._get_mm_hashes(inputs)
        policy = self._served.policy()
        said, _ = self._words.read("profile", policy.needs)
        longest = (0,) * LAST_WORDS if "language" in policy.needs else ()
        items = []
        for i in range(len(hashes.get("image", []))):
            whole = self._unpruned(inputs, i)
            budget = policy.at(whole.tokens, whole.tiles).budget
            size = whole.tokens
            items.append(ItemPlan(budget, (0, 0), said, longest, profile=True, tokens=size))
        return RequestPlan(tuple(items), hashes)

    def _planned(self, inputs: ProcessorInputs, asked: object) -> RequestPlan:
        """Plans of a request's images, and identities that say what was decided."""
        hashes = super()._get_mm_hashes(inputs)
        images = hashes.get("image", [])
        request = read_request(asked)
        if not images or not _prunable(inputs.mm_data_items):
            return RequestPlan((), hashes)
        extents = [self._unpruned(inputs, i) for i in range(len(images))]
        choices = choose_for(self._served, request, extents)
        texts = self._instructions(inputs, request.instructions, choices)
        told = [self._words.read(text, c.needs) for text, c in zip(texts, choices, strict=True)]
        items = tuple(
            ItemPlan(c.kept, image_key(image), *ids, c.keep, state=c.state, tokens=extent.tokens)
            for image, ids, c, extent in zip(images, told, choices, extents, strict=True)
        )
        identities = [
            # Where everything is kept the image is what it is in stock vLLM, caches included.
            image
            if c.whole
            else pruned_identity(
                image, c.identity, c.kept, c.keep, ids if c.reads_instruction else None
            )
            for image, ids, c in zip(images, told, choices, strict=True)
        ]
        called = called_by(self._served, request)
        return RequestPlan(items, {**hashes, "image": identities}, choices, called)

    def _unpruned(self, inputs: ProcessorInputs, index: int) -> Extent:
        """N and the tiles of an image, a pure function of its size and of the request."""
        items = inputs.mm_data_items["image"]
        if items.get(index) is None:  # named by its uuid alone, to be found in a cache
            return self._placeholders.most(self.info)
        size = items.get_image_size(index)
        return self._placeholders.extent(self.info, size, inputs.hf_processor_mm_kwargs)

    def _instructions(
        self, inputs: ProcessorInputs, given: Sequence[str] | None, choices: Sequence[Choice]
    ) -> list[str]:
        if not any(choice.reads_instruction for choice in choices):
            return [""] * len(choices)
        if given is not None and len(given) == len(choices):
            return list(given)
        # No messages (a raw prompt), or messages of a form in which the images were not found.
        text = instruction_of_prompt(
            inputs.prompt,
            self._placeholders.token(self.info),
            self.info.get_tokenizer().decode,
            self._suffix,
        )
        return [text] * len(choices)


def _taken_out(kwargs: Mapping[str, object]) -> tuple[RequestPlan, dict[str, object]]:
    plan = kwargs[_PLAN]
    assert isinstance(plan, RequestPlan)
    return plan, {key: value for key, value in kwargs.items() if key != _PLAN}


def _prunable(mm_items: MultiModalDataItems) -> bool:
    """False for embeddings made elsewhere: they come without the signals that states read."""
    return "image" in mm_items and not isinstance(mm_items["image"], ImageEmbeddingItems)


def _shortened(update: ResolvedPromptUpdate, item: ItemPlan) -> ResolvedPromptUpdate:
    """A resolved prompt update whose text holds K of its N placeholders."""
    if item.profile:
        return update
    return replace(update, content=shortened(update.content, item.budget))
