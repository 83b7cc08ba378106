"""vLLM's encoder cache manager, with the images of a step counted by their unpruned tokens.

An image takes K places in the cache but costs the encoder N tokens. Counted as K, one step may
encode many times the images that its budget is meant for, and everyone who is decoding waits.
Counted as N, waits are as in stock vLLM, and a burst of images is prefilled in more steps. An
operator chooses by ``--ec-manager-config``. Memory is bounded either way
(:func:`vllm_autoprune.serving.compat.worker.bound_encoder_calls`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from vllm_autoprune.serving.compat import depends_on
from vllm_autoprune.serving.plan import peek_plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


@depends_on(
    "vllm.v1.core.encoder_cache_manager:EncoderCacheManager",
    "create_manager",
    "can_allocate",
    "allocate",
    "get_freed_mm_hashes",
)
class UnprunedBudgetManager(EncoderCacheManager):
    """Cache manager that limits a step to ``step_budget`` unpruned tokens, or to one image.

    The size of the cache itself is counted as in stock vLLM, in tokens that are kept.
    """

    def __init__(self, cache_size: int) -> None:
        super().__init__(cache_size)
        self.step_budget = cache_size
        self._step_cost = 0
        self._request_cost = 0

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: VllmConfig) -> UnprunedBudgetManager:
        """With the encoder budget of the scheduler (``EncoderCacheManager.create_manager``)."""
        manager = cls(cache_size)
        manager.step_budget = vllm_config.scheduler_config.max_num_encoder_input_tokens
        return manager

    def can_allocate(
        self,
        request: Request,
        input_id: int,
        encoder_compute_budget: int,
        num_embeds_to_schedule: int,
    ) -> bool:
        """As stock, and within what is left of the step's unpruned tokens."""
        if num_embeds_to_schedule == 0:  # the first input of this request, which may be tried again
            self._request_cost = 0
        cost = _cost(request, input_id)
        used = self._step_cost + self._request_cost
        if used > 0 and used + cost > self.step_budget:
            return False
        if not super().can_allocate(
            request, input_id, encoder_compute_budget, num_embeds_to_schedule
        ):
            return False
        self._request_cost += cost
        return True

    def allocate(self, request: Request, input_id: int) -> None:
        """As stock; from now on the input is part of the step."""
        super().allocate(request, input_id)
        self._step_cost += _cost(request, input_id)
        self._request_cost = 0

    def get_freed_mm_hashes(self) -> list[str]:
        """As stock; vLLM's scheduler asks once, at the end of each step."""
        self._step_cost = self._request_cost = 0
        freed: list[str] = super().get_freed_mm_hashes()
        return freed


def _cost(request: Request, input_id: int) -> int:
    """N of an image with a plan; of anything else the placeholders, as stock counts."""
    # With the cache in shared memory only workers see the data.
    plan = peek_plan(request.mm_features[input_id].data)
    return int(request.get_num_encoder_embeds(input_id)) if plan is None else plan[1]
