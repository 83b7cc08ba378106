"""Selection of one region of images, by its share of K and beside what is kept already."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from vllm_autoprune.ops.greedy import Conditioned
from vllm_autoprune.ops.rowwise import upload
from vllm_autoprune.serving.plan import NO_KEY, Choice, Ids, ItemPlan, runs_policy
from vllm_autoprune.serving.served_state import ServedState
from vllm_autoprune.serving.worker.features import (
    CoreCache,
    ImageFeatures,
    Region,
    stack,
    stack_signals,
)
from vllm_autoprune.serving.worker.question import RelevanceSpace
from vllm_autoprune.serving.worker.selection import (
    FallbackReporter,
    FirstImageCheck,
    select_at_random,
    select_with_fallback,
)
from vllm_autoprune.tpdsl.atoms.selectors import compares_greedily
from vllm_autoprune.tpdsl.base_policy import Given, RefinedTokens
from vllm_autoprune.tpdsl.materialize import PruningPolicy, delta_policy
from vllm_autoprune.tpdsl.prefix import LanguagePrefix
from vllm_autoprune.tpdsl.refine import (
    condition_exchange,
    give_core,
    give_kept,
    join_parts,
    keep_evenly,
    pool_tokens,
)
from vllm_autoprune.tpdsl.tokens import (
    Instruction,
    MergerInput,
    NextLayer,
    TowerStates,
    VisualTokens,
    Words,
)

# Split of an image's budget, core and exchange quota over the regions of its tokens.


@dataclass(frozen=True, slots=True)
class RegionShare:
    """One region's part of an image's budget K, core size and exchange quota.

    ``rows`` is how many of the region's tokens the item keeps (:attr:`ItemPlan.part`), ``before``
    how many the items before it keep.
    """

    budget: int
    core: int
    quota: int
    rows: int
    before: int = 0

    def policy(self, image_policy: PruningPolicy) -> PruningPolicy:
        """The policy of the image, for this region."""
        # The image's r_min is at most K - q_e, which is what these add up to.
        r_min = min(image_policy.r_min, self.budget - self.quota)
        return replace(
            image_policy,
            budget=self.budget,
            quota=self.quota,
            r_min=r_min,
            varies=False,
            core=self.core,
        )


def share_over_regions(
    served: ServedState, plan: ItemPlan, image: ImageFeatures
) -> list[RegionShare]:
    """The share of every region of an image; a core is split like the K that it is part of."""
    policy = served.policy_for_plan(plan) if runs_policy(plan.keep) else None
    core, quota = (0, 0) if policy is None else (policy.core, policy.quota)
    split = map(image.split, (plan.image_budget, plan.kept_before, core, quota))
    shares = []
    for tokens, before, kept, exchanged in zip(*split, strict=True):
        rows = tokens - before
        # The policy of a delta is that of both parts, the policy of a recall its own alone.
        budget = rows if plan.part == "recall" else tokens
        shares.append(RegionShare(budget, kept, min(exchanged, budget - kept), rows, before))
    return shares


# Selection of one region of images: by the policy of their plans, beside what they keep already.
#
# An image may be several items of its prompt: the core before the delta, both before what later
# turns recall. Each is chosen given those before it, whose indices are remembered, or chosen anew:
# the same tokens, since they follow from the image and from the questions in the plan.


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelParts:
    """Parts of the model that a policy's inputs are made with, beside the image features.

    project maps rows of the vision tower ``(..., Dv)`` to ``(..., D)``; language reads the
    language model's first layers over one image ``(N, D)`` and its instruction; embed maps token
    ids ``(W,)`` to the language model's input embeddings ``(W, D)``. None where the served state
    needs none.
    """

    project: Callable[[Tensor], Tensor]
    relevance: RelevanceSpace | None = None
    language: Callable[[Tensor, Ids], LanguagePrefix] | None = None
    embed: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class SelectionContext:
    """State, model parts and reporter for the selection of one batch.

    ``first_check`` is the safety check on a state's first real images; None skips it. ``cores``
    keeps what further questions about an image need.
    """

    served: ServedState
    parts: ModelParts
    reporter: FallbackReporter
    first_check: FirstImageCheck | None = None
    cores: CoreCache = field(default_factory=lambda: CoreCache(0))


def select_region(
    context: SelectionContext,
    plans: Sequence[ItemPlan],
    images: Sequence[ImageFeatures],
    at: int,
    share: RegionShare,
) -> RefinedTokens:
    """Select the share of region number ``at`` of every image; images and plans of one group.

    An image keeps the tokens that it was given first, as long as they are remembered: features
    differ in their last bits from batch to batch, and KV of those tokens may be left.
    """
    plan, regions = plans[0], [image.regions[at] for image in images]
    if plan.keep == "resized":
        return pool_tokens(share.rows, _projected_only(regions))
    if plan.keep == "random":
        seeds = [plan.key for plan in plans]
        return select_at_random(share.rows, _projected_only(regions), seeds, share.before)
    image_policy = context.served.policy_for_plan(plan)
    policy = share.policy(image_policy)
    if plan.part == "whole" and policy.core and share.rows < regions[0].grid.tokens:
        # An image that is one item keeps what its core and its delta keep as two.
        items = zip(*(plan.split(image_policy.core) for plan in plans), strict=True)
        core, *delta = _select_parts(context, [*items], images, at)
        return join_parts(core, delta[0]) if delta else core
    before: list[Tensor] = []
    try:
        before += _kept_before(context, plans, images, at)
        tokens = _tokens(context, policy, plans, regions)
        if context.first_check is not None and not plan.profile:
            policy = context.first_check.replace_unsafe(policy, tokens)
        earlier = _given(context, policy, plans, images, at, tokens, before)
    except Exception as error:  # as in select_with_fallback(): the engine has to live
        context.reporter.report_error(error)
        bare = _projected_only(regions)
        earlier = give_kept(bare, torch.cat(before, dim=1)) if before else None
        refined = keep_evenly(share.rows, bare, earlier)
        context.reporter.report(refined.fallback, "error")
        return refined
    if earlier is not None and plan.part == "delta":
        policy = delta_policy(policy)
    keys = _keys(context, plans, images, at)
    known = [context.cores.indices(key) for key in keys]
    errors = dict(context.reporter.meter.errors)
    refined = select_with_fallback(policy, tokens, context.reporter, earlier, known)
    # After an exception a later selection may succeed, so its tokens are remembered only where
    # other items are chosen after them. Values that are not finite lead to the same ones each time.
    precedes = plan.part in ("core", "recall") or context.served.rules.recall > 0
    if precedes or context.reporter.meter.errors == errors:
        _remember(context, keys, refined.indices)
    return refined


def _select_parts(
    context: SelectionContext,
    items: Sequence[Sequence[ItemPlan]],
    images: Sequence[ImageFeatures],
    at: int,
) -> Iterator[RefinedTokens]:
    """Select of one region what each item of the images keeps of it, if any."""
    for plans in items:
        share = share_over_regions(context.served, plans[0], images[0])[at]
        if share.rows > 0:
            yield select_region(context, plans, images, at, share)


def _kept_before(
    context: SelectionContext,
    plans: Sequence[ItemPlan],
    images: Sequence[ImageFeatures],
    at: int,
) -> Iterator[Tensor]:
    """Indices ``(B, A)`` that each of the items before these keeps of the region, if any.

    As they were chosen when the items were computed, or anew where that is not remembered.
    """
    for items in zip(*(plan.items_before() for plan in plans), strict=True):
        keys = _keys(context, items, images, at)
        known = [context.cores.indices(key) for key in keys]
        if any(indices is None for indices in known):
            refined = next(_select_parts(context, [items], images, at), None)
            if refined is None:
                continue
            chosen = refined.indices
            known = [chosen[i] if indices is None else indices for i, indices in enumerate(known)]
            _remember(context, keys, _present(known))
        yield torch.stack(_present(known))


def _given(
    context: SelectionContext,
    policy: PruningPolicy,
    plans: Sequence[ItemPlan],
    images: Sequence[ImageFeatures],
    at: int,
    tokens: VisualTokens,
    before: Sequence[Tensor],
) -> Given | None:
    """The tokens of this region that the images keep already, as the policy reads them."""
    if not before:
        return None
    if plans[0].part == "recall":
        return give_kept(tokens, torch.cat([*before], dim=1))
    cores = [next(plan.items_before()) for plan in plans]
    core = give_core(policy, tokens, before[0])
    return _conditioned(context, policy, tokens, core, _keys(context, cores, images, at))


def _conditioned(
    context: SelectionContext,
    policy: PruningPolicy,
    tokens: VisualTokens,
    earlier: Given,
    keys: Sequence[Hashable],
) -> Given:
    """The given cores with what further questions need of them, where the policy has such."""
    state, condition = policy.state, policy.base.condition
    conditioned, exchange = None, None
    # Another policy or selector compares tokens in another way, upon the same core.
    if condition is not None:
        by = state.base_policy.model_dump_json()

        def condition_base() -> Conditioned:
            assert condition is not None
            return condition(state.base_policy.params, state.ranked(tokens), earlier.indices)

        conditioned = _condition_cached(context, keys, by, condition_base)
    if policy.refines and compares_greedily(state.constraints.selector):
        by = repr((state.source.tokens, state.scoring.kernel, state.constraints.selector.atom))
        exchange = _condition_cached(
            context, keys, by, lambda: condition_exchange(policy, tokens, earlier.indices)
        )
    return replace(earlier, conditioned=conditioned, exchange=exchange)


def _condition_cached(
    context: SelectionContext,
    keys: Sequence[Hashable],
    by: str,
    condition: Callable[[], Conditioned],
) -> Conditioned:
    """Similarities of a batch conditioned on its cores: from the cache, or computed for it."""
    keys = [None if key is None else (key, by) for key in keys]
    known = [context.cores.conditioned(key) for key in keys]
    if any(part is None for part in known):
        fresh = condition()
        for i, key in enumerate(keys):
            if known[i] is None:
                known[i] = of_image = fresh.select(i, len(keys))
                context.cores.put_conditioned(key, of_image)
    return Conditioned.join(_present(known))


def _remember(
    context: SelectionContext, keys: Sequence[Hashable], indices: Sequence[Tensor] | Tensor
) -> None:
    for key, of_item in zip(keys, indices, strict=True):
        context.cores.put_indices(key, of_item)


def _keys(
    context: SelectionContext, plans: Sequence[ItemPlan], images: Sequence[ImageFeatures], at: int
) -> list[Hashable]:
    """Keys of the tokens that items keep of one region: which image, and what chooses them.

    None for an image without a key, and in profiling: nothing of it is remembered.
    """
    state = context.served.state_for_plan(plans[0])
    keys: list[Hashable] = []
    for plan, image in zip(plans, images, strict=True):
        chooser: Hashable = (state.digest, _digest(plan))
        if plan.part == "core" and state.core is not None:
            chooser = (state.core_digest, plan.core)  # states with the same core share it
        key = (plan.key, chooser, at, image.regions[at].grid)
        keys.append(None if plan.key == NO_KEY or plan.profile else key)
    return keys


def _digest(plan: ItemPlan) -> bytes:
    choices = (Choice(plan.budget, *plan.read), *plan.earlier)
    return hashlib.sha256(repr((plan.group, [*map(_digest_choice, choices)])).encode()).digest()


@lru_cache(maxsize=256)
def _digest_choice(choice: Choice) -> bytes:
    """Digest of one question: the plan of every later recall of an image repeats it."""
    return hashlib.sha256(repr(choice).encode()).digest()


def _projected_only(regions: Sequence[Region]) -> VisualTokens:
    return VisualTokens(stack([region.projected for region in regions]), regions[0].grid)


def _present(parts: Sequence[T | None]) -> list[T]:
    return [part for part in parts if part is not None]


def _tokens(
    context: SelectionContext,
    policy: PruningPolicy,
    plans: Sequence[ItemPlan],
    regions: Sequence[Region],
) -> VisualTokens:
    parts, bare = context.parts, _projected_only(regions)
    features, signals = bare.features, stack_signals([region.signals for region in regions])
    instruction, language, words, tower, merger_input = None, None, None, None, None
    if "instruction" in policy.needs and parts.relevance is not None:
        text, segments = parts.relevance.instructions([plan.instruction for plan in plans])
        patches = signals.get("relevance", features)
        instruction = Instruction(patches, text, segments, parts.relevance.sign)
    if "language" in policy.needs and parts.language is not None:
        (plan,) = plans
        language = parts.language(features[0], plan.language)
    if "words" in policy.needs and parts.embed is not None:
        (plan,) = plans
        words = _words(plan.language, parts.embed, features)
    if "tower_keys" in signals:
        next_layer = None
        if "next_keys" in signals:
            next_layer = NextLayer(signals["next_attention"], signals["next_keys"])
        states = signals["encoder"], signals["tower_keys"]
        tower = TowerStates(*states, parts.project, signals.get("tower_cls"), next_layer)
    cosine = signals.get("cosine")
    before = context.served.state.rank_at == "merger_in"
    if "merger_norms" in signals:
        merger_input = MergerInput(signals["merger_norms"], cosine if before else None)
    return replace(
        bare,
        cls_attention=signals.get("cls_attention"),
        instruction=instruction,
        known_cosine=None if before else cosine,
        tower=tower,
        language=language,
        encoder=signals.get("encoder"),
        words=words,
        merger_input=merger_input,
    )


def _words(ids: Ids, embed: Callable[[Tensor], Tensor], features: Tensor) -> Words:
    """The words of one image's instruction; none of an empty one."""
    # Looked up in any case: under tensor parallelism every lookup is a collective.
    rows = embed(upload(torch.tensor(ids or (0,)), features.device))[None, : len(ids)]
    return Words(rows, torch.ones(1, len(ids), dtype=torch.bool, device=features.device))
