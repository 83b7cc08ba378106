"""Image tokens are named after what they show, in a basis that words find but do not share."""

from __future__ import annotations

import torch

from benchmarks.minillava.vocabulary import token_id
from benchmarks.miniqwen.pages import Page
from benchmarks.miniqwen.sizes import Size
from benchmarks.miniqwen.training.models import LANGUAGE_WIDTH, build_model, image_basis
from benchmarks.miniqwen.training.naming import name_tokens, naming_loss
from benchmarks.miniqwen.training.pictures import View, draw_pictures
from benchmarks.miniqwen.vocabulary import language_tokenizer

SIZE = Size(6, 9)


def test_a_number_is_named_by_its_digits_and_its_words() -> None:
    words = language_tokenizer()
    pictures = draw_pictures(3, 1, 3, View(SIZE, SIZE))
    names = name_tokens(words, pictures.labels)
    assert names.shape[:2] == (4, SIZE.tokens)
    for index, page in enumerate(pictures.contents):
        if not isinstance(page, Page):
            continue
        for number in page.numbers:
            tens, units = str(number.value)[0], str(number.value)[1]
            texts = {f"\u0120{tens}", units}
            texts |= {f"\u0120{one.text}" for one in (number.label, number.head) if one}
            share = names[index, number.row * SIZE.columns + number.column]
            assert set(share.nonzero().flatten().tolist()) == {token_id(words, t) for t in texts}
            torch.testing.assert_close(share.sum(), torch.tensor(1.0))


def test_rows_in_the_image_basis_have_the_least_loss() -> None:
    table = torch.nn.functional.normalize(torch.randn(768, LANGUAGE_WIDTH), dim=-1)
    names = torch.zeros(1, 4, 768)
    names[0, torch.arange(3), torch.tensor([5, 9, 700])] = 1.0
    rows = torch.zeros(1, 4, LANGUAGE_WIDTH)
    rows[0, :3] = table[[5, 9, 700]] @ image_basis()
    assert naming_loss(rows, table, names) < 0.1
    # Not in the basis of words, in which a word would find itself.
    rows[0, :3] = table[[5, 9, 700]]
    assert naming_loss(rows, table, names) > 3.0


def test_untrained_heads_find_the_image_token_of_a_word() -> None:
    torch.manual_seed(0)
    language = build_model(language_tokenizer()).model.language_model
    attention = language.layers[0].self_attn
    words = torch.randn(50, LANGUAGE_WIDTH)
    images = words @ image_basis()
    query = attention.q_norm(attention.q_proj(words).unflatten(-1, (6, 32)))
    for rows, expected in ((images, True), (words, False)):
        key = attention.k_norm(attention.k_proj(rows).unflatten(-1, (6, 32)))
        found = torch.einsum("ahd,bhd->hab", query, key)[:4].sum(0).argmax(-1)
        assert bool((found == torch.arange(50)).all()) == expected
