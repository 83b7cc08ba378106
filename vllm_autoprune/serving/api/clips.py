"""Clips of a request's videos: what is asked for them, and their plans once they are processed.

Before that their sizes are not known: a processor samples frames, and resizes them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm_autoprune.errors import Refusal
from vllm_autoprune.serving.api.instruction import InstructionTokenizer
from vllm_autoprune.serving.api.layout import PlannedItem
from vllm_autoprune.serving.api.request import PruningRequest
from vllm_autoprune.serving.api.resolve import share_tokens
from vllm_autoprune.serving.identities import (
    hash_pixels,
    make_cache_identity,
    make_feature_key,
    make_identity,
)
from vllm_autoprune.serving.plan import ENTRY, NO_KEY, ItemPlan, refuse
from vllm_autoprune.serving.plan_rules import find_cost_problem
from vllm_autoprune.serving.served_state import ServedState
from vllm_autoprune.serving.state_codec import encode_state
from vllm_autoprune.tpdsl.base_policy import INSTRUCTION_NEEDS
from vllm_autoprune.tpdsl.cost import FLAG
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.state import PruningState

if TYPE_CHECKING:
    from vllm.multimodal.parse import VideoProcessorItems

_MOST_COMPARED = 1 << 14
"""Tokens of a clip which a state may compare with each other, in a gigabyte of float32. What ranks
tokens by a score alone, as the policies for clips do, compares those of neighbouring frames."""


@dataclass(frozen=True, slots=True)
class Clips:
    """A request's clips, the digest of each, their cache salt, and what is asked for them."""

    videos: VideoProcessorItems
    digests: Sequence[str]
    salt: str
    texts: Sequence[str]
    request: PruningRequest
    state: PruningState | None
    limit: int | None = None
    """Most tokens that all of them keep."""

    @property
    def contents(self) -> list[str]:
        """What identifies the pixels of each clip."""
        return [repr((digest, self.salt)) for digest in self.digests]

    @property
    def keys(self) -> list[str]:
        """Identities of the processed clips, which all questions and K have in common."""
        return [make_identity("pixels", content, None) for content in self.contents]

    def plan(
        self,
        served: ServedState,
        tokenizer: InstructionTokenizer,
        sizes: Sequence[tuple[int, int]],
    ) -> list[PlannedItem]:
        """Plans and identities, by N and T of each; raises BudgetError or RequestError."""
        items = []
        plans = [self._resolve(served, *size) for size in sizes]
        shares = share_tokens(self.limit, [plan.budget for plan in plans], self._asked)
        if shares is not None:
            plans = [
                self._resolve(served, *s, k) for s, k in zip(sizes, shares, strict=True)
            ]
        for plan in plans:
            if problem := find_cost_problem(plan, served.rules.cost):
                fix = f"ask for a state such as vcast, or serve with a higher {FLAG}"
                raise refuse(f"{ENTRY}/state", problem, fix)
        asked = zip(self.contents, self.keys, self.texts, plans, strict=True)
        for i, (content, key, text, plan) in enumerate(asked):
            needs = served.find_needs(plan)
            plan = plan.ask(*tokenizer.tokenize(text, needs))
            if plan.keeps_all:
                items.append(PlannedItem(i, plan, make_identity("clip", content), key))
                continue
            seed = (
                hash_pixels(self.videos.get(i), "video")
                if plan.keep == "random"
                else ""
            )
            plan = replace(plan, key=make_feature_key(self.digests[i], self.salt, seed))
            chosen_by = served.selection_identity(served.state_for_plan(plan))
            read = None if needs.isdisjoint(INSTRUCTION_NEEDS) else plan.read
            identity = make_cache_identity(
                content,
                chosen_by,
                plan.budget,
                plan.keep,
                read,
                positions=plan.positions,
            )
            items.append(PlannedItem(i, plan, identity, key))
        return items

    @property
    def _asked(self) -> str:
        """The field of the request that says what its clips keep."""
        request = self.request
        return (
            "video_budget"
            if request.video_budget
            else ""
            if request.enabled
            else "enabled"
        )

    def _resolve(
        self, served: ServedState, tokens: int, frames: int, share: int | None = None
    ) -> ItemPlan:
        """The plan of a clip of N tokens in T frames, without key and instruction.

        ``share`` is its K where the limit says it.
        """
        request = self.request
        rules = served.rules
        k = tokens
        if request.enabled:
            chosen = self.state or served.state
            budget = share or request.video_budget or served.video_budget
            policy = materialize(
                chosen, budget, video=True, exchange=request.keep == "state"
            )
            k = served.count_video_tokens(policy, tokens, frames)
            compares = request.keep in ("state", "reference") and (
                policy.refines or policy.base.score is None
            )
            if k < tokens and tokens > _MOST_COMPARED and compares:
                what = f"compares every two of the {tokens} tokens of a video, and at most "
                what += f"{_MOST_COMPARED} are allowed"
                fix = "send fewer frames, or ask for a state such as vcast"
                raise refuse(f"{ENTRY}/state", what, fix)
        by_request = {
            "video_budget": request.video_budget is not None,
            "state": self.state is not None,
            "enabled": not request.enabled,
        }
        field = next((name for name, is_set in by_request.items() if is_set), None)
        least = rules.minimum if request.enabled else 1
        if field and share is None and not least <= -(-k // frames) <= rules.maximum:
            limits = f"{least} to {rules.maximum}"
            what = (
                f"K = {k} of {frames} frames, and requests may ask for {limits} of each"
            )
            fix = "ask for a number in the range"
            raise refuse(f"{ENTRY}/{field}", what, fix, Refusal.OUT_OF_RANGE)
        plan = ItemPlan(tokens, NO_KEY, keep=request.keep, tokens=tokens, frames=frames)
        if k < tokens:
            state = b"" if self.state is None else encode_state(self.state)
            positions = served.positions_of(
                self.state or served.state, request.positions
            )
            plan = replace(plan, budget=k, state=state, positions=positions)
        return plan


def prunes_clips(
    served: ServedState, request: PruningRequest, state: PruningState | None
) -> bool:
    """Whether a request's clips have plans; else they are what they are in stock vLLM.

    Raises :class:`RequestError` for a budget of clips that have none.
    """
    chosen = served.state if state is None else state
    if request.video_budget is not None and not served.capabilities.prunes_videos:
        what = "no token of a video can be chosen: this model's are served whole"
        where = f"{ENTRY}/video_budget"
        raise refuse(where, what, "leave it out", Refusal.WHOLE_VIDEO)
    if request.video_budget is not None and chosen.frames is None:
        what = f"state {chosen.name!r} leaves videos whole"
        fix = "leave it out, or ask for a state with frames"
        raise refuse(f"{ENTRY}/video_budget", what, fix, Refusal.WHOLE_VIDEO)
    return served.capabilities.prunes_videos and chosen.frames is not None
