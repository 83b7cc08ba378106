"""Inputs of a policy: image features, tower states, language model."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.serving.unit.batches import GRID, N, Space, blind, images, parts, plan, pruned
from tests.serving.unit.samples import region, rows_of, served
from vllm_autoprune import VisualTokens
from vllm_autoprune.serving.shared.plan import Ids
from vllm_autoprune.serving.shared.state_codec import encode_state
from vllm_autoprune.serving.worker.batch import prune_images
from vllm_autoprune.serving.worker.cores import CoreCache
from vllm_autoprune.serving.worker.fallbacks import FallbackReporter
from vllm_autoprune.serving.worker.features import ImageFeatures, TowerFeatures
from vllm_autoprune.serving.worker.region_selection import ModelParts, SelectionContext
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, BasePolicyParams, ReferenceSelection
from vllm_autoprune.tpdsl.tokens import Need


class Prefix:
    """Fake language prefix that records its image and token ids."""

    def __init__(self, image: Tensor, ids: Ids) -> None:
        self.image, self.ids = image, ids
        self.start, self.layers = 1, 4
        self.text = torch.ones(1, max(1, len(ids)), dtype=torch.bool)

    def embeddings(self) -> Tensor:
        return self.image[None]

    def states(self, layer: int) -> Tensor:
        return self.image[None]

    def normed(self, layer: int) -> Tensor:
        return self.image[None]

    def keys(self, layer: int) -> Tensor:
        return self.image[None, None]

    def attention(self, layer: int) -> Tensor:
        return self.image[None, None]


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> list[VisualTokens]:
    """Make the shipped state's base policy read everything, and record its inputs."""
    seen: list[VisualTokens] = []
    real = BASE_POLICIES["cdpruner"]

    def noted(params: BasePolicyParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
        seen.append(tokens)
        return ReferenceSelection(torch.arange(budget).expand(tokens.batch, -1))

    needs: frozenset[Need] = frozenset({"tower", "next_layer", "language"})
    policy = dataclasses.replace(real, needs=needs, function=noted)
    monkeypatch.setitem(BASE_POLICIES, "cdpruner", policy)
    return seen


def towered(seed: int) -> ImageFeatures:
    source = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source)

    tower = TowerFeatures(random(N, 5), random(1, 5), random(N, 3), random(N).abs(), random(N, 5))
    return ImageFeatures((dataclasses.replace(region(seed, GRID), tower=tower),))


def test_a_policy_is_given_the_tower_and_the_language_model(reading: list[VisualTokens]) -> None:
    image_list = [towered(1), towered(2)]
    plans = [plan(8, 1, language=(5, 6)), plan(8, 2, language=(7,))]
    model = ModelParts(lambda rows: 2 * rows, Space(), Prefix)
    reporter = FallbackReporter()
    rows = prune_images(SelectionContext(blind(), model, reporter), plans, image_list)
    assert reporter.meter.errors == {}
    assert [r.shape for r in rows] == [(8, 16)] * 2
    for tokens, one, item_plan in zip(reading, image_list, plans, strict=True):
        assert tokens.batch == 1, "instructions differ in length, and nothing may be padded"
        assert isinstance(tokens.language, Prefix)
        assert tokens.language.ids == item_plan.language
        assert torch.equal(tokens.language.image, one.rows())
        tower, known = tokens.require_tower(), one.regions[0].tower
        assert known is not None
        assert torch.equal(tower.patches[0], known.patches)
        assert torch.equal(tower.keys[0], known.keys)
        assert tower.cls is not None and torch.equal(tower.cls[0], known.cls)
        following = tokens.require_next_layer()
        read = (following.attention[0], following.keys[0])
        assert known.next_attention is not None and torch.equal(read[0], known.next_attention)
        assert known.next_keys is not None and torch.equal(read[1], known.next_keys)
        assert torch.equal(tower.project(tower.patches), 2 * tower.patches)


