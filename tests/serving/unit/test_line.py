"""Positions of one axis: tokens of pruned images on the line of the whole prompt."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.multimodal.inputs import PlaceholderRange

from vllm_autoprune.serving.api.positions import PromptItem, pack_items
from vllm_autoprune.serving.models.line import PrunedLine, lay_on_line
from vllm_autoprune.serving.plan import LINE, MAX_SPAN, MROPE, ItemPlan
from vllm_autoprune.serving.worker.rows import (
    KeptRows,
    count_channels,
    decode_offsets,
    encode_offsets,
)
from vllm_autoprune.tpdsl.tokens import Positions

WIDTH = 4
"""Of a row of the model, beside its channels."""


@dataclass
class Prompt:
    """A prompt with items, and where each of its tokens stands in the whole one."""

    places: list[PlaceholderRange] = field(default_factory=list)
    plans: dict[int, ItemPlan | None] = field(default_factory=dict)
    tokens: list[Tensor] = field(default_factory=list)
    """The kept tokens of each item."""
    expected: list[int] = field(default_factory=list)
    end: int = 0
    """The position of the next token in the whole prompt."""

    @property
    def length(self) -> int:
        return len(self.expected)

    def rows(self, number: int, low: int, high: int) -> Tensor:
        """Rows of an item from ``low`` to ``high``, with the channels of its plan."""
        plan = self.plans[number]
        tokens = self.tokens[number]
        bare = torch.zeros(len(tokens), WIDTH)
        if plan is None:
            return bare[low:high]
        kept_rows = KeptRows(bare, tokens, tokens)
        return kept_rows.with_channels(LINE, plan, plan.tokens)[low:high]

    def write_text(self, count: int) -> None:
        self.expected.extend(range(self.end, self.end + count))
        self.end += count

    def write_item(
        self,
        plan: ItemPlan | None,
        tokens: list[int],
        marks: int = 0,
        start: int | None = None,
    ) -> None:
        """Write an item between marks, its image at ``start`` or its tokens one after the other."""
        count = len(tokens)
        is_embed = torch.tensor([False] * marks + [True] * count + [False] * marks)
        place = PlaceholderRange(
            self.length, len(is_embed), is_embed if marks else None
        )
        self.places.append(place)
        self.plans[len(self.plans)] = plan
        self.tokens.append(torch.tensor(tokens))
        self.write_text(marks)
        if start is None:
            self.write_text(count)
        else:
            self.expected.extend(start + token for token in tokens)

    def write_image(self, number: int, rng: Random) -> None:
        """Write an image that is placed, packed, without a plan, or a core and a delta."""
        size = rng.randint(6, 40)
        marks = rng.choice([0, 0, 2])
        budget = rng.randint(2, size - 1)
        tokens = sorted(rng.sample(range(size), budget))
        plan = ItemPlan(budget, (number + 1, 0), tokens=size)
        kind = rng.choice(["placed", "packed", "unplanned", "parts"])
        if kind == "packed":
            self.write_item(replace(plan, positions="packed"), tokens, marks)
        elif kind == "unplanned":
            self.write_item(None, tokens, marks)
        elif kind == "placed":
            start = self.end + marks
            self.write_item(plan, tokens, marks, start)
            self.end = start + size
        else:
            core, delta = plan.split(budget // 2)
            rng.shuffle(tokens)
            start = self.end
            self.write_item(core, tokens[: core.budget], start=start)
            self.end = start + size
            self.write_text(rng.randint(0, 2))
            self.write_item(delta, tokens[core.budget :], start=start)
        self.write_text(marks)


def prompt_of_one_image(offset: int, text_behind: int, expected: list[int]) -> Prompt:
    """A prompt with an image of ten tokens, of which the second and the fifth are kept."""
    prompt = Prompt()
    prompt.write_text(offset)
    prompt.write_item(ItemPlan(2, (1, 0), tokens=10), [1, 4], start=offset)
    prompt.end = offset + 10
    prompt.write_text(text_behind)
    assert prompt.expected == expected
    return prompt


def line_model() -> Any:
    model: Any = PrunedLine.__new__(PrunedLine)
    vision: Any = type("Vision", (), {"row_width": WIDTH})()
    vars(model).update(autoprune=vision, autoprune_table=1 << 20, autoprune_axes=LINE)
    return model


def prefill(prompt: Prompt, edges: list[int]) -> tuple[Tensor, int]:
    """Positions of a prompt that is computed in steps which end at these tokens."""
    model = line_model()
    positions, delta = lay_on_line(prompt.length, prompt.places, prompt.plans)
    assert delta == prompt.end - prompt.length
    for low, high in zip([0, *edges], [*edges, prompt.length], strict=True):
        embeddings = []
        for number, placeholder in enumerate(prompt.places):
            start = max(low, placeholder.offset)
            end = min(high, placeholder.offset + placeholder.length)
            if start >= end:
                continue
            rows_of_step = (start - placeholder.offset, end - placeholder.offset)
            if placeholder.is_embed is not None:
                rows_of_step = placeholder.get_embeds_indices_in_range(*rows_of_step)
            if rows_of_step[0] < rows_of_step[1]:
                embeddings.append(prompt.rows(number, *rows_of_step))
        ids = list(range(prompt.length))
        for _ in range(2):  # a request that was preempted is computed again
            rows, positions, delta = model.recompute_mrope_positions(
                ids, embeddings, positions, low
            )
            assert all(part.shape[1] == WIDTH for part in rows)
    return positions, delta


@pytest.mark.compat
@pytest.mark.parametrize("seed", range(60))
def test_every_token_stands_where_it_does_in_the_whole_prompt(seed: int) -> None:
    """Text, marks, kept tokens and what is decoded; whatever the edges of chunks are."""

    def write_prompt(seed: int) -> Prompt:
        """A random prompt: text, images with marks around them, cores with deltas, packed ones."""
        rng = Random(seed)
        prompt = Prompt()
        for number in range(rng.randint(1, 5)):
            prompt.write_text(rng.randint(1, 9))
            prompt.write_image(number, rng)
        prompt.write_text(rng.randint(1, 9))
        return prompt

    prompt = write_prompt(seed)
    rng = Random(seed)
    edges = sorted(rng.sample(range(1, prompt.length), min(3, prompt.length - 1)))
    for steps in ([], edges):
        positions, delta = prefill(prompt, steps)
        assert positions[0].tolist() == prompt.expected
        assert delta == prompt.end - prompt.length


@pytest.mark.compat
def test_parts_that_come_as_embeddings_are_text() -> None:
    """vLLM leaves them out of the features of a prompt, and gives their rows with an image's."""
    prompt = prompt_of_one_image(5, 1, [0, 1, 2, 3, 4, 6, 9, 15])
    model = line_model()
    (positions, _) = lay_on_line(8, prompt.places, prompt.plans)
    part: Any = torch.zeros(3, WIDTH)
    part.modality = "prompt_embeds"
    rows = [part, prompt.rows(0, 0, 2)]
    _, placed, delta = model.recompute_mrope_positions(None, rows, positions, 0)
    assert placed[0].tolist() == prompt.expected
    assert delta == 8


