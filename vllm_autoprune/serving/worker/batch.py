"""Batched selection: from images with plans to rows for the language model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from vllm_autoprune.errors import SelectionError
from vllm_autoprune.ops.rowwise import upload
from vllm_autoprune.serving.compat.worker import leaves_ranks_apart, world_size
from vllm_autoprune.serving.plan import LINE, NO_KEY, Choice, Ids, ItemPlan, plan_error
from vllm_autoprune.serving.served_state import ServedState
from vllm_autoprune.serving.worker.features import (
    Compared,
    ImageFeatures,
    IndexCache,
    Region,
    stack,
)
from vllm_autoprune.serving.worker.positions import (
    count_channels,
    encode_offsets,
    spread_offsets,
)
from vllm_autoprune.serving.worker.question import RelevanceSpace
from vllm_autoprune.serving.worker.selection import (
    FallbackReporter,
    select_at_random,
    select_evenly_with_ranks,
    select_with_fallback,
)
from vllm_autoprune.tpdsl.base_policy import FALLBACKS, Given, RefinedTokens
from vllm_autoprune.tpdsl.materialize import PruningPolicy
from vllm_autoprune.tpdsl.prefix import LanguagePrefix
from vllm_autoprune.tpdsl.refine import give_core, pool_tokens
from vllm_autoprune.tpdsl.tokens import (
    Instruction,
    MergerInput,
    Need,
    NextLayer,
    TowerStates,
    VisualTokens,
    Words,
)

T = TypeVar("T")

_VARIABLE_LENGTH: frozenset[Need] = frozenset({"language", "words"})
"""Inputs whose length depends on the instruction: images that need them are selected one by one."""


@dataclass(frozen=True, slots=True)
class ModelParts:
    """Parts of the model that a policy's inputs are made with, beside the image features.

    project maps rows of the vision tower ``(..., Dv)`` to ``(..., D)``; embed maps token ids
    ``(W,)`` to the language model's input embeddings ``(W, D)``; language reads the language
    model's first layers over one image ``(N, D)`` and its instruction. None where the served state
    needs none. axes are those of the positions that rows carry, 0 for none; set_times sets those in
    time, where text may stand between the tokens of a clip.
    """

    project: Callable[[Tensor], Tensor]
    embed: Callable[[Tensor], Tensor]
    relevance: RelevanceSpace | None = None
    language: Callable[[Tensor, Ids], LanguagePrefix] | None = None
    axes: int = 0
    set_times: Callable[[Tensor, Tensor], None] | None = None


@dataclass(frozen=True, slots=True)
class SelectionContext:
    """State, model parts and reporter for the selection of one batch.

    ``indices`` are those of the tokens that items keep.
    """

    served: ServedState
    parts: ModelParts
    reporter: FallbackReporter
    indices: IndexCache = field(default_factory=IndexCache)


def prune_images(
    context: SelectionContext,
    plans: Sequence[ItemPlan],
    images: Sequence[ImageFeatures],
) -> list[Tensor]:
    """``(K_i, D + E)`` rows of every image, in the order given, with those of its text if any.

    A row is there for each of the image's placeholders, whatever its plan says. After an exception
    images are pruned by themselves, and the one that raises it keeps evenly spaced tokens.
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
    codes = torch.full(
        (1,), FALLBACKS.index("uniform"), dtype=torch.uint8, device=rows.device
    )
    context.reporter.report(codes, "error")
    count = _count_rows(plans[0], images[0]) + len(plans[0].text)
    evenly = spread_offsets(count, len(rows), rows.device)
    kept = rows[evenly].nan_to_num(0.0, 0.0, 0.0)
    return [_carry_positions(context.parts.axes, plans[0], kept, evenly, len(rows))]