def test_the_tower_alone_is_read_of_many_images_at_once(
    reading: list[VisualTokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs: frozenset[Need] = frozenset({"tower"})
    policy = dataclasses.replace(BASE_POLICIES["cdpruner"], needs=needs)
    monkeypatch.setitem(BASE_POLICIES, "cdpruner", policy)
    image_list = [towered(1), towered(2), towered(3)]
    plans = [plan(8), plan(4), plan(8)]
    reporter = FallbackReporter()
    prune_images(SelectionContext(blind(), parts(), reporter), plans, image_list)
    assert reporter.meter.errors == {}
    assert [tokens.batch for tokens in reading] == [2, 1]
    assert reading[0].language is None
    third = image_list[2].regions[0].tower
    assert third is not None
    assert torch.equal(reading[0].require_tower().patches[1], third.patches)


def test_a_policy_is_given_words_and_tokens_before_the_projector(
    reading: list[VisualTokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs: frozenset[Need] = frozenset({"encoder", "words"})
    policy = dataclasses.replace(BASE_POLICIES["cdpruner"], needs=needs)
    monkeypatch.setitem(BASE_POLICIES, "cdpruner", policy)
    encoder = torch.randn(N, 5, generator=torch.Generator().manual_seed(4))
    alone = ImageFeatures((dataclasses.replace(region(1, GRID), encoder=encoder),))
    plans = [plan(8, 1, language=(5, 6)), plan(8, 2, language=())]
    model = ModelParts(
        lambda rows: rows, Space(), embed=lambda ids: ids[:, None].float() * torch.ones(16)
    )
    reporter = FallbackReporter()
    prune_images(SelectionContext(blind(), model, reporter), plans, [alone, towered(2)])
    assert reporter.meter.errors == {}
    first, second = reading
    assert first.batch == second.batch == 1, "questions differ in length; nothing is padded"
    words = first.require_words()
    assert words.embeddings[0, :, 0].tolist() == [5, 6] and words.used.tolist() == [[True, True]]
    assert second.require_words().embeddings.shape == (1, 0, 16)
    assert torch.equal(first.require_encoder()[0], encoder)
    # A tower holds the same tokens, so they are not kept twice.
    tower = second.require_tower().patches
    assert torch.equal(second.require_encoder(), tower)


def test_a_state_that_reads_no_instruction_embeds_none() -> None:
    space = Space()
    image_list = images(2)
    plans = [plan(8, ids=()), plan(8, ids=())]
    reporter = FallbackReporter()
    assert (
        len(
            prune_images(
                SelectionContext(blind("divprune"), parts(space), reporter), plans, image_list
            )
        )
        == 2
    )
    assert (space.asked, reporter.meter.errors) == ([], {})


def test_patches_are_compared_where_the_images_have_them() -> None:
    (one,) = images(1)
    (whole,) = one.regions
    mirrored = ImageFeatures((dataclasses.replace(whole, patches=-whole.projected),))
    itself = ImageFeatures((dataclasses.replace(whole, patches=whole.projected),))
    plain, same, other = (pruned([plan(8)], [i])[0] for i in (one, itself, mirrored))
    assert torch.equal(plain, same)
    assert not torch.equal(plain, other)


BEFORE: dict[str, object] = {"/rank_at": "merger_in", "/base_policy": {"name": "divprune"}}
AFTER: dict[str, object] = {"/base_policy": {"name": "divprune"}}


def merged(seed: int) -> ImageFeatures:
    """An image with the tokens that enter its merger, wider than those that leave it."""
    source = torch.Generator().manual_seed(100 + seed)
    rows = torch.randn(N, 24, generator=source)
    norms = torch.stack([rows.abs().sum(dim=1), rows.norm(dim=1)], dim=1)
    alone = dataclasses.replace(region(seed, GRID), encoder=rows, merger_norms=norms)
    return ImageFeatures((alone,))


def ranked(one: ImageFeatures) -> ImageFeatures:
    """An image that has nothing but the tokens that enter the merger."""
    (own,) = one.regions
    assert own.encoder is not None
    alone = dataclasses.replace(own, projected=own.encoder, patches=own.projected, encoder=None)
    return ImageFeatures((alone,))


def test_a_state_that_ranks_before_the_merger_keeps_rows_after_it() -> None:
    image_list = [merged(1), merged(2)]
    plans = [plan(8, 1), plan(8, 2)]
    rows = pruned(plans, image_list, served(BEFORE))
    alone = pruned(plans, [ranked(one) for one in image_list], served(AFTER))
    for one, kept, expected in zip(image_list, rows, alone, strict=True):
        assert rows_of(one, kept) == rows_of(ranked(one), expected)
    after = pruned(plans, image_list, served(AFTER))
    assert not torch.equal(torch.stack(after), torch.stack(rows))


def test_plans_that_rank_before_and_after_the_merger_mix() -> None:
    """Each image of a mixed batch keeps what it keeps alone, whichever state is the server's."""
    image_list = [merged(seed) for seed in range(4)]
    before, after = (encode_state(served(changes).state) for changes in (BEFORE, AFTER))
    plans = [plan(8, seed, state=(before, after, b"")[seed % 3]) for seed in range(4)]
    for own in (BEFORE, AFTER):
        together = pruned(plans, image_list, served(own))
        for one, rows, item in zip(image_list, together, plans, strict=True):
            assert torch.equal(rows, pruned([item], [one], served(own))[0])
    swapped = pruned(plans, image_list, served(BEFORE))
    assert torch.equal(swapped[0], together[0]) and torch.equal(swapped[1], together[1])


def test_the_known_cosine_is_that_of_the_server_s_own_state(
    reading: list[VisualTokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs: frozenset[Need] = frozenset()
    policy = dataclasses.replace(BASE_POLICIES["cdpruner"], needs=needs)
    monkeypatch.setitem(BASE_POLICIES, "cdpruner", policy)
    cosine = torch.rand(N, N)
    (own,) = merged(1).regions
    image = ImageFeatures((dataclasses.replace(own, cosine=cosine),))
    before, after = (served({"/rank_at": place}) for place in ("merger_in", "merger_out"))
    encoded = encode_state(before.state), encode_state(after.state)
    assert own.encoder is not None
    for state, known, other in ((before, encoded[0], encoded[1]), (after, *encoded[::-1])):
        reading.clear()
        pruned([plan(8, state=known), plan(8, state=other)], [image, image], state)
        own_view, other_view = (
            next(t for t in reading if (t.merged is None) == (s is encoded[1]))
            for s in (known, other)
        )
        assert torch.equal(own_view.cosine[0], cosine)
        assert not torch.equal(other_view.cosine[0], cosine)


def test_states_that_rank_elsewhere_share_no_core() -> None:
    """One image, one core policy, one cache: each delta stands beside its own state's core."""
    one, core = merged(1), {"/core": {"share": 0.5}}
    cores = CoreCache(1 << 20)

    def delta(changes: dict[str, object], known: CoreCache) -> Tensor:
        reporter = FallbackReporter()
        context = SelectionContext(served({**changes, **core}), parts(), reporter, cores=known)
        (rows,) = prune_images(context, [plan(4, 1, part="delta", core=8)], [one])
        assert reporter.meter.errors == {}
        return rows

    first, second = delta(AFTER, cores), delta(BEFORE, cores)
    assert torch.equal(first, delta(AFTER, CoreCache(0)))
    assert torch.equal(second, delta(BEFORE, CoreCache(0)))
    assert not torch.equal(first, second)


def test_images_without_a_merger_s_input_fall_back_and_say_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reporter = FallbackReporter()
    with caplog.at_level("ERROR", "vllm.autoprune"):
        (rows,) = prune_images(
            SelectionContext(served(BEFORE), parts(), reporter), [plan(8)], images(1)
        )
    assert rows.shape == (8, 16)
    assert reporter.meter.errors == {"SelectionError": 2}
    assert "rank_at" in caplog.text
