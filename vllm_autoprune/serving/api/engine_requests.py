"""Requests that the engine is handed: plans are checked, images counted and sent once.

A prompt that is only rendered (``/tokenize``, ``/v1/messages/count_tokens``), or refused after
rendering (too long for the model, too large for the encoder cache), is not handed over and so is
neither counted nor taken for one whose images the engine has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

from cachetools import Cache
from prometheus_client import Counter
from torch import Tensor
from vllm.multimodal.cache import LruKeyReplicatedSenderCache
from vllm.multimodal.cache.base import BaseMultiModalProcessorCache
from vllm.multimodal.inputs import MultiModalKwargsItem

from vllm_autoprune.serving.api.positions import ItemFields, ItemSize, limit_positions
from vllm_autoprune.serving.api.refusal import refusing_requests
from vllm_autoprune.serving.api.request import OFFLINE_FIX, refuse_misplaced
from vllm_autoprune.serving.api.resolve import check_unpruned
from vllm_autoprune.serving.compat import depends_on, patch
from vllm_autoprune.serving.identities import make_feature_key
from vllm_autoprune.serving.inputs import CELLS_FIELD, PIXELS, check_inputs
from vllm_autoprune.serving.plan import (
    FIELD,
    Chooser,
    ItemPlan,
    Key,
    plan_error,
)
from vllm_autoprune.serving.plan_rules import PlanRules
from vllm_autoprune.serving.served_state import served_state

if TYPE_CHECKING:
    from vllm.config import MultiModalConfig
    from vllm.multimodal.cache.base import (
        MultiModalProcessorCacheInItem,
        MultiModalProcessorCacheItemMetadata,
        MultiModalProcessorCacheOutItem,
    )
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalFieldElem
    from vllm.multimodal.processing.processor import ResolvedPromptUpdate
    from vllm.utils.cache import CacheInfo
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor

# Counters of the API server; those of workers are in ``worker.metrics``. Names do not begin with
# "vllm:", because vLLM drops every collector that does when it sets up its own
# (``unregister_vllm_metrics``).

_REQUESTS = Counter(
    "autoprune_requests",
    "Requests with images, or with videos that are pruned, that the engine was handed, by the "
    "state that they ran: a name, 'request' for a state of their own, 'off' for none.",
    ["state"],
)
_IMAGES = Counter(
    "autoprune_images",
    "Images of those requests, by what chose their tokens.",
    ["chooser"],
)
_TOKENS = Counter(
    "autoprune_visual_tokens",
    "Their visual tokens: as the model has them, encoded, and kept.",
    ["stage"],
)
_VIDEO_TOKENS = Counter(
    "autoprune_video_tokens",
    "Tokens of their videos of which some are chosen: as the model has them, and kept.",
    ["stage"],
)
_CORE_TOKENS = Counter(
    "autoprune_core_tokens",
    "Kept visual tokens served as the core of their image, which questions about it share.",
)
_RECALLED_TOKENS = Counter(
    "autoprune_recalled_tokens",
    "Kept visual tokens that later turns of a conversation recalled, beside those of its images.",
)


@cache
def make_kv_bytes_counter() -> Counter:
    """Counter of bytes, published only where it is known how many a token takes."""
    return Counter(
        "autoprune_kv_bytes_saved",
        "Bytes of KV cache that visual tokens would have taken and did not, where nothing is "
        "shared.",
    )


def count_request(
    state: str,
    chooser: Chooser,
    sizes: Sequence[int],
    encoded: Sequence[int],
    plans: Sequence[ItemPlan],
    kv_bytes: int | None,
    clips: Sequence[ItemPlan],
) -> None:
    """Count one request: label of its state, N and M of its images, plans of its items and clips.

    ``kv_bytes`` are those of one token in the KV cache, None where they are not known.
    """
    tokens_after = sum(plan.budget for plan in plans)
    video_tokens = (
        sum(plan.tokens for plan in clips),
        sum(plan.budget for plan in clips),
    )
    _REQUESTS.labels(state).inc()
    _IMAGES.labels(chooser).inc(len(sizes))
    _TOKENS.labels("before").inc(sum(sizes))
    _TOKENS.labels("encoded").inc(sum(encoded))
    _TOKENS.labels("after").inc(tokens_after)
    _CORE_TOKENS.inc(sum(plan.budget for plan in plans if plan.part == "core"))
    _RECALLED_TOKENS.inc(sum(plan.budget for plan in plans if plan.part == "recall"))
    for stage, tokens in zip(("before", "after"), video_tokens, strict=True):
        _VIDEO_TOKENS.labels(stage).inc(tokens)
    if kv_bytes is not None:
        saved = sum(sizes) - tokens_after + video_tokens[0] - video_tokens[1]
        make_kv_bytes_counter().inc(saved * kv_bytes)


# vLLM's record of the images that the engine has, changed by requests that reach the engine only.
#
# ``LruKeyReplicatedSenderCache`` of the API server mirrors the engine's cache of processed images,
# whose tensors are not sent again. So both have to see the same requests in the same order. vLLM
# changes it while a request is rendered; after a request that is then refused, only rendered or
# overtaken, the two differ, and a later request fails with status 500
# (``MultiModalCacheMissError``). Here rendering reads the cache, and the hand-over to the engine
# changes it.

_Tensors = Mapping[str, "MultiModalFieldElem"]


@dataclass(slots=True, weakref_slot=True, eq=False)
class RenderedItem:
    """Processed tensors of one image, without its plan, and the prompt text of all its tokens."""

    tensors: MultiModalKwargsItem
    updates: Sequence[ResolvedPromptUpdate]


Waiting = WeakValueDictionary[str, RenderedItem]
"""Images of requests that are rendered and may still be handed over, by key."""


def _key(feature: MultiModalFeatureSpec) -> str:
    return feature.mm_hash or feature.identifier


def _set_plan_apart(feature: MultiModalFeatureSpec) -> tuple[_Tensors, _Tensors]:
    """The tensors of an item, and its plan."""
    data = feature.data or {}
    tensors = {name: element for name, element in data.items() if name != FIELD}
    return tensors, {FIELD: data[FIELD]} if FIELD in data else {}


@depends_on(
    "vllm.multimodal.cache:LruKeyReplicatedSenderCache",
    "get_and_update_item",
    "touch_sender_cache_item",
)
class Rendering(BaseMultiModalProcessorCache):
    """The sender cache as one rendering sees it: vLLM's own, and ``waiting``; neither is changed.

    :meth:`hand_over` is called in the order in which the engine gets the requests, in one thread;
    renderings may run in others.
    """

    def __init__(self, sender: LruKeyReplicatedSenderCache, waiting: Waiting) -> None:
        self._sender = sender
        self._waiting = waiting
        self._updates: dict[str, Sequence[ResolvedPromptUpdate]] = {}
        self._items: dict[str, RenderedItem] = {}
        self.process_again: Callable[[], Mapping[str, RenderedItem]] | None = None
        """Processes the images of the request without a cache; until it is handed over."""

    def is_cached_item(self, mm_hash: str) -> bool:
        """Whether the engine has the image, or a request that waits brings it."""
        try:
            # Not the method of the LRU cache, which would make it the most recently used.
            cached = cast(
                "MultiModalProcessorCacheItemMetadata",
                Cache.__getitem__(self._sender._cache, mm_hash),
            )
        except KeyError:
            item = self._waiting.get(mm_hash)
            if item is None:
                return False
            self._items[mm_hash] = item
        else:
            self._updates[mm_hash] = cached.prompt_updates
        return True

    def get_and_update_item(
        self, mm_item: MultiModalProcessorCacheInItem, mm_hash: str
    ) -> MultiModalProcessorCacheOutItem:
        """Tensors of an image and its prompt text; no tensors where the engine has them."""
        if mm_item is not None:
            self._items[mm_hash] = self._waiting[mm_hash] = RenderedItem(*mm_item)
        elif mm_hash in self._updates:
            return None, self._updates[mm_hash]
        item = self._items[mm_hash]
        return item.tensors, item.updates

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Nothing: the hand-over makes images recently used."""

    def clear_cache(self) -> None:
        """As the cache."""
        self._sender.clear_cache()

    def make_stats(self, *, delta: bool = False) -> CacheInfo:
        """As the cache."""
        return self._sender.make_stats(delta=delta)

    def hand_over(
        self, features: Sequence[MultiModalFeatureSpec], again: bool = False
    ) -> None:
        """Give a request the tensors that the engine lacks, and no others.

        Does to the sender cache what the engine will do to its own. Of several items of one image
        the first brings the tensors (:func:`cache_without_plans`). ``again`` is another sample of
        the request, whose features are complete.
        """
        unsent = dict.fromkeys(map(_key, features))
        for key in unsent:
            self._sender.touch_sender_cache_item(key)
        if again:
            return
        for feature in features:
            key = _key(feature)
            added, plan = _set_plan_apart(feature)
            tensors: _Tensors = {}
            if key in unsent:
                del unsent[key]
                cached = self._sender.is_cached_item(key)
                if not cached and key not in self._items and added:
                    # An input that vLLM added after rendering, which its engine caches like all.
                    self._items[key] = RenderedItem(MultiModalKwargsItem(added), ())
                if (
                    not cached
                    and key not in self._items
                    and self.process_again is not None
                ):
                    # The engine had the image, and dropped it while this request waited.
                    self._items.update(self.process_again())
                item = None if cached else self._items.get(key)
                # Without an item it came by its name alone: vLLM answers that it is not known.
                if cached or item is not None:
                    self._sender.get_and_update_item(
                        item and (item.tensors, item.updates), key
                    )
                tensors = {} if item is None else item.tensors
            feature.data = (
                MultiModalKwargsItem({**tensors, **plan}) if tensors or plan else None
            )
        self.process_again = None


