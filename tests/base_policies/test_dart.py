from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.base_policies.samples import START, TEXT, images, language_of, native, prefix, select
from vllm_autoprune import VisualTokens
from vllm_autoprune.base_policies.dart import DartParams
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES


def reference_dart(
    tokens: VisualTokens, turns: list[int], shares: list[int], visual: list[int]
) -> list[int]:
    """Kept tokens of the first image in pick order, in float64, from the definition."""
    states = language_of(tokens).recorded_normed
    assert states is not None
    unit = states[0].double() / states[0].double().norm(dim=1, keepdim=True)
    kept = list(visual)
    for turn, share in zip(turns, shares, strict=True):
        left = [i for i in range(tokens.count) if i not in kept]
        kept += sorted(left, key=lambda i: (float(unit[turn] @ unit[START + i]), i))[:share]
    return kept


def pivots(tokens: VisualTokens) -> tuple[list[int], list[int]]:
    """Visual pivots counted within the image, text pivots absolute, strongest first."""
    keys = language_of(tokens).recorded_keys
    assert keys is not None
    length = keys[0].double().abs().sum(dim=(0, 2)).tolist()
    behind = START + tokens.count
    text = [behind + i for i in range(TEXT) if bool(language_of(tokens).text[0, i])]
    visual = sorted(range(tokens.count), key=lambda i: (-length[START + i], i))[:4]
    return visual, sorted(text, key=lambda i: (-length[i], i))[:4]


@pytest.mark.parametrize("seed", range(6))
def test_the_published_rule(seed: int) -> None:
    tokens = images(seed, batch=1)
    visual, text = pivots(tokens)
    # As the port has it: a set of positions, in whatever order Python walks it.
    turns = list({*(START + i for i in visual), *text})
    kept = native("dart", tokens, 17).indices[0].tolist()
    assert kept == sorted(reference_dart(tokens, turns, [2] * 8, visual))
    assert len(kept) == 4 + 8 * 2


@pytest.mark.parametrize("budget", [4, 5, 11, 12, 20, 30, 35])
def test_exactly_k_with_the_remainder_to_the_first_turns(budget: int) -> None:
    tokens = images(7, batch=1)
    visual, text = pivots(tokens)
    turns = sorted([*(START + i for i in visual), *text], key=lambda p: (p % 32, p))
    each, rest = divmod(budget - 4, 8)
    shares = [each + (turn < rest) for turn in range(8)]
    assert select("dart", tokens, budget).picks[0].tolist() == reference_dart(
        tokens, turns, shares, visual
    )


def test_without_collisions_in_pythons_table_the_turns_are_the_published_ones() -> None:
    same = 0
    for seed in range(20):
        tokens = images(seed, batch=1)
        visual, text = pivots(tokens)
        positions = [*(START + i for i in visual), *text]
        if len({position % 32 for position in positions}) < 8:
            continue
        served = select("dart", tokens, 20).picks[0].sort().values
        assert torch.equal(served, native("dart", tokens, 16).indices[0])
        same += 1
    assert same >= 3


def test_fewer_than_four_rows_are_the_strongest_pivots() -> None:
    tokens = images(8, batch=1)
    visual, _ = pivots(tokens)
    for budget in (1, 2, 3):
        assert select("dart", tokens, budget).picks[0].tolist() == visual[:budget]


def test_strength_is_the_l1_length_over_all_heads() -> None:
    # Two heads of width 2. Token 1 is longest by L2, token 2 by L1.
    keys = torch.zeros(2, 6, 2)
    keys[0, 1 + 1] = torch.tensor([3.0, 0.0])
    keys[:, 1 + 2] = 1.0
    states = torch.ones(6, 2)
    tokens = prefix(4, [True], keys=keys, normed=states)
    assert select("dart", tokens, 1).picks.tolist() == [[2]]


def test_text_before_the_image_and_padding_are_no_pivots() -> None:
    tokens = images(9, batch=1)
    language = language_of(tokens)
    assert language.recorded_keys is not None
    keys = language.recorded_keys.clone()
    text = language.text.clone()
    text[0, -1] = False
    changed = replace(tokens, language=replace(language, text=text))
    wanted = select("dart", changed, 20).picks
    keys[:, :, :START] = 100.0
    keys[:, :, -1] = 100.0
    louder = replace(language, text=text, recorded_keys=keys)
    assert torch.equal(select("dart", replace(tokens, language=louder), 20).picks, wanted)


def test_an_instruction_of_one_token_takes_all_four_turns_of_the_text() -> None:
    tokens = images(10, batch=1)
    language = language_of(tokens)
    text = torch.zeros_like(language.text)
    text[0, 0] = True
    short = replace(tokens, language=replace(language, text=text))
    visual, _ = pivots(tokens)
    word = START + tokens.count
    turns = sorted([*(START + i for i in visual), *[word] * 4], key=lambda p: (p % 32, p))
    actual = select("dart", short, 20).picks[0].tolist()
    assert actual == reference_dart(short, turns, [2] * 8, visual)


def test_the_embeddings_alone_need_no_layer() -> None:
    tokens = images(11, batch=1)
    language = language_of(tokens)
    embeddings = language.recorded_embeddings
    assert embeddings is not None
    none = replace(
        language, recorded_normed=None, recorded_keys=None, recorded_states=None, layers=1
    )
    actual = select("dart", replace(tokens, language=none), 12, space="embeddings").picks
    as_layer = replace(
        language, recorded_normed=embeddings, recorded_keys=embeddings[:, None], layers=2
    )
    assert torch.equal(actual, select("dart", replace(tokens, language=as_layer), 12).picks)


def test_the_published_layer_is_the_default() -> None:
    defaults = BASE_POLICIES["dart"].call.model_validate({"name": "dart"}).params
    assert defaults == DartParams(space="layer", layer=2)