def _prune_together(
    context: SelectionContext,
    plans: Sequence[ItemPlan],
    images: Sequence[ImageFeatures],
) -> list[Tensor]:
    """Rows of every image, those of one budget and one shape from one selection."""
    plans = list(plans)
    reporter = context.reporter
    groups: dict[object, list[int]] = {}
    for i, (plan, image) in enumerate(zip(plans, images, strict=True)):
        most = image.tokens if plan.part == "recall" else image.candidates
        if plan.kept_before >= most:
            # Forged: the API server, which checks plans, does not know N for certain.
            error = plan_error(
                f"comes after {plan.kept_before} tokens, and its image has {most}"
            )
            reporter.report_refused_plan(error, image.regions[0].projected.device)
            plan = replace(
                plan, keep="random", state=b"", part="whole", core=0, earlier=()
            )
            plans[i] = plan
        selects = not _keeps_all(plan, image) and plan.runs_policy
        policy = context.served.policy_for_plan(plan) if selects else None
        # Instructions differ in length, and neither padding nor a batch may change a selection.
        alone = policy is not None and not _VARIABLE_LENGTH.isdisjoint(policy.needs)
        shape = (image.gaps, *((region.grid, region.share) for region in image.regions))
        groups.setdefault((plan.group, shape, i if alone else None), []).append(i)

    # In the order of their parts: what an item is chosen after is then remembered when its own turn
    # comes.
    rows = dict[int, Tensor]()
    places = dict[int, Tensor]()
    stands = dict[int, Tensor]()
    for members in sorted(
        groups.values(), key=lambda members: plans[members[0]].kept_before
    ):
        group = [plans[i] for i in members], [images[i] for i in members]
        if _keeps_all(plans[members[0]], images[members[0]]):
            kept_places = [image.places(group[0][0].budget) for image in group[1]]
            pairs = zip(group[1], kept_places, strict=True)
            selected: Sequence[Tensor] = [image.rows()[at] for image, at in pairs]
            at = stood = torch.stack(kept_places)
        else:
            chosen, at, stood = _select_rows(context, *group)
            selected = chosen.unbind()
        for i, *of_image in zip(members, selected, at, stood, strict=True):
            rows[i], places[i], stands[i] = of_image
            if plans[
                i
            ].profile:  # the unpruned size, after the selection has used its memory
                rows[i] = images[i].rows()
                places[i] = stands[i] = torch.arange(
                    len(rows[i]), device=rows[i].device
                )

    # vLLM silently drops surplus rows, and its engine crashes where rows are missing. Neither
    # happens while the API server predicts N correctly.
    for i, (plan, image) in enumerate(zip(plans, images, strict=True)):
        count = len(rows[i])
        wanted = _count_rows(plan, image)
        if count != wanted:
            mismatch = SelectionError(f"{count} rows for a placeholder of {wanted}")
            reporter.report_error(
                mismatch, "cutting its rows off, or repeating the last one"
            )
            repeated = torch.arange(wanted, device=rows[i].device).clamp(max=count - 1)
            for of_item in (rows, places, stands):
                of_item[i] = of_item[i][repeated]
    kept = [_Kept(rows[i], places[i], stands[i]) for i in range(len(plans))]
    _insert_text(context.parts, plans, images, kept)
    axes = context.parts.axes
    return [
        _carry_positions(
            axes, plan, item.rows, item.stands, image.tokens + len(plan.text)
        )
        for plan, item, image in zip(plans, kept, images, strict=True)
    ]


@dataclass(slots=True)
class _Kept:
    """Rows ``(K, D + E)`` of an item, and two places ``(K,)`` of each among the image's tokens.

    ``places`` order them; ``stands`` are where they stand for the language model. They differ for
    rows that stand for no single token.
    """

    rows: Tensor
    places: Tensor
    stands: Tensor


def _carry_positions(
    axes: int, plan: ItemPlan, rows: Tensor, stands: Tensor, span: int
) -> Tensor:
    """Rows ``(L, D + E)`` with the positions of their tokens as their last channels.

    ``stands`` ``(L,)`` are those of one axis in the whole item, of ``span`` positions; under M-RoPE
    rows carry theirs already.
    """
    if axes == LINE:
        if plan.positions == "spread":
            stands = spread_offsets(len(rows), span, rows.device)
        channels = encode_offsets(stands[:, None]).to(rows.dtype)
        return torch.cat(
            [rows, channels if plan.moves else torch.full_like(channels, -1)], dim=1
        )
    if axes and plan.positions == "packed":
        rows[:, -count_channels(axes) :] = -1
    return rows


def _count_rows(plan: ItemPlan, image: ImageFeatures) -> int:
    """Rows of the image's tokens, without those of text."""
    return image.tokens if plan.profile else plan.budget


