"""Bound of the encoder inputs in one step of the scheduler, by the work that they cause.

vLLM bounds a step by the tokens that its inputs keep. Here a step is bounded by the tokens that the
vision tower makes of them, and by the predicted time of selections that clients asked for.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cachetools import LRUCache
from pydantic import ValidationError
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.serving.compat import depends_on
from vllm_autoprune.serving.plan import FIELD, NO_KEY, ItemPlan
from vllm_autoprune.serving.state_codec import decode_state
from vllm_autoprune.tpdsl.cost import DEFAULT_COST, item_cost

if TYPE_CHECKING:
    from vllm.v1.request import Request

_MAX_MILLISECONDS = 2 * DEFAULT_COST
"""Predicted time, in a step, of selections that clients asked for: enough for two recalls."""

_CACHED_TOKENS = 1 << 15
"""Number of image tokens whose features are assumed to be cached: 0.25 GB of width 4096 in 16 bits.
"""

_MAX_LOADS = 1 << 12
"""Number of inputs whose load is remembered: a scheduler asks about waiting inputs in every step.
"""


@dataclass(frozen=True, slots=True)
class _EncoderLoad:
    """Work of one encoder input.

    ``tokens`` is M of N, the number of tokens that the vision tower encodes. ``image`` is the same
    for inputs that share one encoding. ``milliseconds`` is the time of a selection that a client
    asked for.
    """

    tokens: int
    image: Hashable
    milliseconds: float = 0.0


def _measure_load(request: Request, input_id: int) -> _EncoderLoad:
    """Load of an encoder input by its plan; without a plan, it is what vLLM counts."""
    feature = request.mm_features[input_id]
    embeds = request.get_num_encoder_embeds(input_id)
    unplanned = _EncoderLoad(embeds, feature.identifier)
    data = feature.data or {}
    if FIELD not in data:
        return unplanned
    try:
        plan = ItemPlan.decode(data[FIELD].data)
        cost = 0.0
        if plan.part == "recall":
            cost = DEFAULT_COST
        elif plan.state and plan.runs_policy:
            cost = item_cost(decode_state(plan.state), plan.tokens, plan.frames)
    except (AutopruneError, ValidationError):  # a forged plan, which workers replace
        return unplanned
    image = feature.identifier if plan.key == NO_KEY else plan.key
    return _EncoderLoad(max(plan.tokens, embeds), image, cost)


class EncoderSteps:
    """Loads of the inputs that a scheduler takes in a step, and the images of earlier steps."""

    def __init__(self) -> None:
        self._loads: LRUCache[tuple[str, int], _EncoderLoad] = LRUCache(_MAX_LOADS)
        self._cached: LRUCache[Hashable, int] = LRUCache(
            _CACHED_TOKENS, getsizeof=lambda n: n
        )
        self._budget: int | None = None
        self._scheduled: dict[Hashable, int] = {}
        self._tokens: dict[Hashable, int] = {}
        self._milliseconds: dict[tuple[str, int], float] = {}

    def admits(self, request: Request, input_id: int, budget: int) -> bool:
        """Whether the step has room for an input; the first input of a step always has.

        ``budget`` is the rest of vLLM's own token budget, which is the whole budget when a step
        begins.
        """
        if self._budget is None:
            self._budget = budget
        load = self._find_load(request, input_id)
        tokens = sum(self._tokens.values())
        if tokens and tokens + self._count_tokens(load) > self._budget:
            return False
        milliseconds = dict(self._milliseconds)
        milliseconds.pop((request.request_id, input_id), None)
        total = sum(milliseconds.values()) + load.milliseconds
        return not milliseconds or total <= _MAX_MILLISECONDS

    def take(self, request: Request, input_id: int) -> None:
        """Count an input for which the step has room."""
        load = self._find_load(request, input_id)
        self._tokens.setdefault(load.image, self._count_tokens(load))
        if load.milliseconds:
            self._milliseconds[request.request_id, input_id] = load.milliseconds

    def schedule(self, request: Request, input_id: int) -> None:
        """Record that an input is encoded in this step: later inputs find its features cached."""
        load = self._find_load(request, input_id)
        if load.tokens <= _CACHED_TOKENS:
            self._scheduled[load.image] = load.tokens

    def end(self) -> None:
        """End the step."""
        self._cached.update(self._scheduled)
        self._scheduled = {}
        self._budget = None
        self._tokens = {}
        self._milliseconds = {}

    def _find_load(self, request: Request, input_id: int) -> _EncoderLoad:
        entry = request.request_id, input_id
        load = self._loads.get(entry)
        if load is None:
            load = self._loads[entry] = _measure_load(request, input_id)
        return load

    def _count_tokens(self, load: _EncoderLoad) -> int:
        is_encoded = (
            load.image in self._tokens or self._cached.get(load.image) is not None
        )
        return 0 if is_encoded else load.tokens


@depends_on(
    "vllm.v1.core.encoder_cache_manager:EncoderCacheManager",
    "can_allocate",
    "allocate",
    "get_freed_mm_hashes",
    "create_manager",
)
@depends_on("vllm.config:VllmConfig", "ec_manager_config")
class BoundedCacheManager(EncoderCacheManager):
    """The scheduler's record of encoder outputs, which bounds the work of a step.

    The scheduler counts an encoder input by the tokens that it keeps. At K = N/8 a step would hold
    eight times the tower's work, and all other requests would wait for it. A recall, or a state
    that a request brings, keeps few tokens but costs a whole selection.
    """

    def __init__(self, cache_size: int) -> None:
        super().__init__(cache_size)
        self._steps = EncoderSteps()

    def can_allocate(
        self,
        request: Request,
        input_id: int,
        encoder_compute_budget: int,
        num_embeds_to_schedule: int,
    ) -> bool:
        """As vLLM's own, if the step has room for the input."""
        if not self._steps.admits(request, input_id, encoder_compute_budget):
            return False
        if not super().can_allocate(
            request, input_id, encoder_compute_budget, num_embeds_to_schedule
        ):
            return False
        self._steps.take(request, input_id)
        return True

    def allocate(self, request: Request, input_id: int) -> None:
        """As vLLM's own; not every input with room comes here, because KV blocks may be lacking."""
        super().allocate(request, input_id)
        self._steps.schedule(request, input_id)

    def get_freed_mm_hashes(self) -> list[str]:
        """As vLLM's own, and ends the step: the scheduler calls this once, at the end of each."""
        self._steps.end()
        return super().get_freed_mm_hashes()


CACHE_MANAGER = f"{BoundedCacheManager.__module__}.{BoundedCacheManager.__name__}"
"""``encoder_cache_manager_cls`` of a server with a state."""