# Hand-over of a request to the engine, after its last check.


class RenderedHashes(dict[str, list[str]]):
    """Cache identities of a rendered request, with what its hand-over to the engine needs.

    vLLM passes this object on as it is. No client can send one, so its type also shows that the
    plans of the request were made by this server. ``keys`` are those of the processed tensors in
    vLLM's processor cache, by identity; ``surplus`` are the positions that the prompt takes beyond
    its tokens.
    """

    def __init__(
        self,
        hashes: Mapping[str, list[str]],
        count: Callable[[], None] | None = None,
        keys: Mapping[str, str] = MappingProxyType({}),
        rendering: Rendering | None = None,
        surplus: int = 0,
    ) -> None:
        super().__init__(hashes)
        self._count = count
        self._keys = keys
        self._rendering = rendering
        self.surplus = surplus
        self._features: Sequence[MultiModalFeatureSpec] = ()
        self._handed_over = False

    def await_hand_over(self, features: Sequence[MultiModalFeatureSpec]) -> None:
        """Expect the request's features, and keep them so that no other list gets their id."""
        self._features = features
        self._handed_over = False
        _waiting[id(features)] = self

    def hand_over(self, features: Sequence[MultiModalFeatureSpec]) -> None:
        """Complete the request's features, and count it once.

        Samples (n > 1) hand over the same features, beam search new ones for every token.
        """
        count = self._count
        self._count = None
        if count is not None:
            count()
        for feature in features:
            feature.mm_hash = self._keys.get(feature.mm_hash or "", feature.mm_hash)
        if self._rendering is not None:
            self._rendering.hand_over(features, again=self._handed_over)
        self._handed_over = True


