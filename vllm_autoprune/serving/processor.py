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
from vllm.multimodal.processing.processor import PromptUpdateDetails

from vllm_autoprune.serving.config import ServedState, served_state
from vllm_autoprune.serving.instruction import instruction_of_prompt
from vllm_autoprune.serving.metrics import count
from vllm_autoprune.serving.plan import FIELD, ItemPlan, image_key, pruned_identity
from vllm_autoprune.serving.request import REQUEST_KEY, read_request
from vllm_autoprune.serving.words import LAST_WORDS, Words

if TYPE_CHECKING:
    from transformers import BatchFeature
    from vllm.inputs import MultiModalHashes, MultiModalInput
    from vllm.model_executor.models.llava import BaseLlavaProcessingInfo
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
    """Plans of a request's images and the cache identities of all its items."""

    items: tuple[ItemPlan, ...]
    hashes: Mapping[str, list[str]]


def pruned_factories(stock: _ProcessorFactories) -> _ProcessorFactories:
    """vLLM's ``_ProcessorFactories`` of a model, building the pruned form of its processor."""

    def build(info: BaseProcessingInfo, dummy_inputs: BaseDummyInputsBuilder) -> _Stock:
        processor = stock.processor(info, dummy_inputs)
        if served_state(info.ctx.model_config) is None:
            return processor
        kind = type(processor)
        pruned = type(f"Autoprune{kind.__name__}", (PrunedProcessor, kind), {})
        return pruned(info, dummy_inputs)

    return replace(stock, processor=build)


class PrunedProcessor(_Stock):
    """Mixin before a stock multi-modal processor.

    A plan is made once, in :meth:`apply`, and then goes through vLLM's own steps as one entry
    of the processor arguments, which each override takes out before stock code sees them.
    """

    info: BaseLlavaProcessingInfo

    @cached_property
    def _served(self) -> ServedState:
        served = served_state(self.info.ctx.model_config)
        assert served is not None
        return served

    @cached_property
    def _words(self) -> Words:
        return Words(self.info, self._served.tower)

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
        plain = replace(inputs, hf_processor_mm_kwargs=kwargs)
        plan = self._profiled(plain) if profile else self._planned(plain, asked)
        return super().apply(
            replace(inputs, hf_processor_mm_kwargs={**kwargs, _PLAN: plan}), timing_ctx
        )

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
            budget = policy.at(self._unpruned(inputs.mm_data_items, i)).budget
            items.append(ItemPlan(budget, (0, 0), said, longest, profile=True))
        return RequestPlan(tuple(items), hashes)

    def _planned(self, inputs: ProcessorInputs, asked: object) -> RequestPlan:
        """Plans of a request's images, and identities that say what was decided."""
        hashes = super()._get_mm_hashes(inputs)
        images = hashes.get("image", [])
        if not images or not _prunable(inputs.mm_data_items):
            return RequestPlan((), hashes)
        request = read_request(asked)
        policy = self._served.policy(request.budget, request.keep)
        needs = policy.needs if request.keep != "random" else frozenset()
        reads = policy.reads_instruction and request.keep != "random"
        given = request.instructions
        texts = self._instructions(inputs, given, len(images)) if reads else [""] * len(images)
        told = {text: self._words.read(text, needs) for text in set(texts)}
        unpruned = [self._unpruned(inputs.mm_data_items, i) for i in range(len(images))]
        kept = [policy.tokens_kept(tokens) for tokens in unpruned]
        items = tuple(
            ItemPlan(k, image_key(identity), *told[text], request.keep)
            for identity, text, k in zip(images, texts, kept, strict=True)
        )
        identities = [
            # Where everything is kept the image is what it is in stock vLLM, caches included.
            identity
            if k >= tokens
            else pruned_identity(
                identity, self._served.identity, k, request.keep, told[text] if reads else None
            )
            for identity, text, k, tokens in zip(images, texts, kept, unpruned, strict=True)
        ]
        count(request.keep, zip(unpruned, kept, strict=True))
        return RequestPlan(items, {**hashes, "image": identities})

    def _unpruned(self, mm_items: MultiModalDataItems, index: int) -> int:
        """N of an image, a pure function of its size."""
        items = mm_items["image"]
        if items.get(index) is None:  # named by its uuid alone, to be found in a cache
            most: int = self.info.get_max_image_tokens()
            return most
        size = items.get_image_size(index)
        tokens: int = self.info.get_num_image_tokens(
            image_width=size.width, image_height=size.height
        )
        return tokens

    def _instructions(
        self, inputs: ProcessorInputs, given: Sequence[str] | None, images: int
    ) -> list[str]:
        if given is not None and len(given) == images:
            return list(given)
        # No messages (a raw prompt), or messages of a form in which the images were not found.
        text = instruction_of_prompt(
            inputs.prompt,
            self.info.get_hf_config().image_token_index,
            self.info.get_tokenizer().decode,
            self._suffix,
        )
        return [text] * images


def _taken_out(kwargs: Mapping[str, object]) -> tuple[RequestPlan, dict[str, object]]:
    plan = kwargs[_PLAN]
    assert isinstance(plan, RequestPlan)
    return plan, {key: value for key, value in kwargs.items() if key != _PLAN}


def _prunable(mm_items: MultiModalDataItems) -> bool:
    """False for embeddings made elsewhere: they come without the signals that states read."""
    return "image" in mm_items and not isinstance(mm_items["image"], ImageEmbeddingItems)


def _shortened(update: ResolvedPromptUpdate, item: ItemPlan) -> ResolvedPromptUpdate:
    """A resolved prompt update whose placeholder holds K of its N tokens."""
    full = update.content.full
    if item.profile or item.budget >= len(full):
        return update
    return replace(update, content=PromptUpdateDetails.from_seq(full[: item.budget]))