def _insert_text(
    model: ModelParts,
    plans: Sequence[ItemPlan],
    images: Sequence[ImageFeatures],
    kept: Sequence[_Kept],
) -> None:
    """Insert rows of each image's text behind the tokens that stand before it, in place.

    Rows between the same two texts stay in their order. Positions are then those of the item with
    its text.
    """
    texts = [place for plan in plans for place in plan.text]
    if not texts:
        return
    before, ids = upload(torch.tensor([*zip(*texts, strict=True)]), kept[0].rows.device)
    counts = [len(plan.text) for plan in plans]
    parts = zip(
        kept, images, before.split(counts), model.embed(ids).split(counts), strict=True
    )
    for item, image, before_text, text in parts:
        before_text = before_text.clamp(
            max=image.tokens
        )  # else positions have no bound
        texts_before = torch.searchsorted(before_text, item.places, right=True)
        number = torch.arange(len(text), device=item.rows.device)
        # Channels that are not the language model's are 0.
        text = functional.pad(
            text.to(item.rows.dtype), (0, item.rows.shape[1] - text.shape[1])
        )
        joined = torch.cat([item.rows, text])
        if model.set_times is not None:
            # A text token takes one position, and a frame as many as its longer side.
            grid = image.regions[0].grid
            frames = torch.cat([item.places, before_text]) // (grid.height * grid.width)
            times = torch.cat([texts_before, number]) + frames * max(
                grid.height, grid.width
            )
            model.set_times(joined, times)
        order = torch.cat([2 * texts_before, 2 * number + 1]).argsort(stable=True)
        behind = torch.searchsorted(before_text, item.stands, right=True)
        item.rows = joined[order]
        item.places = torch.cat([item.places, before_text])[order]
        item.stands = torch.cat([item.stands + behind, before_text + number])[order]


def _keeps_all(plan: ItemPlan, image: ImageFeatures) -> bool:
    return plan.kept_before == 0 and plan.budget >= image.candidates


def _select_rows(  # noqa: PLR0915
    context: SelectionContext,
    plans: Sequence[ItemPlan],
    images: Sequence[ImageFeatures],
) -> tuple[Tensor, Tensor, Tensor]:
    """Select ``(B, K, D + E)`` rows of images of one group and shape, of which not all are kept.

    With the place ``(B, K)`` of each among all rows of its image, and where it stands; rows that
    stand for no single token are the last of their region.
    """
    plan = plans[0]
    image = images[0]
    ordered = image.regions[0].order is not None
    parts = []
    positions = list[Tensor]()
    stands = list[Tensor]()
    start = 0
    for number in range(len(image.regions)):
        batch = _RegionBatch(context, plans, images, number)
        start += 0 if number == 0 else image.regions[number - 1].grid.tokens
        if batch.rows == 0:
            continue
        refined = batch.select()
        features = refined.features
        channels = [
            r.extra_channels for r in batch.regions if r.extra_channels is not None
        ]
        if channels:
            extra = stack(channels)
            sources = refined.places(extra.shape[1])[:, :, None]
            extra = extra.gather(1, sources.expand(-1, -1, extra.shape[2]))
            features = torch.cat([features, extra.to(features.dtype)], dim=2)
        parts.append(features)
        in_region = image.regions[number].grid.tokens
        of_region = refined.indices.shape[1]
        stood = refined.places(in_region)
        last_place = start + in_region - 1
        if ordered:
            orders = stack([r.order for r in batch.regions if r.order is not None])
            stood = orders.gather(1, stood)
            last_place = image.tokens - 1
        else:
            stood = start + stood
        extra_places = stood.new_full((len(plans), refined.extra), last_place)
        positions.append(torch.cat([stood[:, :of_region], extra_places], dim=1))
        stands.append(stood)

    if not parts:  # all tokens are kept already
        parts = [torch.stack([image.rows()[:0] for image in images])]
        stands = positions = [
            torch.zeros(len(plans), 0, dtype=torch.int64, device=parts[0].device)
        ]
    rows = torch.cat(parts, dim=1)
    places = torch.cat(positions, dim=1)
    stand = torch.cat(stands, dim=1)
    by_quality = plan.runs_policy and (
        context.served.policy_for_plan(plan).state.orders_by_quality
    )
    if ordered and not by_quality:
        places, order = places.sort(dim=1, stable=True)
        rows = rows.gather(1, order[:, :, None].expand(-1, -1, rows.shape[2]))
        stand = stand.gather(1, order)

    # Fillers, where all tokens are kept and the plan asks for more.
    missing = min(plan.image_budget - image.candidates, image.gaps)
    missing -= max(0, plan.kept_before - image.candidates)
    fillers = [image.filler for image in images if image.filler is not None]
    if missing <= 0 or len(fillers) < len(images):
        return rows, places, stand
    added = torch.stack(fillers)[:, None].expand(-1, missing, -1)
    at_end = places.new_full((len(plans), missing), image.tokens - 1)
    rows = torch.cat([rows, added.to(rows.dtype)], dim=1)
    return rows, torch.cat([places, at_end], dim=1), torch.cat([stand, at_end], dim=1)