_waiting: WeakValueDictionary[int, RenderedHashes] = WeakValueDictionary()
"""Requests from the first hook on, by their list of features, which samples of one request share.

A request that is refused or has ended takes its entry with it.
"""


@depends_on("vllm.v1.engine.input_processor:InputProcessor", "process_inputs")
@depends_on("vllm.v1.engine.output_processor:OutputProcessor", "add_request")
def watch_requests() -> None:
    """Install the hooks on every request that API servers, or `LLM`, hand to the engine."""
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor

    @patch(InputProcessor, "process_inputs")
    def process_inputs(
        stock: Callable[..., EngineCoreRequest],
        self: InputProcessor,
        request_id: str,
        prompt: object,
        *args: object,
        **named: object,
    ) -> EngineCoreRequest:
        """The last step that may refuse a request by 400."""
        request = stock(self, request_id, prompt, *args, **named)
        served = served_state(self.model_config)
        if served is None:
            return request
        params = args[0] if args else named.get("params")
        refuse_misplaced(
            {"extra_args": getattr(params, "extra_args", None)}, {}, OFFLINE_FIX
        )
        if not request.mm_features:
            return request
        hashes = prompt.get("mm_hashes") if isinstance(prompt, Mapping) else None
        if isinstance(hashes, RenderedHashes):
            limit_positions(request, hashes.surplus, self.model_config.max_model_len)
            hashes.await_hand_over(request.mm_features)
            return request
        with refusing_requests():
            if not served.rules.explicit:
                # Without the flag a plan sets nothing: it does not pass vLLM's own check of
                # ``mm_processor_kwargs``, which protects such a server.
                served = replace(served, rules=replace(served.rules, level="none"))
            rules = PlanRules(served, self.model_config.get_vocab_size())
            multimodal = self.model_config.get_multimodal_config()
            _check_features(
                rules, request.mm_features, request.cache_salt or "", multimodal
            )
            processor: Any = self.renderer.get_mm_processor()
            surplus = _sum_surplus(processor.measure, request.mm_features)
        limit_positions(request, surplus, self.model_config.max_model_len)
        return request

    @patch(OutputProcessor, "add_request")
    def add_request(
        stock: Callable[..., None],
        self: OutputProcessor,
        request: EngineCoreRequest,
        *args: object,
        **named: object,
    ) -> None:
        """A request that gets here goes to the engine next."""
        stock(self, request, *args, **named)
        hashes = _waiting.get(id(request.mm_features))
        if hashes is not None:
            hashes.hand_over(request.mm_features or ())


