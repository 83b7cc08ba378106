"""Encoder inputs that one step of the scheduler takes, by the work that they are.

vLLM bounds a step by the tokens that its inputs keep. Here it is bounded by the tokens that the
vision tower makes of them, and by the predicted time of selections that clients asked for.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cachetools import LRUCache
from pydantic import ValidationError

from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.serving.plan import FIELD, NO_KEY, ItemPlan
from vllm_autoprune.serving.state_codec import decode_state
from vllm_autoprune.tpdsl.cost import DEFAULT_COST, item_cost

if TYPE_CHECKING:
    from vllm.v1.request import Request

_MAX_MILLISECONDS = 2 * DEFAULT_COST
"""Predicted time of the selections of clients that a step takes: of two recalls."""

_CACHED_TOKENS = 1 << 15
"""Tokens of images whose features are taken to be cached: 0.25 GB of width 4096 in 16 bits."""

_MAX_LOADS = 1 << 12
"""Inputs whose load is remembered: a scheduler asks about those that wait in every step."""


@dataclass(frozen=True, slots=True)
class _EncoderLoad:
    """Work of one encoder input.

    ``tokens`` are those that the vision tower makes of it, M of N; ``image`` is equal for inputs
    that are encoded once; ``milliseconds`` is the time of a selection that a client asked for.
    """

    tokens: int
    image: Hashable
    milliseconds: float = 0.0


def _measure_load(request: Request, input_id: int) -> _EncoderLoad:
    """Load of an encoder input, by its plan; one without a plan is what vLLM counts."""
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
    except (AutopruneError, ValidationError):  # forged: workers replace it
        return unplanned
    image = feature.identifier if plan.key == NO_KEY else plan.key
    return _EncoderLoad(max(plan.tokens, embeds), image, cost)


class EncoderSteps:
    """Loads of the inputs that a scheduler takes in a step, and images of the steps before it."""

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
        """Whether the step has room for an input; always for its first.

        ``budget`` are the tokens that vLLM has left of its own, which is all where a step begins.
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
        """Count an input that the step has room for."""
        load = self._find_load(request, input_id)
        self._tokens.setdefault(load.image, self._count_tokens(load))
        if load.milliseconds:
            self._milliseconds[request.request_id, input_id] = load.milliseconds

    def schedule(self, request: Request, input_id: int) -> None:
        """Tell that an input is encoded in this step: later ones find its features cached."""
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
