"""Batched selection: from images with plans to rows for the language model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial

import torch
from torch import Tensor

from vllm_autoprune.errors import SelectionError
from vllm_autoprune.ops.rowwise import indices_from_mask, mask_from_indices, upload
from vllm_autoprune.serving.compat.worker import leaves_ranks_apart, world_size
from vllm_autoprune.serving.plan import NO_KEY, Choice, Ids, ItemPlan, plan_error
from vllm_autoprune.serving.served_state import ServedState
from vllm_autoprune.serving.worker.features import (
    Compared,
    ImageFeatures,
    IndexCache,
    Region,
    Signals,
    stack,
    stack_present,
)
from vllm_autoprune.serving.worker.question import RelevanceSpace
from vllm_autoprune.serving.worker.rows import KeptRows, insert_text, spread_offsets
from vllm_autoprune.serving.worker.selection import (
    FallbackReporter,
    replace_by_draw,
    select_at_random,
    select_evenly_with_ranks,
    select_with_fallback,
)
from vllm_autoprune.tpdsl.base_policy import Given, RefinedTokens
from vllm_autoprune.tpdsl.materialize import PruningPolicy
from vllm_autoprune.tpdsl.prefix import LanguagePrefix
from vllm_autoprune.tpdsl.refine import give_core, keep_indices, pool_tokens
from vllm_autoprune.tpdsl.tokens import (
    Instruction,
    MergerInput,
    Need,
    NextLayer,
    TowerStates,
    VisualTokens,
    Words,
)

_VARIABLE_LENGTH: frozenset[Need] = frozenset({"language", "words"})
"""Inputs whose length depends on the instruction; images that need them are selected one by one."""


@dataclass(frozen=True, slots=True)
class ModelParts:
    """Parts of the model from which inputs of policies are made, in addition to image features."""

    project: Callable[[Tensor], Tensor]
    """The projector, from rows of the vision tower ``(..., Dv)`` to ``(..., D)``."""
    embed: Callable[[Tensor], Tensor]
    """The language model's input embeddings ``(W, D)`` of token ids ``(W,)``."""
    relevance: RelevanceSpace | None = None
    """Space in which relevance is measured; None if the served state does not read it."""
    language: Callable[[Tensor, Ids], LanguagePrefix] | None = None
    """The language model's first layers over one image ``(N, D)`` and its instruction, if the
    served state reads them."""
    axes: int = 0
    """Number of axes of the positions that rows carry; 0 for none."""
    set_times: Callable[[Tensor, Tensor], None] | None = None
    """Sets the positions in time of rows, for models that may have text between the tokens of a
    video."""
    embed_marks: Callable[[Tensor], Tensor] | None = None
    """Rows ``(T, D)`` of the ids that begin and end an image, for models that make these of another
    table than the language model's."""

    @property
    def embed_text(self) -> Callable[[Tensor], Tensor]:
        """Rows ``(T, D)`` of the ids of an item's text."""
        return self.embed_marks or self.embed


@dataclass(frozen=True, slots=True)
class SelectionContext:
    """Objects that the selections of one batch share."""

    served: ServedState
    """The served state, from which each plan's policy is made."""
    parts: ModelParts
    """The parts of the model that policies read."""
    reporter: FallbackReporter
    """Counts fallbacks and exceptions."""
    indices: IndexCache = field(default_factory=IndexCache)
    """Indices of the tokens that items keep, for items that are chosen given them."""


def prune_images(
    context: SelectionContext,
    plans: Sequence[ItemPlan],
    images: Sequence[ImageFeatures],
) -> list[Tensor]:
    """``(K_i, D + E)`` rows of every image, in the order of ``images``, including rows of its text.

    Each image gets as many rows as its plan asks for, even if it has fewer tokens. After an
    exception, images are pruned one by one, and an image that raises again keeps evenly spaced
    tokens.
    """
    try:
        return _prune_together(context, plans, images)
    except Exception as error:  # the engine must survive any plan
        if leaves_ranks_apart(error):
            raise
        context.reporter.report_error(
            error, "pruning each image of its batch by itself"
        )
    if len(plans) > 1:
        pairs = zip(plans, images, strict=True)
        return [
            rows
            for plan, image in pairs
            for rows in prune_images(context, [plan], [image])
        ]
    rows = images[0].rows()
    context.reporter.report_image("uniform", "error", rows.device)
    count = _count_rows(plans[0], images[0]) + len(plans[0].text)
    evenly = spread_offsets(count, len(rows), rows.device)
    finite = rows[evenly].nan_to_num(0.0, 0.0, 0.0)
    kept_rows = KeptRows(finite, evenly, evenly)
    return [kept_rows.with_channels(context.parts.axes, plans[0], len(rows))]