@depends_on("vllm.multimodal.hasher:MultiModalHasher", "hash_kwargs")
@depends_on("vllm.multimodal.inputs:MultiModalKwargsItem", "get_data")
def _check_features(
    rules: PlanRules,
    features: Sequence[MultiModalFeatureSpec],
    salt: str,
    multimodal: MultiModalConfig,
) -> None:
    """Raise for plans that are not allowed, and recompute the feature key of the others.

    Under the key of another image, this image's features would be cached for everybody who sends
    the other.
    """
    from vllm.multimodal.hasher import MultiModalHasher

    kept = 0
    for feature in features:
        data = MultiModalKwargsItem() if feature.data is None else feature.data
        field = data.get(FIELD)
        if field is None:
            kept += _count_unplanned(rules, feature, multimodal.enable_mm_embeds)
            continue
        plan = ItemPlan.decode(field.data)
        rules.check(plan, feature.mm_position.get_num_embeds())
        kept += 0 if plan.part == "recall" else plan.budget
        fields = {name: part for name, part in data.get_data().items() if name != FIELD}
        _check_kind(FIELD, field)
        if fields.keys() != _SHARED_MEMORY:  # whose signature vLLM has checked
            for name in fields:
                _check_kind(name, data[name])
            if CELLS_FIELD in fields and rules.served.capabilities.whole_only:
                what = "are not dropped of this model's images"
                raise plan_error(what, CELLS_FIELD)
            check_inputs(
                plan, feature.modality, fields, rules.served.capabilities.frame
            )
        seed, key = make_feature_key(
            MultiModalHasher.hash_kwargs(multimodal.mm_hasher_algorithm, **fields), salt
        )
        # A random keep is drawn from the picture, which is not here.
        seed = plan.key[0] if plan.keep == "random" else seed
        field.data = replace(plan, key=(seed, key)).encode()
    most = rules.served.rules.total
    if most is not None and kept > most:
        raise plan_error(f"is of {kept} tokens of a request, which may keep {most}")


_SHARED_MEMORY = {"address", "monotonic_id", "signature"}
"""What an item has in the place of tensors that this server holds in shared memory."""


