from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.base_policies.samples import images, native, select, tower_of
from vllm_autoprune import Grid, SelectionError, VisualTokens
from vllm_autoprune.tpdsl.tokens import NextLayer, TowerStates

COUNT = 40


def attended(strong: dict[int, float], count: int = COUNT) -> Tensor:
    """``(1, count)``: 0.01 and a little for every token, but for those that stand out."""
    attention = 0.01 + 1e-5 * torch.arange(count).flip(0)
    for token, value in strong.items():
        attention[token] = value
    return attention[None]


def image_of(attention: Tensor, keys: Tensor | None = None) -> VisualTokens:
    batch, count = attention.shape
    patches = torch.eye(count).expand(batch, -1, -1)
    known = patches if keys is None else keys
    tower = TowerStates(
        patches, known, project=lambda rows: rows, next_layer=NextLayer(attention, known)
    )
    return VisualTokens(patches, Grid(1, count), tower=tower)


def reference_prumerge(tokens: VisualTokens, kept: list[int]) -> tuple[Tensor, Tensor]:
    """Merged rows and the extra row in float64, from the definition."""
    following = tokens.require_next_layer()
    a, keys = following.attention[0].double(), following.keys[0].double()
    x = tower_of(tokens).patches[0].double()
    unit = keys / keys.norm(dim=1, keepdim=True)
    rows = []
    for i in kept:
        others = [j for j in range(len(a)) if j != i]
        near = sorted(others, key=lambda j: (-float(unit[i] @ unit[j]), j))[:32]
        rows.append(x[i] + sum(a[j] * x[j] for j in near))
    dropped = [j for j in range(len(a)) if j not in kept]
    extra = torch.stack([a[j] * x[j] for j in dropped]).sum(dim=0)
    return torch.stack(rows), extra


def test_outliers_come_first_by_attention_then_an_even_spread() -> None:
    tokens = image_of(attended({30: 0.2, 7: 0.5}))
    actual = select("prumerge_plus", tokens, 7)
    # Six tokens: two outliers, and the middles of four equal parts of the 38 others.
    assert actual.picks.tolist() == [[7, 30, 4, 15, 24, 35]]
    assert actual.extra is not None and actual.extra.shape == (1, 1, COUNT)


def test_more_outliers_than_rows_leave_no_room_for_samples() -> None:
    tokens = image_of(attended({5: 0.3, 9: 0.5, 20: 0.4, 21: 0.2}))
    assert select("prumerge_plus", tokens, 4).picks.tolist() == [[9, 20, 5]]


def test_batch_of_images_with_different_outlier_counts() -> None:
    few, many = attended({30: 0.2}), attended({1: 0.3, 2: 0.4, 3: 0.5})
    actual = select("prumerge_plus", image_of(torch.cat([few, many])), 6)
    for image, attention in enumerate((few, many)):
        alone = select("prumerge_plus", image_of(attention), 6)
        assert actual.picks[image].tolist() == alone.picks[0].tolist()


def test_without_plus_attention_alone_decides() -> None:
    tokens = image_of(attended({30: 0.2, 7: 0.5}))
    assert select("prumerge_plus", tokens, 5, plus=False).picks.tolist() == [[7, 30, 0, 1]]


def test_drop_extra_keeps_one_token_more() -> None:
    tokens = images(1)
    with_row = select("prumerge_plus", tokens, 9)
    without = select("prumerge_plus", tokens, 9, drop_extra=True)
    assert with_row.picks.shape == (2, 8) and with_row.extra is not None
    assert without.picks.shape == (2, 9) and without.extra is None


@pytest.mark.parametrize("budget", [1, 2, 9, 35])
def test_neighbours_are_added_unnormalised_and_the_rest_is_summed(budget: int) -> None:
    tokens = images(2, batch=1)
    tower = tower_of(tokens)
    actual = select("prumerge_plus", tokens, budget)
    assert actual.merged is not None
    rows, extra = reference_prumerge(tokens, actual.picks[0].tolist())
    torch.testing.assert_close(actual.merged[0], tower.project(rows.float()), rtol=1e-4, atol=1e-4)
    assert (actual.extra is None) == (budget == 1)
    if actual.extra is not None:
        torch.testing.assert_close(
            actual.extra[0, 0], tower.project(extra.float()), rtol=1e-4, atol=1e-4
        )


class TestPublishedCount:
    """Published code without a budget."""

    def test_samples_start_at_zero_and_never_reach_the_last_token(self) -> None:
        # 4 of 40 stand out: the stride is int(10 / 3) = 3.
        tokens = image_of(attended({5: 0.3, 9: 0.5, 20: 0.4, 21: 0.2}))
        indices = native("prumerge_plus", tokens).indices[0].tolist()
        samples = [i for i in range(0, 39, 3) if i not in (5, 9, 20, 21)]
        assert indices == [9, 20, 5, 21, *samples, -1]

    def test_without_plus_outliers_are_all(self) -> None:
        tokens = image_of(attended({5: 0.3, 9: 0.5, 20: 0.4, 21: 0.2}))
        assert native("prumerge_plus", tokens, plus=False).indices[0].tolist() == [9, 20, 5, 21, -1]

    def test_division_by_zero_in_the_published_code_is_an_error(self) -> None:
        with pytest.raises(SelectionError, match="0% of the tokens are outliers"):
            native("prumerge_plus", image_of(attended({})))

    def test_rows_are_those_of_the_definition(self) -> None:
        tokens = image_of(attended({3: 0.3, 8: 0.4}, 36), images(3).features[:1])
        actual = native("prumerge_plus", tokens)
        assert actual.features is not None
        rows, extra = reference_prumerge(tokens, actual.indices[0][:-1].tolist())
        wanted = torch.cat([rows, extra[None]]).float()
        torch.testing.assert_close(actual.features[0], wanted, rtol=1e-4, atol=1e-5)


def test_a_given_count_is_filled_from_the_top_as_effivlm_bench_does() -> None:
    tokens = image_of(attended({5: 0.3, 9: 0.5}))
    # Stride 40 // 6 = 6: 0, 6, 12, 18, ... of which four are free to take.
    indices = native("prumerge_plus", tokens, 6).indices[0].tolist()
    assert indices == [9, 5, 0, 6, 12, 18, -1]


@pytest.mark.parametrize("budget", [7, 9])
def test_tiles_are_merged_each_on_its_own(budget: int) -> None:
    tokens = images(4, batch=1, grid=Grid(3, 4, tiles=3))
    following, tower = tokens.require_next_layer(), tower_of(tokens)
    actual = select("prumerge_plus", tokens, budget)
    assert actual.extra is not None and actual.extra.shape[1] == 3 and actual.merged is not None
    for number in range(3):
        rows = slice(12 * number, 12 * number + 12)
        own = NextLayer(following.attention[:, rows], following.keys[:, rows])
        states = TowerStates(tower.patches[:, rows], tower.keys[:, rows], tower.project, None, own)
        tile = VisualTokens(tokens.features[:, rows], Grid(3, 4), tower=states)
        alone = select("prumerge_plus", tile, budget // 3 + (number < budget % 3))
        mine = actual.picks[0] // 12 == number
        assert (actual.picks[0, mine] - 12 * number).tolist() == alone.picks[0].tolist()
        assert alone.merged is not None and alone.extra is not None
        torch.testing.assert_close(actual.merged[0, mine], alone.merged[0])
        torch.testing.assert_close(actual.extra[0, number], alone.extra[0, 0])