def _prune_together(
    context: SelectionContext,
    plans: Sequence[ItemPlan],
    images: Sequence[ImageFeatures],
) -> list[Tensor]:
    """Rows of every image; images with equal budget and shape share one selection."""
    plans = [
        _replace_forged(context.reporter, *pair)
        for pair in zip(plans, images, strict=True)
    ]
    by_number = dict[int, KeptRows]()
    for numbers in _group_items(context.served, plans, images):
        group = _Group(
            context, [plans[i] for i in numbers], [images[i] for i in numbers]
        )
        by_number.update(zip(numbers, group.select(), strict=True))

    items = []
    for i, (plan, image) in enumerate(zip(plans, images, strict=True)):
        item = by_number[i]
        if (
            plan.profile
        ):  # return the unpruned size once the selection has used its memory
            item = KeptRows.keep_all(image, image.tokens)
        # vLLM silently drops surplus rows, and its engine crashes if rows are missing. Neither
        # happens while the API server predicts N correctly.
        count = len(item.rows)
        expected = _count_rows(plan, image)
        if count != expected:
            mismatch = SelectionError.of(
                "image", f"{count} rows for a placeholder of {expected}"
            )
            context.reporter.report_error(
                mismatch, "cutting its rows off, or repeating the last one"
            )
            repeated = torch.arange(expected, device=item.rows.device)
            item = item.take(repeated.clamp(max=count - 1))
        items.append(item)
    parts = context.parts
    items = insert_text(items, plans, images, parts.embed_text, parts.set_times)
    return [
        item.with_channels(parts.axes, plan, image.tokens + len(plan.text))
        for item, plan, image in zip(items, plans, images, strict=True)
    ]


def _count_rows(plan: ItemPlan, image: ImageFeatures) -> int:
    """Number of rows that an item must have, without those of its text."""
    return image.tokens if plan.profile else plan.budget


def _replace_forged(
    reporter: FallbackReporter, plan: ItemPlan, image: ImageFeatures
) -> ItemPlan:
    """Replace a plan whose item comes after more tokens than its image has by a random draw.

    Such a plan is forged: the API server, which checks plans, does not know N for certain.
    """
    count = image.tokens if plan.part == "recall" else image.candidates
    if plan.kept_before < count:
        return plan
    what = f"comes after {plan.kept_before} tokens, and its image has {count}"
    reporter.report_refused_plan(plan_error(what), image.device)
    return replace_by_draw(plan)


