"""The state that a server serves, attached to the model config of every process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, get_args

from vllm_autoprune.errors import Refusal, RequestError
from vllm_autoprune.serving.compat import get_attachment
from vllm_autoprune.serving.plan import ENTRY, MROPE, ItemPlan
from vllm_autoprune.serving.request_rules import DEFAULT_RULES, RequestRules
from vllm_autoprune.serving.state_codec import decode_state
from vllm_autoprune.text_tower import TextTower
from vllm_autoprune.tpdsl.atoms.source import MAX_BUDGET, BudgetCall
from vllm_autoprune.tpdsl.cells import Cells
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import PruningPolicy, materialize
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import Need, Positions
from vllm_autoprune.tpdsl.tower import Tower

if TYPE_CHECKING:
    from vllm.config import ModelConfig

ATTRIBUTE = "autoprune"

NEEDS: tuple[Need, ...] = get_args(Need)


@dataclass(frozen=True)
class Capabilities:
    """What a model can do as it is served, with a reason for each limitation."""

    unavailable: tuple[tuple[Need, str], ...] = ()
    """Inputs that states cannot read, each with the reason."""
    whole_only: str = ""
    """Why no cell can be dropped before the tower; empty if cells can be dropped."""
    whole_tower: str = ""
    """Why no cell can be dropped inside the tower; empty if cells can be dropped."""
    packed_only: str = ""
    """Why kept tokens can only stand one after the other; empty if they need not."""
    axes: int = 0
    """Number of axes of the positions that workers keep; 0 if tokens can only be packed."""
    prunes_videos: bool = False
    """Whether tokens of videos can be chosen."""
    frame: tuple[int, int] | None = None
    """Number of tokens of a frame and of rows after the last frame, for models whose frames always
    have the same size."""


@dataclass(frozen=True)
class ServedState:
    """The state that a server runs, with its operator's settings and its model's capabilities."""

    architecture: str
    """The model's architecture, as vLLM names it."""
    state: PruningState
    """The server's own state, for all requests that bring none."""
    budget: BudgetCall
    """Number of tokens kept of an image, for a request that sets no budget."""
    text_tower: TextTower | None
    """CLIP checkpoint that measures relevance; None if the model's input embeddings measure it."""
    cache_bytes: int
    """Bound, in bytes, of the feature cache of each worker."""
    rules: RequestRules = DEFAULT_RULES
    """What requests may set."""
    capabilities: Capabilities = Capabilities()
    """What the model can do."""
    metrics_folder: str = ""
    """Folder to which workers write metrics; empty for none."""
    kv_bytes: int | None = None
    """Size of one token in the KV cache, in bytes; None if unknown."""
    cells: Cells | None = None
    """Rule for the cells that are dropped before the tower."""
    tower: Tower | None = None
    """Rule for the cells that are dropped inside the tower."""
    video_budget: BudgetCall | None = None
    """Number of tokens kept of a video, which replaces the state's own rule."""
    positions: Positions | None = None
    """Where kept tokens stand, which replaces the state's own setting."""

    def positions_of(
        self, state: PruningState, requested: Positions | None = None
    ) -> Positions:
        """Where the tokens that a state chooses stand, as a request or else the settings ask for.

        Raises :class:`RequestError` if this server cannot do what is requested.
        """
        only: Positions | None = None
        why = ""
        if self.capabilities.axes == MROPE:
            only = "true"
            why = "has positions in height and width, in which kept tokens keep their places"
        elif self.capabilities.axes == 0:
            only = "packed"
            why = self.capabilities.packed_only
        if requested is not None and only not in (None, requested):
            what = f"{requested!r}: this model {why}"
            where = f"{ENTRY}/positions"
            raise RequestError.of(where, what, "leave it out", kind=Refusal.UNSUPPORTED)
        return only or requested or self.positions or state.positions

    def count_video_tokens(
        self, policy: PruningPolicy, tokens: int, frames: int
    ) -> int:
        """K of a video of N tokens in T frames, where N includes the rows after the last frame.

        If every token of the frames is kept, so are the rows after them, as far as the policy's
        largest K allows: a number, or the upper end of a rule, bounds what a request gets for its
        video.
        """
        frame = self.capabilities.frame
        candidates = tokens if frame is None else tokens - frame[1]
        budget = policy.at(candidates, frames).budget
        return min(tokens, policy.budget) if budget >= candidates else budget

    def state_for_plan(self, plan: ItemPlan) -> PruningState:
        """The state that a plan carries, or else the server's own."""
        return decode_state(plan.state) if plan.state else self.state

    def policy_for_plan(self, plan: ItemPlan) -> PruningPolicy:
        """Policy of a plan, by the state that it carries or the server's own.

        For a core it is the policy that keeps only the core, for a delta that of both parts, and
        for a recall the one that chooses its tokens. Raises BudgetError.
        """
        state = self.state_for_plan(plan)
        exchange = plan.keep == "state"
        if plan.part == "recall":
            return make_policy(state, plan.budget, part="recall", exchange=exchange)
        if plan.part == "core":
            return make_policy(state, plan.core, part="core")
        core = plan.core if plan.part == "delta" else None
        video = plan.frames > 0 and plan.part == "whole"
        return make_policy(
            state, plan.image_budget, core, video=video, exchange=exchange
        )

    def find_needs(self, plan: ItemPlan) -> frozenset[Need]:
        """Optional inputs that the policy of a plan reads; empty if no policy is run.

        Raises :class:`RequestError` if this server does not make them.
        """
        if plan.keeps_all or not plan.runs_policy:
            return frozenset()
        policy = self.policy_for_plan(plan)
        if missing := policy.needs - self.needs:
            reasons = dict.fromkeys(missing, "not set up")
            reasons |= dict(self.capabilities.unavailable)
            inputs = "; ".join(
                f"{need!r} ({reasons[need]})" for need in sorted(missing)
            )
            readers = f"its base policy {policy.base.name!r} or its atoms"
            what = f"{readers} read what is not made here: {inputs}"
            fix = "bring a state that does not read it"
            where = f"{ENTRY}/state"
            raise RequestError.of(where, what, fix, kind=Refusal.UNSUPPORTED)
        return policy.needs

    def selection_identity(self, state: PruningState) -> str:
        """Identity of everything that a selection depends on except image, K and instruction."""
        tower = self.text_tower
        if tower is None:
            return state.digest
        return f"{state.digest}|{tower.path}|{tower.sign}"

    @property
    def needs(self) -> frozenset[Need]:
        """Inputs that workers may have to read for any request; quotas grow with K.

        If requests may bring states, these are all available inputs: features are computed once per
        image, before it is known which inputs later states read.
        """
        quota, _ = self.state.constraints.selector.bounds(MAX_BUDGET)
        of_state = self.state.needs(exchange=quota > 0)
        if not self.rules.allows("shipped-states"):
            return of_state
        unavailable = {need for need, _ in self.capabilities.unavailable}
        return of_state | (frozenset(NEEDS) - unavailable)

    def __getstate__(self) -> dict[str, Any]:
        # As text, because parameter models are made from the registry and have no import path.
        return {**vars(self), "state": self.state.dumps()}

    def __setstate__(self, fields: Mapping[str, Any]) -> None:
        vars(self).update(fields, state=load_state(fields["state"]))


make_policy = lru_cache(maxsize=512)(materialize)
"""Cached :func:`materialize`, which an API server and a worker call several times per item."""


def served_state(model_config: ModelConfig) -> ServedState | None:
    """The served state of a model config; None for a stock server."""
    served = get_attachment(model_config, ATTRIBUTE)
    assert served is None or isinstance(served, ServedState)
    return served


KV_CACHE = "autoprune_kv_cache"
"""Attribute of a model config that holds vLLM's cache config, whose block size is set later on."""
