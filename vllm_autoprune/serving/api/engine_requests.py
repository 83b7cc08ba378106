"""Requests handed to the engine: checked a last time, counted once, completed with their tensors.

A prompt that is only rendered, or is refused after rendering, is not handed over and so not
counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from prometheus_client import Counter

from vllm_autoprune.serving.api.foreign_items import check_features, count_surplus
from vllm_autoprune.serving.api.image_cache import Rendering
from vllm_autoprune.serving.api.positions import limit_positions
from vllm_autoprune.serving.api.refusal import refusing_requests
from vllm_autoprune.serving.api.request_checks import OFFLINE_FIX, refuse_misplaced
from vllm_autoprune.serving.compat import depends_on, patch, wraps
from vllm_autoprune.serving.plan import Chooser, ItemPlan
from vllm_autoprune.serving.plan_rules import PlanRules
from vllm_autoprune.serving.served_state import served_state

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor

    from vllm_autoprune.serving.api.placeholders import TokenCount
    from vllm_autoprune.serving.api.sized_pictures import SizedPicture

# Counters of requests. Refused requests are counted in ``refusal``, and the work of workers in
# ``worker.metrics``. Names do not begin with "vllm:", because vLLM drops every collector with that
# prefix when it sets up its own (``unregister_vllm_metrics``).

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

_RECOMPUTED_TOKENS = Counter(
    "autoprune_history_recomputed_tokens",
    "Prompt tokens that were computed again because their turn retired images: those between the "
    "core of the first one and the newest image.",
)


@cache
def make_kv_bytes_counter() -> Counter:
    """Counter of bytes, published only if the number of bytes per token is known."""
    return Counter(
        "autoprune_kv_bytes_saved",
        "Bytes of KV cache that visual tokens would have taken and did not, where nothing is "
        "shared.",
    )


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """What is counted of one request when the engine gets it."""

    state: str
    """Metric label of the state that the request ran."""

    chooser: Chooser

    kv_bytes: int | None
    """Bytes of one token in the KV cache; None if unknown."""

    images: Sequence[TokenCount] = ()

    plans: Sequence[ItemPlan] = ()
    """Plans of all items of the images."""

    recomputed: int = 0
    """Number of prompt tokens that are computed again because images are retired."""

    def add(self, videos: Sequence[ItemPlan]) -> None:
        """Count the request; ``videos`` are the plans of its pruned videos."""
        tokens = sum(count.tokens for count in self.images)
        kept_tokens = sum(plan.budget for plan in self.plans)
        video_tokens = sum(plan.tokens for plan in videos)
        kept_video_tokens = sum(plan.budget for plan in videos)
        _REQUESTS.labels(self.state).inc()
        _IMAGES.labels(self.chooser).inc(len(self.images))
        _TOKENS.labels("before").inc(tokens)
        _TOKENS.labels("encoded").inc(sum(count.encoded for count in self.images))
        _TOKENS.labels("after").inc(kept_tokens)
        for part, counter in (("core", _CORE_TOKENS), ("recall", _RECALLED_TOKENS)):
            counter.inc(sum(plan.budget for plan in self.plans if plan.part == part))
        _RECOMPUTED_TOKENS.inc(self.recomputed)
        _VIDEO_TOKENS.labels("before").inc(video_tokens)
        _VIDEO_TOKENS.labels("after").inc(kept_video_tokens)
        if self.kv_bytes is not None:
            saved = tokens - kept_tokens + video_tokens - kept_video_tokens
            make_kv_bytes_counter().inc(saved * self.kv_bytes)


# Hand-over of a request to the engine, after its last check.


class RenderedHashes(dict[str, list[str]]):
    """Cache identities of a rendered request, with what its hand-over to the engine needs.

    vLLM passes this object on unchanged. No client can send one, so its type also shows that this
    server made the plans of the request. ``keys`` maps identities to the keys of the processed
    tensors in vLLM's processor cache. ``surplus`` is the number of positions that the prompt takes
    beyond its tokens. ``pictures`` are those of a request that is planned alone.
    """

    def __init__(
        self,
        hashes: Mapping[str, list[str]],
        count: Callable[[], None] | None = None,
        keys: Mapping[str, str] = MappingProxyType({}),
        rendering: Rendering | None = None,
        surplus: int = 0,
        pictures: Sequence[SizedPicture] = (),
    ) -> None:
        super().__init__(hashes)
        self._count = count
        self._keys = keys
        self._rendering = rendering
        self.surplus = surplus
        self.pictures = pictures
        self._features: Sequence[MultiModalFeatureSpec] = ()
        self._handed_over = False

    def await_hand_over(self, features: Sequence[MultiModalFeatureSpec]) -> None:
        """Register this object under ``id(features)`` until the list is handed over.

        The list is referenced, so that Python cannot give its ``id()`` to another list.
        """
        self._features = features
        self._handed_over = False
        _waiting[id(features)] = self

    def hand_over(self, features: Sequence[MultiModalFeatureSpec]) -> None:
        """Complete the request's features with their tensors, and count the request once.

        Samples (n > 1) hand over the same features, and beam search new ones for every token.
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
"""Requests between the first hook and their end, by the id of their list of features, which samples
of one request share.

An entry disappears with its request, whether that is refused or ends."""


@depends_on("vllm.renderers.base:BaseRenderer", "get_mm_processor")
@wraps("vllm.v1.engine.input_processor:InputProcessor", "process_inputs")
@wraps("vllm.v1.engine.output_processor:OutputProcessor", "add_request")
def watch_requests() -> None:
    """Install the hooks on every request that API servers, or `LLM`, hand to the engine.

    Why: items that a client made itself reach no processor. Caches may change only once no later
    step can refuse the request.
    Remove when: vLLM asks plugins about a request before and after the last check.
    """
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
        """Wrap the last step that may refuse a request by 400."""
        request = stock(self, request_id, prompt, *args, **named)
        served = served_state(self.model_config)
        if served is None:
            return request
        params = args[0] if args else named.get("params")
        with refusing_requests():
            extra = getattr(params, "extra_args", None)
            refuse_misplaced({"extra_args": extra}, {}, OFFLINE_FIX)
        if not request.mm_features:
            return request
        hashes = prompt.get("mm_hashes") if isinstance(prompt, Mapping) else None
        if isinstance(hashes, RenderedHashes):
            limit_positions(request, hashes.surplus, self.model_config.max_model_len)
            hashes.await_hand_over(request.mm_features)
            return request
        with refusing_requests():
            if not served.rules.explicit:
                # Without the flag a plan may set nothing: it does not pass vLLM's own check of
                # ``mm_processor_kwargs``, which protects such a server.
                served = replace(served, rules=replace(served.rules, level="none"))
            rules = PlanRules(served, self.model_config.get_vocab_size())
            multimodal = self.model_config.get_multimodal_config()
            check_features(
                rules, request.mm_features, request.cache_salt or "", multimodal
            )
            processor: Any = self.renderer.get_mm_processor()
            surplus = count_surplus(processor.measure, request.mm_features)
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
        """Wrap the step after which a request goes to the engine."""
        stock(self, request, *args, **named)
        hashes = _waiting.get(id(request.mm_features))
        if hashes is not None:
            hashes.hand_over(request.mm_features or ())