@pytest.mark.compat
def test_decoding_goes_on_behind_an_image_that_ends_its_prompt() -> None:
    prompt = prompt_of_one_image(3, 0, [0, 1, 2, 4, 7])
    positions, delta = prefill(prompt, [4])
    assert (positions[0].tolist(), delta) == (prompt.expected, 8)


@pytest.mark.compat
@pytest.mark.parametrize(
    ("where", "expected"),
    [("true", [0, 5, 6, 300]), ("spread", [0, 100, 200, 300]), ("packed", None)],
)
def test_rows_carry_where_their_tokens_stand(
    where: Positions, expected: list[int] | None
) -> None:
    plan = ItemPlan(4, (1, 0), tokens=400, positions=where)
    rows = torch.zeros(4, WIDTH)
    positions = torch.tensor([0, 5, 6, 300])
    kept_rows = KeptRows(rows.bfloat16(), positions, positions)
    with_channels = kept_rows.with_channels(LINE, plan, 400)
    offsets, is_set = decode_offsets([with_channels[:, WIDTH:]])
    assert is_set.tolist() == [expected is not None] * 4
    if expected is not None:
        assert offsets.tolist() == [expected]


@pytest.mark.compat
def test_channels_hold_every_position_that_an_item_may_have() -> None:
    offsets = torch.arange(MAX_SPAN)[:, None]
    channels = encode_offsets(offsets)
    assert channels.shape[1] == count_channels(LINE) == count_channels(MROPE) // 3
    assert torch.equal(decode_offsets([channels.bfloat16()])[0], offsets.T)


def items(*parts: tuple[int, int, int | None, int]) -> list[PromptItem]:
    return [PromptItem(*part) for part in parts]


@pytest.mark.compat
def test_an_image_keeps_its_places_while_it_ends_within_three_quarters_of_the_context() -> (
    None
):
    pair = items((5, 10, 100, 0), (20, 10, 100, 1))
    # The second begins 90 positions later than its token, and ends at 210.
    assert pack_items(pair, 280) == (set(), 180)
    assert pack_items(pair, 279) == ({1}, 90)
    assert pack_items(pair, 140) == ({1}, 90)
    assert pack_items(pair, 139) == ({0, 1}, 0)
    assert pack_items(items((5, 10, 10, 0)), 8) == (set(), 0)  # whole: as in stock vLLM
    assert pack_items(items((5, 10, 4, 0)), 8) == (set(), -6)
    assert pack_items(items((0, 10, MAX_SPAN + 1, 0)), 1 << 20) == ({0}, 0)
    assert pack_items(items((0, 10, None, 0)), 100) == (set(), 0)


@pytest.mark.compat
def test_parts_of_an_image_are_packed_together() -> None:
    parts = items((5, 10, 100, 0), (15, 4, 100, 0), (30, 10, 50, 1), (50, 6, 100, 0))
    assert pack_items(parts, 1000) == (set(), 100 - 20 + 40)
    assert pack_items(parts, 130) == ({0, 1, 3}, 40)


@pytest.mark.compat
@pytest.mark.parametrize("seed", range(20))
def test_what_is_packed_depends_on_the_prefix_alone(seed: int) -> None:
    rng = Random(seed)
    prompt_items = list[PromptItem]()
    offset = 0
    for number in range(30):
        offset += rng.randint(0, 30)
        length = rng.randint(1, 20)
        prompt_items.append(
            PromptItem(
                offset, length, rng.choice([None, length, rng.randint(1, 300)]), number
            )
        )
        offset += length
    packed, _ = pack_items(prompt_items, 1500)
    assert packed and len(packed) < len(prompt_items)
    for count in range(len(prompt_items)):
        assert pack_items(prompt_items[:count], 1500)[0] == {
            i for i in packed if i < count
        }