@dataclass(frozen=True)
class _RegionBatch:
    """One region of images, number ``number``, whose plans are of one group.

    An image may be several items of its prompt: the core before the delta, both before what later
    turns recall. Each is chosen given those before it, whose indices are remembered, or chosen
    anew: the same tokens, since they follow from the image and from the questions in the plan.
    """

    context: SelectionContext
    plans: Sequence[ItemPlan]
    images: Sequence[ImageFeatures]
    number: int

    @cached_property
    def regions(self) -> list[Region]:
        """The region of each image."""
        return [image.regions[self.number] for image in self.images]

    @cached_property
    def rows(self) -> int:
        """Tokens of the region that each of the items keeps (:attr:`ItemPlan.part`)."""
        return self._share(self.plans[0].image_budget) - self._share(
            self.plans[0].kept_before
        )

    def select(self) -> RefinedTokens:
        """Select the region's share of every image's tokens.

        An image keeps the tokens that it was given first, as long as they are remembered: features
        differ in their last bits from batch to batch, and KV of those tokens may be left.
        """
        plan = self.plans[0]
        reporter = self.context.reporter
        bare = VisualTokens(
            stack([r.projected for r in self.regions]), self.regions[0].grid
        )
        if plan.keep == "resized":
            return pool_tokens(self.rows, bare)
        if plan.keep == "random":
            keys = [plan.key for plan in self.plans]
            return select_at_random(
                self.rows, bare, keys, self._share(plan.kept_before)
            )
        policy, image_core = self._make_policy()
        if plan.part == "whole" and policy.core and self.rows < bare.count:
            # An image that is one item keeps what its core and its delta keep as two.
            parts = self._take_items([plan.split(image_core) for plan in self.plans])
            core, *delta = [part.select() for part in parts if part.rows > 0]
            return core.joined(delta[0]) if delta else core

        before = list[Tensor]()
        earlier = None
        try:
            items = self._take_items([[*plan.items_before()] for plan in self.plans])
            before += (item._recall() for item in items if item.rows > 0)
            tokens = self._make_tokens(policy, bare)
            if before and plan.part == "recall":
                earlier = Given.after(tokens, torch.cat(before, dim=1))
            elif before:
                earlier = give_core(policy, tokens, before[0])
        except (
            Exception  # noqa: BLE001
        ) as error:  # as in select_with_fallback(): the engine has to live
            reporter.report_error(error)
            earlier = Given.after(bare, torch.cat(before, dim=1)) if before else None
            refined = select_evenly_with_ranks(self.rows, bare, reporter, earlier)
            if world_size() > 1:
                self._remember(refined.indices)
            return refined
        if earlier is not None and plan.part == "delta":
            policy = policy.delta
        known = [self.context.indices.get(key) for key in self._keys]
        errors = dict(reporter.errors)
        refined = select_with_fallback(policy, tokens, reporter, earlier, known)
        # After an exception a later selection may succeed, so its tokens are remembered only where
        # other items are chosen after them. Values that are not finite lead to the same ones each
        # time. Ranks remember alike, whichever of them raised.
        precedes = (
            plan.part in ("core", "recall") or self.context.served.rules.recall > 0
        )
        if precedes or reporter.errors == errors or world_size() > 1:
            self._remember(refined.indices)
        return refined

    def _share(self, count: int) -> int:
        """The region's part of so many tokens of an image."""
        return self.images[0].split(count)[self.number]

    def _take_items(self, plans: Sequence[Sequence[ItemPlan]]) -> list[_RegionBatch]:
        """The same region for other items of the images, given by image."""
        return [replace(self, plans=items) for items in zip(*plans, strict=True)]

    def _make_policy(self) -> tuple[PruningPolicy, int]:
        """The policy with the region's share of K, core and exchange quota; the image's core."""
        plan = self.plans[0]
        policy = self.context.served.policy_for_plan(plan)
        # The policy of a delta is that of both parts, the policy of a recall its own alone.
        budget = self.rows if plan.part == "recall" else self._share(plan.image_budget)
        core = self._share(policy.core)
        quota = min(self._share(policy.quota), budget - core)
        # The image's r_min is at most K - q_e, which is what these add up to.
        r_min = min(policy.r_min, budget - quota)
        share = replace(
            policy, budget=budget, quota=quota, r_min=r_min, by_size=None, core=core
        )
        return share, policy.core

    @cached_property
    def _keys(self) -> list[Hashable]:
        """Keys of the tokens that the items keep: which image, and what chooses them.

        None for an image without a key, and in profiling: nothing of it is remembered.
        """
        state = self.context.served.state_for_plan(self.plans[0])
        keys: list[Hashable] = []
        for plan, region in zip(self.plans, self.regions, strict=True):
            choices = (Choice(plan.budget, *plan.read), *plan.earlier)
            text = repr((plan.group, [_digest(choice) for choice in choices]))
            chooser: Hashable = (state.digest, hashlib.sha256(text.encode()).digest())
            if plan.part == "core" and state.core is not None:
                chooser = (
                    state.core_digest,
                    plan.core,
                )  # states with the same core share it
            key = (plan.key, chooser, self.number, region.grid)
            keys.append(None if plan.key == NO_KEY or plan.profile else key)
        return keys

    def _remember(self, indices: Sequence[Tensor] | Tensor) -> None:
        for key, indices_of_item in zip(self._keys, indices, strict=True):
            if key is not None:
                self.context.indices.put(key, indices_of_item.clone())

    def _recall(self) -> Tensor:
        """Indices ``(B, K)`` as they were chosen when the items were computed, or chosen anew."""
        known = [self.context.indices.get(key) for key in self._keys]
        if any(indices is None for indices in known):
            anew = self.select().indices
            known = [
                anew[i] if indices is None else indices
                for i, indices in enumerate(known)
            ]
            self._remember(_present(known))
        return torch.stack(_present(known))

    def _make_tokens(self, policy: PruningPolicy, bare: VisualTokens) -> VisualTokens:
        """The tokens with every input that the policy reads and the images or the model have."""
        parts = self.context.parts
        features = bare.features
        instruction = None
        language = None
        words = None
        tower = None
        merger_input = None
        # Embeddings first, and in any case: under tensor parallelism a lookup is a collective, and
        # ranks would wait forever for one on which something else raised before.
        question = None
        if "instruction" in policy.needs and parts.relevance is not None:
            question = parts.relevance.instructions(
                [plan.instruction for plan in self.plans]
            )
        if "language" in policy.needs and parts.language is not None:
            (plan,) = self.plans
            language = parts.language(features[0], plan.language)
        if "words" in policy.needs:
            (plan,) = self.plans
            ids = upload(torch.tensor(plan.language or (0,)), features.device)
            rows = parts.embed(ids)[None, : len(plan.language)]
            words = Words(
                rows, torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device)
            )
        signals = {
            signal: stack([region.signals[signal] for region in self.regions])
            for signal in self.regions[0].signals
            if all(signal in region.signals for region in self.regions)
        }
        if question is not None and parts.relevance is not None:
            patches = signals.get("relevance", features)
            instruction = Instruction(patches, *question, parts.relevance.sign)
        if "tower_keys" in signals:
            next_layer = None
            if "next_keys" in signals:
                next_layer = NextLayer(signals["next_attention"], signals["next_keys"])
            states = signals["encoder"], signals["tower_keys"]
            tower = TowerStates(
                *states, parts.project, signals.get("tower_cls"), next_layer
            )
        if "merger_norms" in signals:
            merger_input = MergerInput(
                signals["merger_norms"], lambda: self._cosine("encoder")
            )
        return replace(
            bare,
            cls_attention=signals.get("cls_attention"),
            instruction=instruction,
            known_cosine=lambda: self._cosine("projected"),
            tower=tower,
            language=language,
            encoder=signals.get("encoder"),
            words=words,
            merger_input=merger_input,
        )

    def _cosine(self, compared: Compared) -> Tensor:
        """Cosines ``(B, N, N)`` between the tokens of each image."""
        return stack([region.cosine(compared) for region in self.regions])


@lru_cache(maxsize=256)
def _digest(choice: Choice) -> bytes:
    """Digest of one question: the plan of every later recall of an image repeats it."""
    return hashlib.sha256(repr(choice).encode()).digest()


def _present(parts: Sequence[T | None]) -> list[T]:
    return [part for part in parts if part is not None]