def _check_kind(name: str, element: MultiModalFieldElem) -> None:
    """Raise unless vLLM batches a field of an item as a processor of this server has it do.

    By rows of pixels, or one for each item; what says their number stays on the CPU, where workers
    and M-RoPE read it.
    """
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFlatField,
        MultiModalSharedField,
    )

    kind = element.field
    by_item = isinstance(kind, MultiModalBatchedField)
    if name.startswith(PIXELS):
        by_row = isinstance(kind, MultiModalFlatField) and kind.dim == 0
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
    """Tokens that count of an item without a plan: all of embeddings, none of other inputs.

    Raises :class:`RequestError` for an image that was processed without the plugin.
    """
    served = rules.served
    data = feature.data or {}
    if feature.modality == "video":
        # A request that may choose may also choose a state that leaves videos whole.
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
        # Whoever sends the name of an image alone asks for all of its tokens, too.
        raise plan_error("is missing: the image was processed without the plugin")
    tokens = feature.mm_position.get_num_embeds()
    check_unpruned(rules.served.rules, [tokens], None)
    return tokens


@depends_on("vllm.renderers.base:BaseRenderer", "get_mm_processor")
def _sum_surplus(
    measure: Callable[[ItemFields, int], ItemSize],
    features: Sequence[MultiModalFeatureSpec],
) -> int:
    """Positions that a prompt rendered elsewhere takes beyond its number of tokens.

    As :func:`.positions.pack_items`, by the tensors of its items, of which ``measure`` gives the
    size; which of them are packed their plans say.
    """
    surplus = 0
    seen = set[Key]()
    for feature in sorted(features, key=lambda feature: feature.mm_position.offset):
        data = feature.data or {}
        length = feature.mm_position.length
        rows = feature.mm_position.get_num_embeds()
        field = data.get(FIELD)
        plan = None if field is None else ItemPlan.decode(field.data)
        span = measure(
            data, rows if plan is None or plan.keeps_all else plan.tokens
        ).span
        if span is None or (plan is not None and plan.positions == "packed"):
            continue
        if plan is not None and plan.part in ("delta", "recall"):
            if plan.key not in seen:
                raise plan_error(f"is a {plan.part} of an image that is not before it")
            surplus -= length  # stands at positions of its image
            continue
        if plan is not None:
            seen.add(plan.key)
        text = length - rows + (0 if plan is None else len(plan.text))
        surplus += span + text - length
    return surplus


# The engine's cache of processed images holds an image once, whatever is asked about it.
#
# An item of a request is the tensors of an image and a plan. Tensors are cached by the content of
# the image; the plan, a few hundred bytes, travels with every request. So neither another question
# nor another K nor the parts and recalls of an image send or keep its tensors twice.


@depends_on(
    "vllm.multimodal.cache.base:BaseMultiModalReceiverCache", "get_and_update_features"
)
def cache_without_plans() -> None:
    """Let vLLM's receiver caches hold tensors alone, and set the plans aside.

    Of several items of one image the first has the tensors, or the cache has them. Otherwise stock
    raises ``MultiModalCacheMissError``, which fails the request alone.
    """
    from vllm.multimodal.cache.base import BaseMultiModalReceiverCache

    @patch(BaseMultiModalReceiverCache, "get_and_update_features")
    def get_and_update_features(
        stock: Callable[..., object],
        self: BaseMultiModalReceiverCache,
        mm_features: list[MultiModalFeatureSpec],
    ) -> list[MultiModalFeatureSpec]:
        plans: list[_Tensors] = []
        with_tensors: dict[str, MultiModalFeatureSpec] = {}
        received = []
        for feature in mm_features:
            tensors, plan = _set_plan_apart(feature)
            plans.append(plan)
            feature.data = MultiModalKwargsItem(tensors) if tensors else None
            if tensors or _key(feature) not in with_tensors:
                received.append(feature)
                with_tensors.setdefault(_key(feature), feature)
        stock(self, received)
        for feature, plan in zip(mm_features, plans, strict=True):
            tensors = feature.data or with_tensors[_key(feature)].data or {}
            feature.data = MultiModalKwargsItem({**tensors, **plan})
        return mm_features