def _group_items(
    served: ServedState, plans: Sequence[ItemPlan], images: Sequence[ImageFeatures]
) -> list[list[int]]:
    """Indices of the items of each group, which share one selection.

    The tokens of an item may be chosen given those of other items. Its group comes after theirs, so
    that they are remembered by then.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, (plan, image) in enumerate(zip(plans, images, strict=True)):
        selects = plan.runs_policy and not _keeps_all(plan, image)
        policy = served.policy_for_plan(plan) if selects else None
        # Instructions differ in length, and neither padding nor a batch may change a selection.
        alone = policy is not None and not _VARIABLE_LENGTH.isdisjoint(policy.needs)
        shape = (image.gaps, *((region.grid, region.share) for region in image.regions))
        groups.setdefault((plan.group, shape, i if alone else None), []).append(i)
    return sorted(groups.values(), key=lambda numbers: plans[numbers[0]].kept_before)


def _keeps_all(plan: ItemPlan, image: ImageFeatures) -> bool:
    return plan.kept_before == 0 and plan.budget >= image.candidates


@dataclass(frozen=True)
class _Group:
    """Images of one shape whose plans have the same group (:attr:`ItemPlan.group`)."""

    context: SelectionContext
    plans: Sequence[ItemPlan]
    images: Sequence[ImageFeatures]

    def select(self) -> list[KeptRows]:
        """The rows that each image keeps; within a region, rows without a token come last."""
        plan = self.plans[0]
        image = self.images[0]
        if _keeps_all(plan, image):
            return [KeptRows.keep_all(image, plan.budget) for image in self.images]
        parts = []
        start = 0
        for number, region in enumerate(image.regions):
            batch = _RegionBatch(self.context, self.plans, self.images, number)
            if batch.budget > 0:
                parts.append(batch.select_rows(start))
            start += region.grid.tokens
        if not parts:  # all tokens are kept already
            no_rows = torch.stack([image.rows()[:0] for image in self.images])
            no_index = no_rows.new_zeros(no_rows.shape[:2], dtype=torch.int64)
            parts.append(KeptRows(no_rows, no_index, no_index))
        selected = KeptRows.join(parts)
        by_quality = plan.runs_policy and (
            self.context.served.policy_for_plan(plan).state.orders_by_quality
        )
        if image.regions[0].order is not None and not by_quality:
            selected = selected.take(selected.sort_keys.argsort(dim=1, stable=True))

        # Number of fillers to add, if all tokens are kept and the plan asks for more rows.
        missing = min(plan.image_budget - image.candidates, image.gaps)
        missing -= max(0, plan.kept_before - image.candidates)
        fillers = stack_present(image.filler for image in self.images)
        if missing > 0 and fillers is not None:
            filler_rows = fillers[:, None].expand(-1, missing, -1)
            end = selected.positions.new_full(filler_rows.shape[:2], image.tokens - 1)
            added = KeptRows(filler_rows.to(selected.rows.dtype), end, end)
            selected = KeptRows.join([selected, added])
        return selected.unbind()


@dataclass(frozen=True)
class _RegionBatch:
    """One region of the images of a group.

    An image may be several items of its prompt: the core before the delta, and both before the
    recalls of later turns. Each item is chosen given the items before it. Their indices are
    remembered, or are chosen again; that gives the same tokens, because they follow from the image
    and from the questions in the plan.
    """

    context: SelectionContext
    plans: Sequence[ItemPlan]
    images: Sequence[ImageFeatures]
    number: int
    """Index of the region, the same in all images."""

    @cached_property
    def regions(self) -> list[Region]:
        """The region of each image."""
        return [image.regions[self.number] for image in self.images]

    @cached_property
    def budget(self) -> int:
        """Number of the region's tokens that each of the items keeps (:attr:`ItemPlan.part`)."""
        plan = self.plans[0]
        return self._share(plan.image_budget) - self._share(plan.kept_before)

    def select_rows(self, start: int) -> KeptRows:
        """Rows of the region, whose first token has the index ``start`` in its image."""
        refined = self.select()
        features = refined.features
        count = self.regions[0].grid.tokens
        indices = refined.places(count)
        channels = stack_present(region.extra_channels for region in self.regions)
        if channels is not None:
            wide = indices[:, :, None].expand(-1, -1, channels.shape[2])
            channels = channels.gather(1, wide).to(features.dtype)
            features = torch.cat([features, channels], dim=2)
        orders = stack_present(region.order for region in self.regions)
        if orders is not None:
            positions = orders.gather(1, indices)
            end = self.images[0].tokens - 1
        else:
            positions = start + indices
            end = start + count - 1
        tokens = positions[:, : refined.indices.shape[1]]
        at_end = positions.new_full((len(positions), refined.extra), end)
        return KeptRows(features, torch.cat([tokens, at_end], dim=1), positions)

    def select(self) -> RefinedTokens:
        """Select the region's share of every image's tokens."""
        plan = self.plans[0]
        projected = stack([region.projected for region in self.regions])
        places = stack_present(region.places for region in self.regions)
        bare = VisualTokens(projected, self.regions[0].grid, places=places)
        if plan.keep == "resized":
            return pool_tokens(self.budget, bare)
        if plan.keep == "random":
            keys = [plan.key for plan in self.plans]
            start = self._share(plan.kept_before)
            return select_at_random(self.budget, bare, keys, start)
        if plan.part == "delta" and plan.image_budget >= self.images[0].candidates:
            return self._keep_others(bare)
        policy, image_core = self._make_policy()
        if plan.part == "whole" and policy.core and self.budget < bare.count:
            # An image that is one item keeps the same tokens as its core and delta as two items.
            parts = self._take_items([plan.split(image_core) for plan in self.plans])
            core, *delta = [part.select() for part in parts if part.budget > 0]
            return core.joined(delta[0]) if delta else core
        return self._select_by_policy(policy, bare)

    def _keep_others(self, bare: VisualTokens) -> RefinedTokens:
        """Keep all tokens that are not in the core of their image, in raster order."""
        others = torch.ones(
            (bare.batch, bare.count), dtype=torch.bool, device=bare.features.device
        )
        for core in self._take_items([[*plan.items_before()] for plan in self.plans]):
            if core.budget > 0:
                others &= ~mask_from_indices(core._find_indices(), bare.count)
        return keep_indices(bare, indices_from_mask(others, self.budget))

    def _select_by_policy(
        self, policy: PruningPolicy, bare: VisualTokens
    ) -> RefinedTokens:
        """Select by a policy, given the tokens of earlier items.

        An image keeps the tokens that it was given first, as long as they are remembered: features
        differ in their last bits from batch to batch, and KV of those tokens may still be cached.
        """
        plan = self.plans[0]
        reporter = self.context.reporter
        given_indices = list[Tensor]()
        earlier = None
        try:
            items = self._take_items([[*plan.items_before()] for plan in self.plans])
            for item in items:
                if item.budget > 0:
                    given_indices.append(item._find_indices())
            tokens = self._make_tokens(policy, bare)
            if given_indices and plan.part == "recall":
                earlier = Given.after(tokens, torch.cat(given_indices, dim=1))
            elif given_indices:
                earlier = give_core(policy, tokens, given_indices[0])
        # As in select_with_fallback(): computing what a policy reads may raise, and the engine must
        # live.
        except Exception as error:  # noqa: BLE001
            reporter.report_error(error)
            if given_indices:
                earlier = Given.after(bare, torch.cat(given_indices, dim=1))
            refined = select_evenly_with_ranks(self.budget, bare, reporter, earlier)
            is_settled = False
        else:
            if earlier is not None and plan.part == "delta":
                policy = policy.delta
            remembered = [self.context.indices.get(key) for key in self._keys]
            errors = dict(reporter.errors)
            refined = select_with_fallback(
                policy, tokens, reporter, earlier, remembered
            )
            # After an exception a later selection may succeed, so the fallback's tokens are
            # remembered only if other items are chosen given them. Values that are not finite lead
            # to the same tokens each time.
            is_settled = (
                reporter.errors == errors
                or plan.part in ("core", "recall")
                or self.context.served.rules.recall > 0
            )
        # All ranks remember the same, whichever of them raised.
        if is_settled or world_size() > 1:
            self._remember(refined.indices)
        return refined

    def _share(self, count: int) -> int:
        """The region's part of ``count`` tokens of an image."""
        return self.images[0].split(count)[self.number]

    def _take_items(
        self, plans: Sequence[Sequence[ItemPlan]]
    ) -> Iterator[_RegionBatch]:
        """The same region for other items of the images, which are given by image."""
        for items in zip(*plans, strict=True):
            yield replace(self, plans=items)

    def _make_policy(self) -> tuple[PruningPolicy, int]:
        """The policy with the region's share of K, core and quota; and the image's core."""
        plan = self.plans[0]
        policy = self.context.served.policy_for_plan(plan)
        # The policy of a delta is that of both parts, but a recall's policy is its own alone.
        budget = (
            self.budget if plan.part == "recall" else self._share(plan.image_budget)
        )
        core = self._share(policy.core)
        quota = min(self._share(policy.quota), budget - core)
        # The image's r_min is at most K - q_e, which is the sum of this over the regions.
        r_min = min(policy.r_min, budget - quota)
        of_region = replace(
            policy, budget=budget, quota=quota, r_min=r_min, by_size=None, core=core
        )
        return of_region, policy.core

    @cached_property
    def _keys(self) -> list[Hashable]:
        """Keys of the tokens that the items keep: the image, and what chooses its tokens.

        None for an image without a key, and in profiling; such choices are not remembered.
        """
        state = self.context.served.state_for_plan(self.plans[0])
        keys: list[Hashable] = []
        for plan, region in zip(self.plans, self.regions, strict=True):
            choices = (Choice(plan.budget, *plan.read), *plan.earlier)
            text = repr((plan.group, [_digest(choice) for choice in choices]))
            chooser: Hashable = (state.digest, hashlib.sha256(text.encode()).digest())
            if plan.part == "core" and state.possible_core is not None:
                # States with the same core share its tokens.
                chooser = (state.core_digest, plan.core)
            key = (plan.key, chooser, self.number, region.grid)
            keys.append(None if plan.key == NO_KEY or plan.profile else key)
        return keys

    def _remember(self, indices: Sequence[Tensor] | Tensor) -> None:
        for key, indices_of_item in zip(self._keys, indices, strict=True):
            if key is not None:
                self.context.indices.put(key, indices_of_item.clone())

    def _find_indices(self) -> Tensor:
        """Indices ``(B, K)`` as they were chosen when the items were computed, or chosen again."""
        remembered = [self.context.indices.get(key) for key in self._keys]
        indices = [row for row in remembered if row is not None]
        if len(indices) < len(remembered):
            selected = self.select().indices
            indices = [
                selected[i] if row is None else row for i, row in enumerate(remembered)
            ]
            self._remember(indices)
        return torch.stack(indices)

    def _make_tokens(self, policy: PruningPolicy, bare: VisualTokens) -> VisualTokens:
        """The tokens with every input that the policy reads and image or model provide."""
        # Embeddings are looked up first, and in any case: under tensor parallelism a lookup is a
        # collective, and the other ranks would wait forever for a rank that raised before it.
        tokens = self._read_instructions(policy.needs, bare)
        signals: Signals = {
            signal: stack([region.signals[signal] for region in self.regions])
            for signal in self.regions[0].signals
            if all(signal in region.signals for region in self.regions)
        }
        if tokens.instruction is not None and "relevance" in signals:
            instruction = replace(tokens.instruction, patches=signals["relevance"])
            tokens = replace(tokens, instruction=instruction)
        if "tower_keys" in signals:
            tower = TowerStates(
                signals["encoder"],
                signals["tower_keys"],
                self.context.parts.project,
                signals.get("tower_cls"),
            )
            if "next_keys" in signals:
                layer = NextLayer(signals["next_attention"], signals["next_keys"])
                tower = replace(tower, next_layer=layer)
            tokens = replace(tokens, tower=tower)
        if "merger_norms" in signals:
            cosine = partial(self._cosine, "encoder")
            merger_input = MergerInput(signals["merger_norms"], cosine)
            tokens = replace(tokens, merger_input=merger_input)
        return replace(
            tokens,
            cls_attention=signals.get("cls_attention"),
            encoder=signals.get("encoder"),
            known_cosine=partial(self._cosine, "projected"),
        )

    def _read_instructions(
        self, needs: frozenset[Need], tokens: VisualTokens
    ) -> VisualTokens:
        """The tokens with the inputs that the policy reads from the instructions."""
        parts = self.context.parts
        if "instruction" in needs and parts.relevance is not None:
            text, segments = parts.relevance.instructions(
                [plan.instruction for plan in self.plans]
            )
            instruction = Instruction(
                tokens.features, text, segments, parts.relevance.sign
            )
            tokens = replace(tokens, instruction=instruction)
        if "language" in needs and parts.language is not None:
            (plan,) = self.plans
            language = parts.language(tokens.features[0], plan.language)
            tokens = replace(tokens, language=language)
        if "words" in needs:
            (plan,) = self.plans
            ids = upload(torch.tensor(plan.language or (0,)), tokens.features.device)
            rows = parts.embed(ids)[None, : len(plan.language)]
            used = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device)
            tokens = replace(tokens, words=Words(rows, used))
        return tokens

    def _cosine(self, compared: Compared) -> Tensor:
        """Cosines ``(B, N, N)`` between the tokens of each image."""
        return stack([region.cosine(compared) for region in self.regions])


@lru_cache(maxsize=256)
def _digest(choice: Choice) -> bytes:
    """Digest of one question, because the plan of every later recall of an image repeats it."""
    return hashlib.sha256(repr(choice).encode()).digest()
